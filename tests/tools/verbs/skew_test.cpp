// Skewed routing through the command: search for slow steps, replay's figures, histograms, what is refused.
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using moe::test::page_data;
using Json = nlohmann::ordered_json;

namespace {

// Micro-batches large enough that the device sets the pace: a host that is late hides slow ranks.
const std::string request = "moe-plan " + moe::test::gpu_search + "--fix pp=1 --fix mbs=4 --fix ep_overlap=off ";

} // namespace

TEST_CASE("search and replay under skewed routing") {
    const Folder folder;
    const Json balanced = document(folder.run(request + "--json"));
    const Json mean = document(folder.run(request + "--fix routing=dirichlet:1 --out plan.json --json"));
    const Json slow = document(folder.run(request + "--fix routing=dirichlet:1 --optimize-for p99 --json"));
    const auto step = [](const Json& found) { return found["plans"][0]["step_seconds"].get<double>(); };
    CHECK(step(mean) > 1.05 * step(balanced));
    CHECK(step(slow) > step(mean));
    const Json replay = document(folder.run("moe-plan replay plan.json --json"));
    const Json& skew = replay["skew"];
    CHECK(skew["step_seconds"]["mean"] == replay["step_seconds"]);
    CHECK(skew["step_seconds"]["p99"] > skew["step_seconds"]["p50"]);
    CHECK(skew["tflops_per_gpu"]["p99"] < skew["tflops_per_gpu"]["mean"]);
    CHECK(skew["memory_gib"]["p99"] >= skew["memory_gib"]["p50"]);
    CHECK(step(mean) == nearly(replay["step_seconds"].get<double>()).epsilon(0.03));
    CHECK(folder.run("moe-plan replay plan.json --report r.html").out.find("Routing dirichlet:1") != std::string::npos);
    const Json shown = page_data(folder.read("r.html"))["skew"];
    CHECK(shown["routing"] == "dirichlet:1");
    CHECK(shown["rows"][2]["step_seconds"] == skew["step_seconds"]["p99"]);
    CHECK(folder.run("moe-plan explain plan.json").out.find("Routing dirichlet:1") != std::string::npos);
}

TEST_CASE("what copies of hot experts would give is said by search, replay and explain") {
    const Folder folder;
    const std::string skewed = request + "--fix ep=8 --fix routing=dirichlet:1 ";
    const Json found = document(folder.run(skewed + "--out plan.json --json"));
    const Json replay = document(folder.run("moe-plan replay plan.json --json"));
    const Json copies = replay["skew"]["replication"];
    CHECK(copies["spare_experts"] == 2);
    CHECK(copies["load"]["mean"] < 1.05);
    CHECK(copies["copies"] > 1.0);
    CHECK(copies["copies"] >= copies["copies_of_one_rank"]);
    CHECK(copies["step_seconds"] < replay["step_seconds"]);
    CHECK(copies["added_seconds"] > 0.0);
    CHECK(copies["share_of_balanced"] < 1.0);
    CHECK(found["replication"]["step_seconds"].get<double>() ==
          nearly(copies["step_seconds"].get<double>()).epsilon(0.01));
    CHECK(found["replication"]["copies"] == copies["copies"]);
    // One slot leaves more load and takes half the memory.
    const Json one = document(folder.run("moe-plan replay plan.json --spare-experts 1 --json"))["skew"]["replication"];
    CHECK(one["load"]["mean"] > copies["load"]["mean"]);
    CHECK(one["slots_gib"].get<double>() == nearly(0.5 * copies["slots_gib"].get<double>()));
    for (const std::string& command :
         {skewed, std::string("moe-plan replay plan.json"), std::string("moe-plan explain plan.json")})
        CHECK(folder.run(command).out.find("What if hot experts had copies, 2 spare slots a rank") !=
              std::string::npos);
    REQUIRE(folder.run("moe-plan replay plan.json --report r.html").status == 0);
    CHECK(folder.read("r.html").find("What if hot experts had copies") != std::string::npos);
    // Balanced routing has nothing to copy.
    CHECK(document(folder.run(request + "--fix ep=8 --out even.json --json"))["replication"].is_null());
    CHECK(document(folder.run("moe-plan replay even.json --json"))["skew"]["replication"].is_null());
    CHECK(folder.run("moe-plan replay even.json").out.find("copies") == std::string::npos);
    for (const char* verb : {"replay", "explain"})
        check_line(folder.run(std::string("moe-plan ") + verb + " plan.json --spare-experts 0"), 2,
                   "--spare-experts 0: must be between 1 and 1024");
    check_line(folder.run(skewed + "--spare-experts -1"), 2, "--spare-experts -1: must be between 1 and 1024");
}

TEST_CASE("a recorded histogram is a routing; a wrong one is refused") {
    const Folder folder;
    std::string flat = "1", hot = "9";
    for (int expert = 1; expert < 128; ++expert) flat += ",1", hot += expert < 16 ? ",9" : ",1";
    folder.write("flat.csv", flat + "\n");
    folder.write("hot.csv", hot + "\n");
    folder.write("short.csv", "1,2,3\n");
    const auto replayed = [&](const std::string& routing) {
        REQUIRE(folder.run(request + "--fix ep=8 --fix routing=" + routing + " --out plan.json").status == 0);
        return document(folder.run("moe-plan replay plan.json --json"));
    };
    const Json balanced = replayed("balanced"), same = replayed("flat.csv"), skewed = replayed("hot.csv");
    CHECK(same["step_seconds"].get<double>() == nearly(balanced["step_seconds"].get<double>()));
    // The first of eight ranks holds 16 experts of weight 9 beside 112 of weight 1: 144/256 of the tokens, 4.5 times
    // the mean; 9 * 8 / 256 of the tokens choose each, below one.
    CHECK(skewed["skew"]["load"]["mean"].get<double>() == nearly(4.5));
    CHECK(skewed["step_seconds"] > balanced["step_seconds"]);
    check_line(folder.run(request + "--fix routing=short.csv"), 2, "3 experts, but the model has 128");
    check_line(folder.run(request + "--fix routing=absent.csv"), 2, "absent.csv");
    // On one GPU no plan sends tokens anywhere, and none is excluded by memory.
    const std::string one = "moe-plan search --model tiny-qwen3-moe --hardware h200 --gpus 1 --gbs 1 --seq 256 ";
    check_line(folder.run(one + "--fix routing=short.csv"), 2,
               "short.csv: the histogram has 3 experts, but the model has 8");
    check_line(folder.run(one + "--fix routing=absent.csv"), 2, "cannot read absent.csv");
    check_line(folder.run(request + "--fix routing=dirichlet:0"), 2, "dirichlet:A");
    check_line(folder.run(request + "--fix routing=skewed"), 2, "must be balanced, dirichlet:A");
    check_line(folder.run(request + "--optimize-for p95"), 2, "--optimize-for p95: must be mean, p50 or p99");
}
