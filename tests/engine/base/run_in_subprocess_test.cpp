// Work in another process: what it returns, throws or dies of reaches the caller, and nothing else does.
#include "engine/base/run_in_subprocess.hpp"
#include "planner/base/error.hpp"

#include <doctest/doctest.h>

#include <csignal>
#include <string>

#include <unistd.h>

using namespace moe;

namespace {

// "fault: words" of the Error that apart(work) throws.
template <class Work>
std::string thrown(Work work) {
    try {
        engine::run_in_subprocess([&]() -> std::string {
            work();
            return "";
        });
    } catch (const Error& error) {
        return std::to_string(static_cast<int>(error.fault())) + ": " + error.what();
    }
    return "nothing";
}

} // namespace

TEST_CASE("what is computed apart comes back whole, from another process") {
    int changed = 0;
    const std::string long_one(3 << 20, 'x'); // longer than a pipe holds
    CHECK(engine::run_in_subprocess([&] {
              ++changed;
              return long_one;
          }) == long_one);
    CHECK(changed == 0);
    CHECK(engine::run_in_subprocess([] { return std::string(); }).empty());
    const std::string zero("a\0b", 3);
    CHECK(engine::run_in_subprocess([&] { return zero; }) == zero);
    CHECK(engine::run_in_subprocess([] { return std::to_string(::getppid()); }) == std::to_string(::getpid()));
}

TEST_CASE("an error apart is thrown here with its fault; a death there is a failure") {
    CHECK(thrown([] { refuse("no such thing"); }) == "2: no such thing");
    CHECK(thrown([] { fail("out of memory"); }) == "1: out of memory");
    CHECK(thrown([] { throw std::runtime_error("other"); }) == "1: other");
    CHECK(thrown([] { ::raise(SIGKILL); }) == "1: a process that measures ended by signal 9");
    CHECK(thrown([] { ::_exit(3); }) == "1: a process that measures ended without an answer");
}
