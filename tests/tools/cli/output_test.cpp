// The output of the verbs: tables that fit, --verbose and --quiet, and what terminals see that files do not.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <string>

using moe::test::check_width;
using moe::test::Folder;
using moe::test::on_terminal;
using moe::test::Outcome;
using moe::test::small_search;

namespace {

bool holds(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

const std::string search = "moe-plan " + moe::test::gpu_search + "--fix pp=1 --fix ep=8 --fix mbs=1 ";

} // namespace

TEST_CASE("search: a file has 80 columns and the names of what is left out, --verbose everything") {
    const Folder folder;
    const Outcome text = folder.run(search + "--out plan.json");
    REQUIRE(text.status == 0);
    CHECK(holds(text.out, "columns left out: "));
    CHECK(holds(text.out, "tokens/s/GPU"));
    CHECK(!holds(text.out, "excluded because"));
    check_width(text.out.substr(text.out.find('\n')), 80); // the first line says the request
    const Outcome all = folder.run(search + "--verbose");
    CHECK(!holds(all.out, "columns left out: "));
    for (const char* words : {"tokens/s/GPU", "schedule", "ETP", "excluded because"}) CHECK(holds(all.out, words));
    const Outcome little = folder.run(search + "--quiet --out plan.json");
    CHECK(little.err.empty());
    CHECK(!holds(little.out, "next: "));
    CHECK(holds(little.out, "TFLOPS/GPU"));
    for (const char* verb : {"explain", "replay"}) {
        const Outcome whole = folder.run(std::string("moe-plan ") + verb + " plan.json");
        const Outcome quiet = folder.run(std::string("moe-plan ") + verb + " plan.json --quiet");
        CHECK(quiet.status == 0);
        CHECK(whole.out.rfind(quiet.out, 0) == 0); // its beginning
        CHECK(5 * quiet.out.size() < 3 * whole.out.size());
    }
    // The document and nothing else is there with --json and --quiet.
    const Outcome document = folder.run(search + "--json --quiet");
    CHECK(document.err.empty());
    CHECK(nlohmann::json::accept(document.out));
}

TEST_CASE("a terminal has colours unless NO_COLOR is set, progress, and tables of its width") {
    const Folder folder;
    const std::string few = "moe-plan " + small_search + " --fix pp=2 --fix schedule=1f1b --fix optimizer=adamw";
    const Outcome plain = on_terminal(folder.path(), "TERM=xterm NO_COLOR=1 " + few, 80);
    REQUIRE(plain.status == 0);
    CHECK(!holds(plain.out, "\033[1m"));
    CHECK(holds(plain.out, "columns left out: "));
    const Outcome coloured = on_terminal(folder.path(), "unset NO_COLOR; TERM=xterm " + few, 80);
    CHECK(holds(coloured.out, "\033[1m"));
    CHECK(holds(coloured.out, "\r\033[K")); // the progress line
    CHECK(!holds(on_terminal(folder.path(), "TERM=dumb " + few, 80).out, "\033[1m"));
    CHECK(!holds(on_terminal(folder.path(), "TERM=xterm " + few, 200).out, "columns left out: "));
    // A narrow terminal has what a file has.
    CHECK(holds(on_terminal(folder.path(), "TERM=xterm NO_COLOR=1 " + few, 40).out, "TFLOPS/GPU"));
    const Outcome refused = on_terminal(folder.path(), "unset NO_COLOR; TERM=xterm moe-plan serach", 80);
    CHECK(holds(refused.out, "\033[31mmoe-plan: unknown verb"));
    const Outcome quiet = on_terminal(folder.path(), "TERM=xterm " + few + " --quiet", 80);
    CHECK(!holds(quiet.out, "\033[K"));
    const Outcome file = folder.run("unset NO_COLOR; TERM=xterm " + few);
    CHECK(!holds(file.out + file.err, "\033"));
    CHECK(!holds(file.out + file.err, "\r"));
}

TEST_CASE("execute: lines of every N-th step, all of them verbose, none quiet") {
    const Folder folder;
    REQUIRE(folder.run("moe-plan " + small_search + " --fix pp=2 --fix schedule=1f1b --out plan.json").status == 0);
    moe::test::write_dataset(folder, "the quick brown fox jumps over the lazy dog\n");
    const std::string execute = "moe-plan execute plan.json --data text --steps 5 ";
    const Outcome some = folder.run(execute + "--log-interval 2 --run-dir run");
    REQUIRE(some.status == 0);
    for (const char* step : {"step 1/5 |", "step 2/5 |", "step 4/5 |", "step 5/5 |"}) CHECK(holds(some.out, step));
    CHECK(!holds(some.out, "step 3/5 |"));
    CHECK(!holds(some.out, "tokens/s"));
    CHECK(holds(folder.run(execute + "--verbose").out, "tokens/s"));
    const Outcome quiet = folder.run(execute + "--quiet");
    CHECK(!holds(quiet.out, "step 5/5"));
    CHECK(holds(quiet.out, "Final loss"));
    CHECK(std::count(quiet.out.begin(), quiet.out.end(), '\n') == 1);
    check_width(folder.run("moe-plan compare run").out, 80);
    CHECK(folder.run("moe-plan compare run --quiet").out.size() < folder.run("moe-plan compare run").out.size() / 3);
}
