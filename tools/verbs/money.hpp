// The options of search on money, time and failures.
#pragma once

#include "simulator/goodput/outlook.hpp"
#include "tools/verbs/verbs.hpp"

namespace moe::tools {

// Throws Error (bad_input) naming the option that is out of range, or that says nothing without another one.
goodput::Terms terms_of(const MoneyOptions& options);

} // namespace moe::tools
