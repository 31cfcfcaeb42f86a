// Puts the place of what is being read before the message of a call that does not know it.
#pragma once

#include "planner/base/error.hpp"

#include <string>

namespace moe {

// What the call returns. An Error of it that names no place gets "PLACE: " in front.
template <class Call>
auto at_place(const std::string& place, Call call) {
    try {
        return call();
    } catch (const Error& error) {
        const std::string message = error.what();
        if (message.find(place) != std::string::npos) throw;
        throw Error(error.fault(), place + ": " + message);
    }
}

} // namespace moe
