// Refusals of files that people write: bad input, and a line that names the file.
#pragma once

#include "tests/planner/base/fault_of.hpp"

#include <doctest/doctest.h>

#include <string>

// The call refuses mine.json as bad input with a line that holds these words.
template <class Call>
void check_refused(Call call, const std::string& words) {
    const std::string fault = fault_of(call);
    CAPTURE(fault);
    CHECK(fault.rfind("2: ", 0) == 0);
    CHECK(fault.find(words) != std::string::npos);
    CHECK(fault.find("mine.json") != std::string::npos);
}
