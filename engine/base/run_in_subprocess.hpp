// Work in a process of its own, for what a process that has trained before would change.
#pragma once

#include <functional>
#include <string>

namespace moe::engine {

// Runs `work` in a child process and returns what it returned. Throws an Error of the fault and the words that `work`
// threw, or of what ended the child (failure). The caller has no other threads, and has not begun to use a GPU: the
// driver refuses a process that inherits its state. The child ends with its parent.
std::string run_in_subprocess(const std::function<std::string()>& work);

} // namespace moe::engine
