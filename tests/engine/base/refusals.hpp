// The message of a refused request.
#pragma once

#include "planner/base/error.hpp"

#include <doctest/doctest.h>

#include <string>

// The message with which `act` refuses; "no error" where it does not.
template <class Act>
std::string message(Act act) {
    try {
        act();
    } catch (const moe::Error& error) {
        CHECK(error.fault() == moe::Fault::bad_input);
        return error.what();
    }
    return "no error";
}

inline bool mentions(const std::string& text, const std::string& words) {
    return text.find(words) != std::string::npos;
}
