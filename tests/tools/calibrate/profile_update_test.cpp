// The update of a profile: what runs measured joins the profile that later plans are priced with, by calibrate --runs,
// through the command.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <string>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

// A profile whose only measurement says that additions take a second each.
void write_profile(const Folder& folder, const std::string& name) {
    Json profile = {{"name", name},
                    {"cpu", true},
                    {"cores", 2},
                    {"peak_flops", {{"fp32", 20e9}, {"bf16", 20e9}, {"fp8-blockwise", 20e9}}},
                    {"memory_bytes", 8e9},
                    {"memory_bandwidth", 10e9},
                    {"nvlink_domain", 1024},
                    {"nvlink_domain_used", 1024},
                    {"nvlink", {{"bandwidth", 5e9}, {"latency", 1e-5}}},
                    {"nic", {{"bandwidth", 1e9}, {"latency", 3e-5}}},
                    {"host", {{"bandwidth", 10e9}, {"latency", 1e-6}}},
                    {"context_bytes", 0},
                    {"communicator_bytes", 0},
                    {"default_stack", "moe-plan"},
                    {"source", "a test"},
                    {"measured_by", "a test"},
                    {"measured", {{"add", Json::array({Json::array({196608.0, 1.0})})}}}};
    folder.write(name + ".json", profile.dump());
}

std::string search(const std::string& profile, const std::string& fixed) {
    return "moe-plan search --model tiny-qwen3-moe --hardware " + profile +
           " --gpus 8 --gbs 8 --seq 64 --precision fp32 " + fixed;
}

double predicted(const Folder& folder, const std::string& profile, const std::string& fixed) {
    return document(folder.run(search(profile, fixed) + " --json"))["plans"][0]["step_seconds"];
}

} // namespace

TEST_CASE("calibrate --runs: plans are priced by what the ops of runs took") {
    const Folder folder;
    write_profile(folder, "here");
    moe::test::write_dataset(folder, "The quick brown fox jumps over the lazy dog. ");
    REQUIRE(folder.run(search("here.json", "--fix tp=2 --fix ep=4 --fix pp=2 --out plan.json")).status == 0);
    REQUIRE(folder.run("moe-plan execute plan.json --data text --steps 3 --run-dir run").status == 0);

    const moe::test::Outcome told = folder.run("moe-plan calibrate --runs run --out fed.json");
    REQUIRE(told.status == 0);
    CHECK(told.out.find(" ops of 1 run joined, ") != std::string::npos);
    const Json fed = Json::parse(folder.read("fed.json"));
    CHECK(fed["name"] == "here");
    CHECK(fed["measured_by"].get<std::string>().rfind("a test; ", 0) == 0);
    for (const char* family : {"gemm.nt", "gemm.nn", "attention", "adamw", "rmsnorm"}) {
        CAPTURE(family);
        REQUIRE(fed["measured"].contains(family));
        for (const Json& call : fed["measured"][family]) {
            CHECK(call[0].get<double>() > 0.0);
            CHECK(call[1].get<double>() > 0.0);
            CHECK(call[1].get<double>() < 1.0);
        }
    }
    // Routing was the router's own, so that rows of experts are not those that plans are priced for.
    CHECK_FALSE(fed["measured"].contains("grouped_gemm.forward"));
    // The addition of a second is gone: from that plan, and from another that has it and that nobody ran.
    for (const std::string fixed :
         {"--fix tp=2 --fix ep=4 --fix pp=2", "--fix tp=2 --fix ep=2 --fix pp=2 --fix mbs=4"}) {
        CAPTURE(fixed);
        CHECK(predicted(folder, "here.json", fixed) > 1.0);
        CHECK(predicted(folder, "fed.json", fixed) < 0.5 * predicted(folder, "here.json", fixed));
    }
    // Added to a profile by name, twice the same run says nothing new.
    const Json again =
        document(folder.run("moe-plan calibrate --runs run run --from fed.json --out twice.json --json"));
    CHECK(again["measured"] == fed["measured"]);

    // Cores tell no clock; what a run says of its GPUs stays with its calls, and with none of before.
    CHECK_FALSE(fed.contains("measured_clocks"));
    Json run = Json::parse(folder.read("run/run.json"));
    run["draw"] = {
        {"seconds", 3.0}, {"watts", 690.0}, {"limit_watts", 700.0}, {"clock_mhz", 1530.2}, {"top_clock_mhz", 1980.0}};
    folder.write("run/run.json", run.dump());
    const Json clocked =
        document(folder.run("moe-plan calibrate --runs run --from here.json --out clocked.json --json"));
    REQUIRE(clocked["measured_clocks"].contains("gemm.nt"));
    CHECK(clocked["measured_clocks"]["gemm.nt"].size() == clocked["measured"]["gemm.nt"].size());
    for (const Json& clock : clocked["measured_clocks"]["gemm.nt"]) CHECK(clock == 1530.2);
    CHECK(clocked["measured"] == fed["measured"]);
    CHECK(predicted(folder, "clocked.json", "--fix tp=2 --fix ep=4 --fix pp=2") ==
          predicted(folder, "fed.json", "--fix tp=2 --fix ep=4 --fix pp=2")); // no price is by it
    run["draw"]["clock_mhz"] = -1.0;
    folder.write("run/run.json", run.dump());
    check_line(folder.run("moe-plan calibrate --runs run --out no.json"), 2, "clock_mhz");

    // Evenly loaded experts are as plans price them.
    REQUIRE(folder.run("moe-plan execute plan.json --data text --steps 3 --balance forced --run-dir even").status == 0);
    const Json even = document(folder.run("moe-plan calibrate --runs even --out even.json --json"));
    CHECK(even["measured"].contains("grouped_gemm.forward"));
}

TEST_CASE("calibrate --runs: what is no run of the profile's machine is refused, and nothing is written") {
    const Folder folder;
    write_profile(folder, "here");
    write_profile(folder, "there");
    REQUIRE(folder.run(search("here.json", "--fix pp=2 --fix schedule=1f1b --out plan.json")).status == 0);
    std::filesystem::create_directory(folder.file("run"));
    REQUIRE(folder.run("moe-plan replay plan.json --trace run/measured.json").status == 0);
    const std::string calibrate = "moe-plan calibrate --out fed.json --runs ";
    check_line(folder.run(calibrate + "nowhere"), 2, "nowhere: holds no measured.json");
    check_line(folder.run(calibrate + "run"), 2, "its timeline is a predicted one");
    check_line(folder.run(calibrate + "run --gpus 2"), 2, "--runs measures nothing now");
    moe::test::write_dataset(folder, "The quick brown fox jumps over the lazy dog. ");
    REQUIRE(folder.run("moe-plan execute plan.json --data text --steps 1 --run-dir run").status == 0);
    check_line(folder.run(calibrate + "run --from there.json"), 2, "its plan is for here, and the profile for there");
    check_line(folder.run(calibrate + "run --from h200"), 2, "h200 holds no measurements");
    check_line(folder.run(calibrate + "run --from h200-measured"), 2, "the profile for h200-measured");
    CHECK_FALSE(folder.holds("fed.json"));
}
