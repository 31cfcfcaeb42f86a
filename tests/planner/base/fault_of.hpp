// The message with which a call is refused, and its exit status.
#pragma once

#include "planner/base/error.hpp"

#include <string>

// "2: message" for bad input, "3: message" where no plan is left, "1: message" for a failure while running, "" when the
// call returns.
template <class Call>
std::string fault_of(Call call) {
    try {
        call();
    } catch (const moe::Error& error) {
        return fmt::format("{}: {}", static_cast<int>(error.fault()), error.what());
    }
    return {};
}
