// Traces of PyTorch's profiler: a made-up one whose times are known, and what is refused.
#include "planner/base/error.hpp"
#include "tests/support/nearly.hpp"
#include "tools/measured/chrome_trace.hpp"

#include <doctest/doctest.h>

using namespace moe;
using namespace moe::tools;

namespace {

std::string kernel(const std::string& name, double ts, double dur, int stream, int correlation,
                   const std::string& more = "", const std::string& category = "kernel") {
    return fmt::format(R"({{"ph": "X", "cat": "{}", "name": "{}", "pid": 0, "tid": {}, "ts": {}, "dur": {},
        "args": {{"External id": 9, "device": 0, "context": 1, "stream": {}, "correlation": {}, "grid": [1, 2, 3]{}}}}},)",
                       category, name, stream, ts, dur, stream, correlation, more);
}
std::string launch(double ts, int correlation) {
    return fmt::format(R"({{"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 7, "tid": 7, "ts": {},
        "dur": 3, "args": {{"correlation": {}}}}},)",
                       ts, correlation);
}
std::string step(int number, double ts, double dur) {
    return fmt::format(
        R"({{"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#{}", "pid": 7, "tid": 7, "ts": {},
        "dur": {}, "args": {{"External id": 1}}}},)",
        number, ts, dur);
}
// Two steps of 100 us on the host; the device runs behind. Kernel 9 was launched before the first.
std::string events() {
    return step(4, 1000, 100) + step(5, 1100, 100) + launch(990, 9) + launch(1010, 10) + launch(1020, 11) +
           launch(1110, 12) + launch(1150, 13) + kernel("early", 1001, 9, 7, 9) + kernel("gemm_a", 1050, 30, 7, 10) +
           kernel("ncclDevKernel_SendRecv", 1060, 50, 20, 11, R"(, "Collective name": "all_to_allv")") +
           kernel("gemm_a", 1160, 30, 7, 12) +
           kernel("Memcpy DtoH (Device -> Pinned)", 1190, 20, 7, 13, "", "gpu_memcpy") +
           kernel("ProfilerStep#4", 1050, 60, 7, 0, "", "gpu_user_annotation") +
           R"({"ph": "s", "id": 11, "pid": 7, "tid": 7, "ts": 1020, "cat": "ac2g", "name": "ac2g"})";
}
DeviceProfile read(const std::string& text, std::size_t piece = 1 << 16) {
    return read_chrome_trace(pieces_of(text, piece), "my.json");
}
DeviceProfile made_up(std::size_t piece = 1 << 16) {
    return read(
        R"({"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100", "totalGlobalMem": 85899345920}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 16, "pg_config": [{"ranks": [0, 1]}]},
        "traceEvents": [)" +
            events() + R"(], "traceName": "x", "displayTimeUnit": "ms", "baseTimeNanoseconds": 1})",
        piece);
}
void check_refused(const std::string& text, const std::string& words) {
    try {
        read(text);
        FAIL("accepted: " << text.substr(0, 80));
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        CHECK_MESSAGE(std::string(error.what()).find(words) != std::string::npos, error.what());
        CHECK(std::string(error.what()).starts_with("my.json: "));
    }
}

} // namespace

TEST_CASE("trace: kernels, copies, launches, steps, rank and device, whatever the pieces") {
    for (const std::size_t piece : {std::size_t{1}, std::size_t{13}, std::size_t{1} << 16}) {
        const DeviceProfile profile = made_up(piece);
        CHECK(profile.source == "PyTorch profiler");
        CHECK(profile.rank == 3);
        CHECK(profile.world_size == 16);
        CHECK(profile.gpu == "NVIDIA H100");
        CHECK(profile.gpu_gib == 80.0);
        REQUIRE(profile.events.size() == 5);
        CHECK(profile.names.size() == 4);
        CHECK(profile.launches.size() == 5);
        REQUIRE(profile.windows.size() == 2);
        CHECK(profile.windows[1].number == 5);
        const DeviceEvent& collective = profile.events[2];
        CHECK(collective.start == nearly(1060e-6));
        CHECK(collective.end == nearly(1110e-6));
        CHECK(collective.stream == 20);
        CHECK(profile.names[static_cast<std::size_t>(collective.name)].collective == "all_to_allv");
    }
}

TEST_CASE("trace: an event belongs to the step that launched it") {
    const ProfiledSteps steps = steps_of(made_up(), 0, "my.json");
    CHECK(steps.outside == 1); // The fill was launched before the first step, though it ran within it.
    REQUIRE(steps.steps.size() == 2);
    CHECK(steps.events.size() == 4);
    CHECK(steps.steps[0].number == 4);
    CHECK(steps.steps[0].seconds == nearly(110e-6)); // A step lasts to the first event of the next.
    CHECK(steps.steps[1].seconds == nearly(50e-6));
    CHECK(steps.seconds == nearly(80e-6));
    const ProfiledSteps said = steps_of(made_up(), 3, "my.json");
    CHECK(said.said);
    CHECK(said.outside == 0);
    CHECK(said.seconds == nearly((1210e-6 - 1001e-6) / 3));
}

TEST_CASE("trace: the bare list of events, and no device at all") {
    CHECK(read("[" + events() + "]").events.size() == 5);
    const DeviceProfile empty = read(R"({"traceEvents": []})");
    CHECK_THROWS_WITH_AS(steps_of(empty, 0, "my.json"), doctest::Contains("no kernel of a GPU"), Error);
    const DeviceProfile unnamed = read("[" + kernel("a", 1, 2, 7, 1) + R"({"ph": "M", "name": "thread_name"}])");
    CHECK_THROWS_WITH_AS(steps_of(unnamed, 0, "my.json"), doctest::Contains("--steps"), Error);
    CHECK(steps_of(unnamed, 1, "my.json").seconds == nearly(2e-6));
    const DeviceProfile idle = read("[" + step(1, 500, 10) + kernel("a", 1, 2, 7, 1) + R"({"ph": "M"}])");
    CHECK_THROWS_WITH_AS(steps_of(idle, 0, "my.json"), doctest::Contains("nothing ran"), Error);
}

TEST_CASE("trace: what is refused, in one line") {
    check_refused("", "not valid JSON");
    check_refused("hello", "not valid JSON near byte 1");
    check_refused(R"({"traceEvents": [{"ph": "X")", "damaged or cut short");
    check_refused(R"({"events": []})", "no traceEvents");
    check_refused("{}", "no traceEvents");
    check_refused("3", "no traceEvents");
    check_refused(std::string(50, '['), "nested more than 16 deep");
    check_refused(R"({"traceEvents": [{"args": )" + std::string(40, '['), "nested more than 16 deep");
    check_refused(R"({"traceEvents": [{"name": ")" + std::string(2 << 20, 'x') + "\"}]}", "a text of over");
    check_refused(R"({"traceEvents": [{"ts": )" + std::string(5000, '1') + "}]}", "a number of over");
    check_refused(R"({"traceEvents": [{"ph": "X", "cat": "kernel", "name": "a", "ts": 1}]})", "dur");
    check_refused("[" + kernel("a", 1, -2, 7, 1) + "{}]", "dur");
    check_refused("[" + kernel("a", 1, 2, 7, 1, R"(, "stream": 0.5)") + "{}]", "stream");
    check_refused(R"({"distributedInfo": {"rank": -1}, "traceEvents": []})", "rank");
    // An escaped quotation mark ends no text.
    CHECK(read(R"({"a": "\"", "b": "\\", "traceEvents": []})").events.empty());
}
