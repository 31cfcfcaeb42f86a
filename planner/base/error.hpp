// The one exception type of the project: what is wrong, the numbers that disagree, and what to change.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>
#include <utility>

namespace moe {

// Exit status of the command that meets the error: a failure while running ends with 1, bad input with 2, a sound
// request that no plan satisfies with 3.
enum class Fault : int { failure = 1, bad_input = 2, no_plan = 3 };

class Error : public std::runtime_error {
public:
    Error(Fault fault, const std::string& message) : std::runtime_error(message), fault_(fault) {}
    Fault fault() const { return fault_; }

private:
    Fault fault_;
};

// The request or a file is wrong: one line that names the place, the numbers and the remedy.
template <class... Args>
[[noreturn]] void refuse(fmt::format_string<Args...> text, Args&&... args) {
    throw Error(Fault::bad_input, fmt::format(text, std::forward<Args>(args)...));
}

// The request is sound, but search has excluded every plan: one line that names the constraint and what would help.
template <class... Args>
[[noreturn]] void infeasible(fmt::format_string<Args...> text, Args&&... args) {
    throw Error(Fault::no_plan, fmt::format(text, std::forward<Args>(args)...));
}

// The request was fine but carrying it out failed (disk, memory, a peer that died).
template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) {
    throw Error(Fault::failure, fmt::format(text, std::forward<Args>(args)...));
}

} // namespace moe
