// The verb calibrate for runs of one's own: from a CSV file or a log to a stack that search and replay load.
#include "planner/base/files.hpp"
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <string>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using moe::test::runs_header;
using Json = nlohmann::ordered_json;

namespace {

const std::string row = "mine,my notes,1,Qwen3-30B-A3B,H100,16,BF16,512,1,4096,1,1,8,current,A,150\n";

Json search(const Folder& folder, const std::string& options) {
    return document(folder.run("moe-plan " + moe::test::gpu_search + options + " --json"));
}

} // namespace

TEST_CASE("calibrate --anchor: a CSV file becomes a stack that the verbs load") {
    const Folder folder;
    folder.write("runs.csv", runs_header + row);
    const Json json =
        document(folder.run("moe-plan calibrate --anchor runs.csv --stack bridge-26.08 --out mine.json --json"));
    CHECK(json["base"] == "bridge-26.08");
    REQUIRE(json["runs"].size() == 1);
    const Json& run = json["runs"][0];
    CHECK(run["measured_tflops_per_gpu"].get<double>() == nearly(150.0).epsilon(0.05)); // by the plan's own FLOPs
    CHECK(std::abs(run["after"]["log_residual"].get<double>()) < std::abs(run["before"]["log_residual"].get<double>()));
    CHECK(json["coefficients"].size() > 20);
    const double as_published = search(folder, "--stack bridge-26.08 --precision bf16")["plans"][0]["tflops_per_gpu"],
                 anchored =
                     search(folder, "--stack mine.json --precision bf16 --out plan.json")["plans"][0]["tflops_per_gpu"];
    CHECK((anchored < as_published) == (run["after"]["predicted_tflops_per_gpu"].get<double>() <
                                        run["before"]["predicted_tflops_per_gpu"].get<double>()));
    CHECK(document(folder.run("moe-plan replay plan.json --json"))["tflops_per_gpu"].get<double>() ==
          nearly(anchored).epsilon(0.03));
    CHECK(folder.run("moe-plan explain plan.json --quiet").out.find("Corrected by runs nearby") != std::string::npos);
}

TEST_CASE("calibrate --anchor: a log goes with the plan that it ran") {
    const Folder folder;
    REQUIRE(folder.run("moe-plan " + moe::test::gpu_search + "--stack bridge-26.08 --precision bf16 --out plan.json")
                .status == 0);
    const double step =
        document(folder.run("moe-plan replay plan.json --no-neighbours --json"))["step_seconds"].get<double>();
    std::string log;
    for (int i = 1; i <= 40; ++i)
        log += " [2026-11-20 12:00:00] iteration " + std::to_string(i) +
               "/ 40 | consumed samples: " + std::to_string(64 * i) +
               " | elapsed time per iteration (ms): " + std::to_string(1200.0 * step) +
               " | learning rate: 1.0E-04 | global batch size: 64 | lm loss: 2.0E+00 |\n";
    folder.write("train.log", log);
    const Json json = document(
        folder.run("moe-plan calibrate --anchor plan.json:train.log --stack bridge-26.08 --out s.json --json"));
    REQUIRE(json["runs"].size() == 1);
    CHECK(json["runs"][0]["run_id"] == "train");
    CHECK(json["runs"][0]["after"]["log_residual"].get<double>() <
          json["runs"][0]["before"]["log_residual"].get<double>());
}

TEST_CASE("calibrate --anchor: what cannot be anchors is refused in a line") {
    const Folder folder;
    folder.write("runs.csv", runs_header + row);
    const std::string calibrate = "moe-plan calibrate --out s.json ";
    folder.write("machine.json", moe::read_file(moe::profiles_folder() + "/hardware/h100.json"));
    check_line(folder.run("moe-plan " + moe::test::gpu_search + " --stack machine.json"), 2,
               "machine.json: not a stack that calibrate --anchor wrote: give one, or a name of show stacks");
    check_line(folder.run(calibrate + "--anchor runs.csv"), 2, "--anchor: name the stack");
    check_line(folder.run(calibrate + "--stack bridge-26.08"), 2, "--stack bridge-26.08: is for --anchor");
    check_line(folder.run(calibrate + "--anchor runs.csv --stack moe-plan"), 2, "anchors are for stacks");
    check_line(folder.run(calibrate + "--anchor runs.txt --stack bridge-26.08"), 2,
               "must be a CSV file of runs, or PLAN");
    check_line(folder.run(calibrate + "--anchor runs.csv runs.csv --stack bridge-26.08"), 2,
               "two runs are called mine");
    check_line(folder.run(calibrate + "--anchor runs.csv --stack bridge-26.08 --gpus 2"), 2, "leave --gpus out");
    check_line(folder.run("moe-plan calibrate --out s.txt --anchor runs.csv --stack bridge-26.08"), 2,
               "must end with .json");
    CHECK_FALSE(folder.holds("s.json"));
    folder.write("none.csv", runs_header + "x,a,1,NoSuchModel,H100,16,BF16,512,1,4096,1,1,8,current,A,150\n");
    const auto none = folder.run(calibrate + "--anchor none.csv --stack bridge-26.08");
    CHECK(none.status == 2);
    CHECK(none.err.find("none of the runs can be predicted") != std::string::npos);
}

TEST_CASE("--no-neighbours: predictions without what runs nearby say, and the factor that they say") {
    const Folder folder;
    const Json with = search(folder, "--stack bridge-26.08 --precision bf16")["plans"][0],
               without = search(folder, "--stack bridge-26.08 --precision bf16 --no-neighbours")["plans"][0];
    CHECK(without["neighbours"].is_null());
    CHECK(without["breakdown"]["neighbours"] == 0.0);
    const double factor = with["neighbours"]["factor"].get<double>();
    CHECK(with["plan"] == without["plan"]);
    CHECK(with["step_seconds"].get<double>() == nearly(factor * without["step_seconds"].get<double>()));
    CHECK(with["neighbours"]["runs"].size() == 3);
    double sum = 0.0;
    for (const auto& part : with["breakdown"].items()) sum += part.value().get<double>();
    CHECK(sum == nearly(with["step_seconds"].get<double>()).epsilon(1e-6));
}
