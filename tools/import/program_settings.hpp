// The settings of a program that stands between a file and the engine, as those that it hands over.
#pragma once

#include "tools/import/import_plan.hpp"
#include "tools/import/reader_table.hpp"
#include "tools/import/readers/setting.hpp"

#include <vector>

namespace moe::tools {

// Names the program's settings as the engine's program does, adds its defaults, and takes the number of processes from
// them; its harmless settings go to the table.
void take_program(SettingsFile& file, const Program& program, ReaderTable& reader, std::vector<Finding>& findings);

// Throws Error (bad_input) for a setting of `refused`; each of `cautions` that the file has is a finding, and harmless.
void caution(const SettingsFile& file, const std::vector<Caution>& refused, const std::vector<Caution>& cautions,
             ReaderTable& reader, std::vector<Finding>& findings);

// Puts other settings in the place of those that no plan can say.
void read_as_others(SettingsFile& file, const std::vector<StandIn>& list, std::vector<Finding>& findings);

} // namespace moe::tools
