// What a report shows, as a JSON document: the explanation of a plan with its timeline and its memory over time.
#pragma once

#include "tools/report/explanation.hpp"

#include <string>

namespace moe::tools {

// command: as typed, empty where it is not known. docs/schemas/report.json describes the document.
std::string report_document(const Explanation& explanation, const std::string& command);

} // namespace moe::tools
