// Compressed timelines: what gzip makes of them, and that compare reads them back.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

using namespace moe;
using test::check_line;

TEST_CASE("trace: NAME.json.gz is the JSON, compressed, and compare reads it") {
    const test::Folder folder;
    test::write_dataset(folder, "The quick brown fox jumps over the lazy dog. ");
    test::write_plan(folder, "--fix pp=2 --fix schedule=1f1b", "plan.json");
    REQUIRE(folder.run("moe-plan replay plan.json --trace plain.json").status == 0);
    REQUIRE(folder.run("moe-plan replay plan.json --trace small.json.gz").status == 0);
    CHECK(folder.run("gzip -dc small.json.gz | cmp - plain.json").status == 0);
    CHECK(folder.read("small.json.gz").size() < folder.read("plain.json").size() / 4);

    REQUIRE(folder.run("moe-plan execute plan.json --data text --steps 2 --run-dir run --trace m.json.gz").status == 0);
    CHECK(folder.run("gzip -dc m.json.gz | cmp - run/measured.json").status == 0);
    REQUIRE(folder.run("gzip -k run/predicted.json").status == 0);
    const test::Outcome same = folder.run("moe-plan compare run/predicted.json.gz m.json.gz --json");
    CHECK(same.out == folder.run("moe-plan compare run --json").out);
    CHECK(test::document(same)["matched_ops"] > 0);

    CHECK(folder.run("head -c 900 m.json.gz > cut.json.gz").status == 0);
    check_line(folder.run("moe-plan compare run/predicted.json cut.json.gz"), 2, "cut.json.gz");
    check_line(folder.run("moe-plan replay plan.json --trace nowhere/t.json.gz"), 2, "nowhere/t.json.gz");
    check_line(folder.run("moe-plan compare run --report run/measured.json"), 2, "--report run/measured.json");
    check_line(folder.run("moe-plan compare run --report /dev/full"), 1, "/dev/full");
    check_line(folder.run("moe-plan compare plan.json --log x --report r.html"), 2, "--report is for traces");
    check_line(folder.run("moe-plan execute plan.json --data text --report plan.json"), 2, "--report plan.json");
}
