// Documents of drawn lengths through the command: search and replay price them, execute trains within them.
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

TEST_CASE("search and replay follow the lengths of documents") {
    const Folder folder;
    folder.write("lengths.csv", "length,documents\n200,100\n1000,10\n20000,1\n");
    folder.write("none.csv", "length,documents\n");
    const std::string request = "moe-plan " + moe::test::gpu_search + "--fix pp=1 --fix mbs=1 ";
    const Json whole = document(folder.run(request + "--json"));
    const Json found = document(folder.run(request + "--lengths lengths.csv --out plan.json --json"));
    const Json& first = found["plans"][0];
    CHECK(whole["plans"][0]["documents"].is_null());
    CHECK(first["plan"]["documents"] == "mask");
    CHECK(first["plan"]["workload"]["lengths"] == "200:100+1000:10+20000:1");
    CHECK(first["step_seconds"] < whole["plans"][0]["step_seconds"]);
    CHECK(first["documents"]["step_seconds"]["p99"] >= first["documents"]["step_seconds"]["p50"]);
    const Json replayed = document(folder.run("moe-plan replay plan.json --json"));
    CHECK(replayed["documents"]["mean_length"].get<double>() == nearly(50000.0 / 111.0));
    CHECK(replayed["documents"]["step_seconds"]["p50"].get<double>() ==
          nearly(first["documents"]["step_seconds"]["p50"].get<double>()).epsilon(0.03));
    const auto text = folder.run("moe-plan replay plan.json");
    CHECK(text.out.find("drawn steps: mean ") != std::string::npos);
    folder.write("long.csv", "100000000\n");
    const Json other = document(folder.run("moe-plan replay plan.json --lengths long.csv --json"));
    CHECK(other["step_seconds"] > replayed["step_seconds"]);
    check_line(folder.run(request + "--lengths none.csv"), 2, "none.csv: holds no document lengths");
    check_line(folder.run(request + "--lengths lengths.csv --fix documents=ignore"), 2, "documents=ignore");
    check_line(folder.run(request + "--fix lengths=many"), 2, "lengths=many");
}

TEST_CASE("execute trains within documents, with the lengths of its data") {
    const Folder folder;
    std::string text;
    for (int i = 0; i < 400; ++i) text += "the quick brown fox jumps over the lazy dog. ";
    for (int i = 0; i < 40; ++i)
        folder.write("t" + std::to_string(i), text.substr(0, static_cast<std::size_t>(60 + 9 * i)));
    CHECK(folder.run("moe-plan tokenize t* --out data").status == 0);
    check_line(folder.run("moe-plan tokenize t1 --append-eod --out other"), 2, "--append-eod");
    REQUIRE(folder.run("moe-plan " + moe::test::small_search + " --fix documents=mask --out plan.json").status == 0);
    const Json run = document(folder.run("moe-plan execute plan.json --data data --steps 4 --run-dir run --json"));
    CHECK(run["steps"].size() == 4);
    CHECK(Json::parse(folder.read("run/plan.json"))["workload"]["lengths"].get<std::string>().find("60:") == 0);
    CHECK(folder.run("moe-plan compare run --json").status == 0);
}
