// Completion scripts, the manual page and the reference of verbs: all of them from the command line's definition.
#include "tests/tools/verbs/command.hpp"

#include "planner/base/files.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <string>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using moe::test::Outcome;

namespace {

bool holds(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

bool there_is(const Folder& folder, const std::string& program) {
    return folder.run("command -v " + program).status == 0;
}

// The words that bash offers for the last word of a line; words as the shell would split them.
std::string offered(const Folder& folder, const std::string& words) {
    folder.write("complete.bash", ". ./moe-plan.bash\nCOMP_WORDS=(" + words +
                                      ")\nCOMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_moe_plan\n"
                                      "printf '%s ' \"${COMPREPLY[@]}\"\n");
    return folder.run("bash complete.bash").out;
}

} // namespace

TEST_CASE("completion: every verb and option stands in the script of every shell") {
    const Folder folder;
    const std::string help = folder.run("moe-plan --help").out;
    for (const std::string shell : {"bash", "zsh", "fish"}) {
        const Outcome script = folder.run("moe-plan completion " + shell);
        REQUIRE(script.status == 0);
        folder.write("moe-plan." + shell, script.out);
        for (const char* verb :
             {"search", "replay", "explain", "execute", "evaluate", "generate", "compare", "calibrate", "validate",
              "tokenize", "export", "launch", "show", "completion", "man"}) {
            CHECK(holds(help, std::string("\n  ") + verb + " "));
            CHECK_MESSAGE(holds(script.out, verb), shell, verb);
        }
        for (const char* option : {"memory-headroom", "log-interval", "init-from", "verbose", "quiet"})
            CHECK_MESSAGE(holds(script.out, option), shell, option);
        const std::string check = fmt::format("{} -n moe-plan.{}", shell, shell);
        if (there_is(folder, shell)) CHECK_MESSAGE(folder.run(check).status == 0, shell);
        const auto json = document(folder.run("moe-plan completion " + shell + " --json"));
        CHECK(json["schema"] == "moe-plan/completion/1");
        CHECK(json["text"] == script.out);
    }
    check_line(folder.run("moe-plan completion tcsh"), 2, "must be bash, zsh or fish");
    check_line(folder.run("moe-plan completion"), 2, "SHELL");
}

TEST_CASE("completion: what bash offers at each place") {
    const Folder folder;
    if (!there_is(folder, "bash")) return;
    REQUIRE(folder.run("moe-plan completion bash > moe-plan.bash").status == 0);
    folder.write("plan.json", "{}");
    CHECK(offered(folder, "moe-plan se") == "search ");
    CHECK(offered(folder, "moe-plan search --memory") == "--memory-headroom ");
    CHECK(offered(folder, "moe-plan search --model DeepSeek-V3") == "DeepSeek-V3 DeepSeek-V3.2 ");
    CHECK(offered(folder, "moe-plan search --hardware gb3") == "gb300-nvl72 ");
    CHECK(offered(folder, "moe-plan search --precision mx") == "mxfp8 ");
    CHECK(offered(folder, "moe-plan search --fix rec") == "recompute= ");
    CHECK(offered(folder, "moe-plan search --gpus ''") == "auto ");
    CHECK(offered(folder, "moe-plan execute --lr-schedule c") == "constant cosine ");
    CHECK(offered(folder, "moe-plan replay pl") == "plan.json ");
    CHECK(offered(folder, "moe-plan show model tiny") == "tiny-qwen3-moe ");
    CHECK(offered(folder, "moe-plan show st") == "stacks stack ");
}

TEST_CASE("man: the page is sound roff and names every verb") {
    const Folder folder;
    const Outcome page = folder.run("moe-plan man");
    REQUIRE(page.status == 0);
    CHECK(page.out.rfind(".TH MOE\\-PLAN 1 ", 0) == 0);
    for (const char* section : {".SS search", ".SS show", ".SH EXIT STATUS", "NO_COLOR"})
        CHECK(holds(page.out, section));
    const auto json = document(folder.run("moe-plan man --json"));
    CHECK(json["text"] == page.out);
    if (!there_is(folder, "groff")) return;
    const Outcome read = folder.run("moe-plan man | groff -man -Tascii -ww -P-c -P-b -P-u");
    CHECK(read.status == 0);
    CHECK(read.err.empty());
    CHECK(holds(read.out, "--memory-headroom SHARE"));
}

TEST_CASE("docs/reference/verbs.md is what the command says of itself") {
    const Folder folder;
    const Outcome made = folder.run("moe-plan man --markdown");
    REQUIRE(made.status == 0);
    // The command that renews it: moe-plan man --markdown > docs/reference/verbs.md
    CHECK(made.out == moe::read_file(moe::test::source_folder() + "/docs/reference/verbs.md"));
    moe::test::check_width(made.out, 140);
}
