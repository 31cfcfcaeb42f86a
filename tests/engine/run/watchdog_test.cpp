// Verdicts of the watchdog: which rank it calls hanging, and which not.
#include "engine/run/watchdog.hpp"

#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <string>

using namespace moe;

namespace {

// The watchdog's verdict within `seconds`, of ranks that stand as `standing` tells. A verdict that is expected gets a
// minute: a busy machine may run the watchdog late.
std::string verdict(int ranks, const std::function<run::Standing(int)>& standing, double seconds = 60.0,
                    double patience = 1.0) {
    std::promise<std::string> first;
    std::future<std::string> line = first.get_future();
    run::Watchdog watchdog(ranks, patience, standing, [&first](const std::string& said) { first.set_value(said); });
    const auto enough = std::chrono::duration<double>(seconds);
    return line.wait_for(enough) == std::future_status::ready ? line.get() : "";
}

} // namespace

TEST_CASE("watchdog: the rank that neither gets on nor waits is named, and nobody else") {
    std::array<std::atomic<std::uint64_t>, 3> looks{};
    const auto standing = [&looks](int rank) {
        const std::uint64_t look = looks[static_cast<std::size_t>(rank)]++;
        const std::uint64_t ops = rank == 0 ? look : 7; // only rank 0 gets on
        return run::Standing{ops, rank == 1, "rank " + std::to_string(rank) + ": gemm (layer 3, slot 7)", {}};
    };
    CHECK(verdict(2, standing, 2.6).empty());
    CHECK(verdict(3, standing) == "rank 2: gemm (layer 3, slot 7): hangs: nothing has ended for 1 s and it waits "
                                  "for nobody; if its work takes that long, raise --hang-timeout");
}

TEST_CASE("watchdog: of a rank whose device waits for others, they are named") {
    const std::string line = verdict(1, [](int) {
        return run::Standing{7, false, "rank 0: all_gather (layer -1, slot 0)", "rank 1, 3"};
    });
    CHECK(line.find("and it may wait for rank 1, 3; if its") != std::string::npos);
}

// In a call that looks at nothing a rank may wait for one that was killed: who died is to blame, and said long before
// the patience with a hang is over.
TEST_CASE("watchdog: where another rank has gone, the line says that, and calls nobody hanging") {
    const auto standing = [](int) {
        return run::Standing{7, false, "rank 0: all_gather (layer 3, slot 7)", "rank 1",
                             "rank 1 has died: its connection is closed"};
    };
    CHECK(verdict(1, standing, 60.0, 1e6) ==
          "rank 0: all_gather (layer 3, slot 7): rank 1 has died: its connection is closed");
}

TEST_CASE("watchdog: a rank that gets on or waits now and then is left alone") {
    std::atomic<std::uint64_t> look{0};
    CHECK(verdict(
              1,
              [&](int) {
                  return run::Standing{++look / 2, false, "rank 0", {}};
              },
              2.6)
              .empty());
    CHECK(verdict(
              1,
              [&](int) {
                  return run::Standing{7, ++look % 2 == 0, "rank 0", {}};
              },
              2.6)
              .empty());
}
