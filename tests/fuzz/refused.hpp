// What a fuzz target may do with an input: accept it, or refuse it as bad input in one line.
#pragma once

#include "planner/base/error.hpp"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace moe::test {

// Anything else than an Error of bad input leaves this function and ends the program.
template <class Read>
void accept_or_refuse(const Read& read) {
    try {
        read();
    } catch (const Error& error) {
        const std::string message = error.what();
        if (error.fault() == Fault::bad_input && !message.empty()) return;
        std::fprintf(stderr, "refused as something else than bad input: %s\n", message.c_str());
        std::abort();
    }
}

} // namespace moe::test
