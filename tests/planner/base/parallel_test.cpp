// Workers: every piece of work is done once, errors pass on by index, and helpers stay from run to run.
#include "planner/base/parallel.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <vector>

TEST_CASE("workers: each piece once, by a worker that there is, for any number of threads and pieces") {
    for (const std::size_t threads : {0U, 1U, 2U, 5U}) {
        moe::Workers workers(threads);
        CHECK(workers.size() == std::max<std::size_t>(threads, 1));
        for (const std::size_t count : {0U, 1U, 2U, 3U, 100U}) {
            CAPTURE(threads);
            CAPTURE(count);
            std::vector<int> done(count, 0);
            std::vector<std::size_t> by(count, 0);
            workers.run(count, [&](std::size_t worker, std::size_t i) {
                ++done[i];
                by[i] = worker;
            });
            CHECK(done == std::vector<int>(count, 1));
            for (const std::size_t worker : by) CHECK(worker < workers.size());
        }
    }
}

TEST_CASE("workers: the first error by index passes on when all pieces are done, and the next run is as any other") {
    moe::Workers workers(3);
    std::vector<int> done(50, 0);
    const auto work = [&](std::size_t, std::size_t i) {
        ++done[i];
        if (i % 20 == 7) throw std::runtime_error(std::to_string(i));
    };
    CHECK_THROWS_WITH(workers.run(done.size(), work), "7");
    CHECK(done == std::vector<int>(50, 1));
    workers.run(7, work);
    CHECK(done[6] == 2);
    CHECK(done[7] == 1);
}

TEST_CASE("workers: many runs are done by the same threads") {
    moe::Workers workers(3);
    std::atomic<int> threads = 0, done = 0;
    for (int run = 0; run < 200; ++run)
        workers.run(8, [&](std::size_t, std::size_t) {
            thread_local bool known = false; // a thread of its own has its own
            if (!known) ++threads;
            known = true;
            ++done;
        });
    CHECK(threads <= 3);
    CHECK(done == 1600);
}
