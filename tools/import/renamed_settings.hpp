// Settings by the names that the table of words has for them, where a file has others.
#pragma once

#include "tools/import/import_plan.hpp"
#include "tools/import/reader_table.hpp"
#include "tools/import/readers/setting.hpp"

#include <vector>

namespace moe::tools {

// Names the settings of a printed list as the engine's options, and leaves out those that nobody set as far as the list
// tells. Options that no plan can say become those that the reader's table takes them for, each with a finding.
// What a program between the file and the engine takes as default becomes settings, its harmless ones go to the table,
// and settings that change what is trained are findings.
void rename_settings(SettingsFile& file, ReaderTable& reader, std::vector<Finding>& findings);

} // namespace moe::tools
