// The JSON document of calibrate --anchor.
#pragma once

#include "tools/calibrate/anchors.hpp"

#include <string>

namespace moe::tools {

// out: the file that the stack was written to.
std::string anchor_document(const Anchoring& anchoring, const std::string& out);

} // namespace moe::tools
