// Runs this command in a process of its own, which ends with whoever waits for it.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace moe::tools::ui {

struct WorkerResult {
    int status = 1;        // exit status of the command, 1 where a signal or a limit ended it
    std::string out;       // what it printed
    std::string last_line; // of its standard error: for a status above 0, why
    bool cancelled = false;
};

struct WorkerCalls {
    std::function<void(std::string_view)> line; // of standard error, as they come
    std::function<bool()> cancelled;            // asked ten times a second: true ends the process
};

// Runs `moe-plan WORDS..` in `folder`. Ends it, with all that it started, when `calls.cancelled` says so, after
// `longest`, or when it prints more than `most` bytes. Throws Error (failure) where no process can be started.
WorkerResult run_worker(const std::vector<std::string>& words, const std::string& folder, const WorkerCalls& calls,
                        std::chrono::seconds longest, std::size_t most);

} // namespace moe::tools::ui
