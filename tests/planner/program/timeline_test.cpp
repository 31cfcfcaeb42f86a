// Traces: the Chrome trace event rules, the round trip, and every kind of file that is not a trace.
#include "planner/base/files.hpp"
#include "planner/program/timeline.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdio>
#include <map>
#include <set>
#include <string>

namespace {

// Two ranks, two streams, rows that touch each other at times that no decimal fraction can hold.
moe::program::Timeline sample() {
    moe::program::Timeline t;
    t.plan_json = "{\"name\": \"a \\\"quoted\\\" plan\",\n\t\"n\": 1}";
    t.ranks = {0, 8};
    t.pipeline_rank = {0, 1};
    t.represents = {8, 8};
    t.step_seconds = 1.25;
    t.tflops_per_gpu = 123.456;
    t.memory_gib = 17.5;
    for (const int rank : t.ranks) {
        double now = 0.0;
        for (int i = 0; i < 40; ++i) {
            moe::program::TimelineRow row;
            row.rank = rank;
            row.slot = i / 4;
            row.op = i % 4;
            row.layer = static_cast<std::int16_t>(i % 3 - 1);
            row.kind = static_cast<moe::program::OpKind>(i);
            row.stream = i % 5 == 0 ? moe::program::Stream::expert : moe::program::Stream::compute;
            row.module = static_cast<moe::program::Module>(i % 20);
            row.phase = static_cast<moe::program::Phase>(i % 5);
            row.slot_kind = static_cast<moe::plan::SlotKind>(i % 4);
            row.chunk = static_cast<std::int16_t>(i % 2);
            row.micro_batch = i;
            row.start = now;
            now += 1e-3 / 3.0;
            row.end = now;
            row.busy = 1e-4 / 7.0;
            t.rows.push_back(row);
        }
    }
    return t;
}

std::string written(const moe::program::Timeline& t, const char* name) {
    moe::program::write_trace(t, name);
    std::string text = moe::read_file(name);
    std::remove(name);
    return text;
}

std::string fault_of_file(const std::string& content) {
    const char* name = "timeline_test_bad.json";
    moe::write_file(name, content);
    const std::string fault = fault_of([&] { moe::program::read_trace(name); });
    std::remove(name);
    return fault;
}

std::string with(std::string text, const std::string& from, const std::string& to) {
    const std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
}

} // namespace

TEST_CASE("a trace follows the Chrome trace event rules") {
    const nlohmann::json trace = nlohmann::json::parse(written(sample(), "timeline_test_rules.json"));
    CHECK(trace.at("metadata").at("plan") == sample().plan_json);
    std::map<std::pair<int, int>, double> last;
    std::set<int> processes;
    std::set<std::pair<int, int>> threads;
    int complete = 0;
    for (const auto& event : trace.at("traceEvents")) {
        const int pid = event.at("pid");
        if (event.at("ph") == "M") {
            if (event.at("name") == "process_name") processes.insert(pid);
            if (event.at("name") == "thread_name") threads.insert({pid, event.at("tid").get<int>()});
            CHECK(event.at("args").at("name").is_string());
            continue;
        }
        REQUIRE(event.at("ph") == "X");
        ++complete;
        const int tid = event.at("tid");
        const double ts = event.at("ts"), dur = event.at("dur");
        CHECK(ts >= 0.0);
        CHECK(dur >= 0.0);
        CHECK(ts >= last[{pid, tid}] - 1e-6); // nothing overlaps on one thread: viewers would nest it
        last[{pid, tid}] = ts + dur;
        CHECK(processes.count(pid) == 1);
        CHECK(threads.count({pid, tid}) == 1);
        for (const char* key : {"slot", "op", "chunk", "micro_batch", "phase", "layer", "busy"})
            CHECK(event.at("args").contains(key));
    }
    CHECK(complete == 80);
}

TEST_CASE("a trace comes back as it was, to a tenth of a nanosecond") {
    const moe::program::Timeline t = sample();
    moe::program::write_trace(t, "timeline_test_trip.json");
    const moe::program::Timeline back = moe::program::read_trace("timeline_test_trip.json");
    std::remove("timeline_test_trip.json");
    CHECK(back.predicted == t.predicted);
    CHECK(back.plan_json == t.plan_json);
    CHECK(back.ranks == t.ranks);
    CHECK(back.pipeline_rank == t.pipeline_rank);
    CHECK(back.represents == t.represents);
    CHECK(back.step_seconds == t.step_seconds);
    CHECK(back.tflops_per_gpu == t.tflops_per_gpu);
    CHECK(back.memory_gib == t.memory_gib);
    REQUIRE(back.rows.size() == t.rows.size());
    for (std::size_t i = 0; i < t.rows.size(); ++i) {
        const moe::program::TimelineRow &a = t.rows[i], &b = back.rows[i];
        CHECK(std::tuple(a.rank, a.slot, a.op, a.layer, a.kind, a.stream, a.module, a.phase) ==
              std::tuple(b.rank, b.slot, b.op, b.layer, b.kind, b.stream, b.module, b.phase));
        CHECK(std::tuple(a.slot_kind, a.chunk, a.micro_batch) == std::tuple(b.slot_kind, b.chunk, b.micro_batch));
        CHECK(std::abs(b.start - a.start) < 1e-10); // microseconds of four decimals
        CHECK(std::abs(b.end - a.end) < 1e-10);
        CHECK(b.busy == nearly(a.busy).epsilon(1e-5));
    }
}

TEST_CASE("what is not a trace is refused in one line, status 2") {
    const std::string good = written(sample(), "timeline_test_good.json");
    CHECK(fault_of_file(good).empty());
    const auto refused = [](const std::string& text, const char* says) {
        const std::string fault = fault_of_file(text);
        CAPTURE(fault);
        CHECK(fault.rfind("2: ", 0) == 0);
        CHECK(fault.find(says) != std::string::npos);
        CHECK(fault.find('\n') == std::string::npos);
        CHECK(fault.size() < 300);
    };
    refused("", "empty");
    refused("hello", "not valid JSON");
    refused("[]", "not a trace of this program");
    refused("{\"traceEvents\":[]}", "not a trace of this program");
    refused(good.substr(0, good.size() / 2), "cut short");
    refused(good + "}", "not valid JSON");
    refused(with(good, "\"X\"", "\"B\""), "type");
    refused(with(good, "\"name\":\"embedding\"", "\"name\":\"juggle\""), "juggle");
    refused(with(good, "\"ts\":0.0000", "\"ts\":-1.0"), "negative");
    refused(with(good, "\"slot\":0", "\"slot\":0.5"), "slot");
    refused(with(good, "\"slot\":0", "\"slot\":1e300"), "slot");
    refused(with(good, "\"tid\":2,\"name\":\"embedding\"", "\"tid\":99,\"name\":\"embedding\""), "tid");
    refused(with(good, "\"represents\":[8,8]", "\"represents\":[8]"), "1 classes");
    refused(std::string(5000, '['), "nested");
    CHECK(fault_of([] { moe::program::read_trace("no such file"); }).rfind("2: ", 0) == 0);
}

TEST_CASE("a full disk and rows that cannot be leave nothing behind, status 1") {
    CHECK(fault_of([] { moe::program::write_trace(sample(), "/dev/full"); }).rfind("1: ", 0) == 0);
    moe::program::Timeline backwards = sample();
    std::swap(backwards.rows[3].start, backwards.rows[3].end);
    CHECK(fault_of([&] { moe::program::write_trace(backwards, "timeline_test_none.json"); }).rfind("1: ", 0) == 0);
    moe::program::Timeline ragged = sample();
    ragged.represents.pop_back();
    CHECK(fault_of([&] { moe::program::write_trace(ragged, "timeline_test_none.json"); }).rfind("1: ", 0) == 0);
    CHECK(fault_of([] { moe::read_file("timeline_test_none.json"); }).rfind("2: ", 0) == 0);
}
