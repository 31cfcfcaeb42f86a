// Counts what the threads of the ranks allocate in a step: nothing, once the first steps have seen every shape.
#include "tests/engine/train/samples.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>

namespace {

std::atomic<bool>& counting() {
    static std::atomic<bool> on{false};
    return on;
}
std::atomic<long>& allocations() {
    static std::atomic<long> count{0};
    return count;
}
// The thread that asks for steps reads their results into lists of its own; the ranks run on others.
thread_local bool asks_for_steps = false;

void* allocate(std::size_t bytes) noexcept {
    if (counting() && !asks_for_steps) ++allocations();
    return std::malloc(bytes == 0 ? 1 : bytes);
}
// Not inlined: beside an inlined delete the compiler would see free() of what it takes for another allocator's memory.
[[gnu::noinline]] void release(void* memory) noexcept { std::free(memory); }

} // namespace

// All other forms of new and delete come here. The one that does not throw is replaced as well: a sanitizer's would
// pair its memory with the delete below.
void* operator new(std::size_t bytes) {
    if (void* memory = allocate(bytes)) return memory;
    throw std::bad_alloc();
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }

using namespace moe;

TEST_CASE("a step allocates nothing on any rank") {
    asks_for_steps = true;
    const std::vector<std::pair<const char*, std::vector<std::pair<std::string, std::string>>>> cases{
        {"qwen3", {{"tp", "2"}, {"pp", "2"}, {"ep", "2"}, {"aux_loss", "0.01"}}},
        {"deepseek3", {{"tp", "2"}, {"ep", "4"}, {"bias_update", "0.001"}, {"recompute", "moe"}}},
        {"gptoss", {{"pp", "2"}, {"ep", "4"}, {"expert_capacity", "1"}}},
    };
    for (const auto& [model, fields] : cases) {
        train::TrainOptions options;
        options.permits = 2;
        train::Trainer trainer(small_plan(model, 8, fields), options);
        trainer.step(made_up_tokens(61));
        counting() = true;
        std::thread([] { delete new int; }).join(); // the count sees other threads
        const long seen = allocations().exchange(0);
        // The rank that runs ahead, and so the number of messages that wait, differs from step to step: queues grow now
        // and then. Memory that a step allocates itself is there in every step.
        constexpr int patience = 50;
        long least = std::numeric_limits<long>::max();
        for (int step = 0; step < patience && least > 0; ++step) {
            trainer.step(made_up_tokens(61));
            least = std::min(least, allocations().exchange(0));
        }
        counting() = false;
        INFO(model);
        CHECK(seen > 0);
        CHECK(least == 0);
    }
}
