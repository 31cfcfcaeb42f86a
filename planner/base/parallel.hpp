// Independent pieces of work on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace moe {

// asked: 0 = as many as the machine has.
inline std::size_t thread_count(int asked) {
    if (asked > 0) return static_cast<std::size_t>(asked);
    return std::max(1U, std::thread::hardware_concurrency());
}

// Runs work(worker, 0) ... work(worker, count-1) on `threads` workers and passes on the first exception by index.
template <class Work>
void in_parallel(std::size_t count, std::size_t threads, const Work& work) {
    std::atomic<std::size_t> next{0};
    std::vector<std::exception_ptr> errors(count);
    const auto loop = [&](std::size_t worker) {
        for (std::size_t i = next++; i < count; i = next++) {
            try {
                work(worker, i);
            } catch (...) {
                errors[i] = std::current_exception();
            }
        }
    };
    std::vector<std::thread> helpers;
    for (std::size_t i = 1; i < std::min(threads, count); ++i) helpers.emplace_back(loop, i);
    loop(0);
    for (std::thread& helper : helpers) helper.join();
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

} // namespace moe
