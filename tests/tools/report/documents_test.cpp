// The document of a run on GPUs, which no test of the command makes on a CPU, is the one that tests/schemas holds to
// its schema.
#include "planner/base/files.hpp"
#include "tools/report/documents.hpp"

#include <doctest/doctest.h>

#include <cstdlib>

using namespace moe;
using namespace moe::tools;

TEST_CASE("execute: a document with every field is tests/schemas/execute_on_gpus.json") {
    const char* source = std::getenv("SOURCE");
    REQUIRE(source != nullptr);
    RunRecord run;
    run.steps = {{1, 10.5, 9.5, 2.25, 1e-3, 0.5, 300.0, 4096, 12.0, {{3, 0.01, 0.5, 1.5, 0.75, 0.125, 0.25}}, 9.25}};
    run.steps.front().indexers = {{3, 0.125}};
    run.evaluations = {{1, 9.25, 8192}};
    run.peak_memory_gib = 70.5;
    run.backend = "cuda";
    run.ranks = 2;
    run.unigram_entropy = 3.25;
    run.predicted_step_seconds = 0.25;
    run.measured_step_seconds = 0.5;
    run.queued = {1, 700, 3, 5, 0.002, 1e-6, 2e-6};
    run.draw = {4.0, 650.0, 700.0, 1.75e9, 1.98e9};
    run.joined.communicators = 2;
    run.joined.bytes = 2e9;
    run.joined.buffer_bytes = 1e9;
    run.joined.each = {{{static_cast<int>(program::Stream::expert), {0, 1}, true}, 1.5e9},
                       {{program::stream_count, {0, 1}, false}, 5e8}};
    run.command = "moe-plan execute plan.json";
    CHECK(run_document(run) == read_file(std::string(source) + "/tests/schemas/execute_on_gpus.json"));
}
