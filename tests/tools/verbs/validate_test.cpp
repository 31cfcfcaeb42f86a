// The verb validate: the fields of its document, runs of one's own, and bad files.
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

// One run of a source that nobody has published in, one of a model without a profile.
const std::string rows = "mine,my notes,1,Qwen3-30B-A3B,H200,16,BF16,512,1,4096,1,1,8,current,A,250\n"
                         "other,my notes,1,NoSuchModel-7B,H200,16,BF16,512,1,4096,1,1,1,current,A,250\n";

} // namespace

TEST_CASE("validate: rows and summary of one's own file") {
    const Folder folder;
    folder.write("runs.csv", runs_header + rows);
    const Json json = document(folder.run("moe-plan validate runs.csv --json"));
    REQUIRE(json["rows"].size() == 2);
    const Json& row = json["rows"][0];
    CHECK(row["run_id"] == "mine");
    CHECK(row["skipped"].is_null());
    CHECK(row["published_tflops_per_gpu"] == 250.0);
    const double predicted = row["predicted_tflops_per_gpu"].get<double>();
    CHECK(row["error"].get<double>() == nearly(predicted / 250.0 - 1.0));
    CHECK(row["warnings"].size() == 1); // no stack stands for "my notes"
    const Json& skipped = json["rows"][1];
    CHECK(skipped["skipped"].get<std::string>().find("unknown model 'NoSuchModel-7B'") == 0);
    CHECK(skipped["predicted_tflops_per_gpu"].is_null());
    CHECK(skipped["error"].is_null());
    const Json& summary = json["summary"];
    CHECK(summary["rows"] == 2);
    CHECK(summary["predicted"] == 1);
    CHECK(summary["skipped"] == 1);
    CHECK(summary["mape"].get<double>() == nearly(std::abs(row["error"].get<double>())));
    for (const char* field : {"bias", "within_10_percent", "kendall_tau"}) CHECK(summary[field].is_number());
}

TEST_CASE("validate: a run's name changes nothing but its name") {
    const Folder folder;
    folder.write("a.csv", runs_header + rows);
    folder.write("b.csv", runs_header + "MB-26.08-DSV3" + rows.substr(4));
    Json a = document(folder.run("moe-plan validate a.csv --json"));
    Json b = document(folder.run("moe-plan validate b.csv --json"));
    CHECK(a != b);
    a["rows"][0].erase("run_id");
    b["rows"][0].erase("run_id");
    CHECK(a == b);
}

TEST_CASE("validate: text names groups, reasons and the widest misses") {
    const Folder folder;
    folder.write("runs.csv", runs_header + rows);
    const moe::test::Outcome outcome = folder.run("moe-plan validate runs.csv");
    CHECK(outcome.status == 0);
    for (const char* words : {"2 runs: 1 predicted, 1 skipped", "system H200", "unknown model", "mine"})
        CHECK(outcome.out.find(words) != std::string::npos);
    CHECK(outcome.out.find("nan") == std::string::npos);
}

TEST_CASE("validate: intervals of fitted runs by each way to leave them out, where runs nearby correct") {
    const Folder folder;
    folder.write("runs.csv", runs_header + rows);
    const Json ways = document(folder.run("moe-plan validate runs.csv --json"))["left_out"];
    CHECK(ways.size() == 5);
    const std::string text = folder.run("moe-plan validate runs.csv").out;
    for (const auto& [way, figures] : ways.items()) {
        CAPTURE(way);
        CHECK(text.find(way) != std::string::npos);
        CHECK(figures["all"]["coverage"] >= 0.7);
        CHECK(figures["all"]["width"] > 0.0);
        CHECK(figures["systems"].contains("b300"));
    }
    CHECK(ways["row"]["all"]["width"] < ways["system"]["all"]["width"]);
    CHECK_FALSE(document(folder.run("moe-plan validate runs.csv --no-neighbours --json")).contains("left_out"));
}

TEST_CASE("validate: an empty table is no error, a broken one is") {
    const Folder folder;
    folder.write("none.csv", runs_header);
    CHECK(document(folder.run("moe-plan validate none.csv --json"))["summary"]["rows"] == 0);
    CHECK(folder.run("moe-plan validate none.csv").status == 0);
    folder.write("cell.csv", runs_header + "a,b,1,Qwen3-30B-A3B,H200,many" + rows.substr(rows.find(",BF16")));
    check_line(folder.run("moe-plan validate cell.csv --json"), 2, "cell.csv:2: column gpus: 'many'");
    folder.write("short.csv", runs_header + "a,b\n");
    check_line(folder.run("moe-plan validate short.csv"), 2, "short.csv:2: 2 cells");
    folder.write("quote.csv", runs_header + "\"a");
    check_line(folder.run("moe-plan validate quote.csv"), 2, "never closed");
    check_line(folder.run("moe-plan validate missing.csv"), 2, "missing.csv");
    check_line(folder.run("mkdir none && moe-plan validate none"), 2, "holds no .csv file");
    check_line(folder.run("moe-plan validate none.csv --worst -1"), 2, "--worst");
}
