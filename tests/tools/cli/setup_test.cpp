// The functions of tools/setup.sh: what runs quietly leaves one line and a log.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>

#include <string>

using moe::test::Folder;
using moe::test::on_terminal;
using moe::test::Outcome;

namespace {

// A subshell that has the functions and a log, and does this.
std::string with_log(const std::string& words) {
    return "(set -eu; log=quick.log; . '" + moe::test::source_folder() + "/tools/setup.sh'; " + words + ")";
}

} // namespace

TEST_CASE("setup: a quiet command leaves one line, and its words in the log") {
    const Folder folder;
    const Outcome outcome = folder.run(with_log("quietly Built sh -c 'echo one; echo two >&2'"));
    CHECK(outcome.status == 0);
    CHECK(outcome.out.starts_with("Built: "));
    CHECK(outcome.out.find('\n') == outcome.out.size() - 1); // However long it took.
    CHECK(outcome.err.empty());
    CHECK(folder.read("quick.log") == "\n$ sh -c echo one; echo two >&2\none\ntwo\n");
    CHECK(folder.run(with_log("duration 59; echo; duration 200")).out == "59 s\n3 min 20 s");
}

TEST_CASE("setup: what fails shows the end of the log and ends the script with its status") {
    const Folder folder;
    const Outcome outcome = folder.run(with_log("quietly Building sh -c 'echo broken; exit 7'; echo behind"));
    CHECK(outcome.status == 7);
    CHECK(outcome.out.empty());
    CHECK(outcome.err.find("Building failed; the end of quick.log:\n") == 0);
    CHECK(outcome.err.find("broken\n") != std::string::npos);
}

TEST_CASE("setup: a terminal sees what is going on, and then the same line") {
    const Folder folder;
    const Outcome outcome = on_terminal(folder.path(), with_log("quietly Built sh -c 'echo half-way; sleep 2'"), 80);
    CHECK(outcome.status == 0);
    CHECK(outcome.out.find("half-way") != std::string::npos);
    CHECK(outcome.out.find("\r\033[KBuilt: ") != std::string::npos);
}
