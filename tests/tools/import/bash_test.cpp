// The reader of bash scripts: words, variables, branches, and what it must not take for known.
#include "tools/import/readers/bash_test.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tools/import/readers/bash_run.hpp"
#include "tools/import/readers/bash_tokens.hpp"
#include "tools/import/readers/readers.hpp"

#include <doctest/doctest.h>

using namespace moe;
using tools::SettingsFile;
using Words = std::vector<std::string>;

namespace {

// The words of the last command.
Words last(const std::string& script) {
    tools::BashValues values("s.sh");
    const tools::BashRun run = tools::follow_bash(script, "s.sh", values);
    REQUIRE(!run.commands.empty());
    return run.commands.back().words;
}

SettingsFile read(const std::string& script) {
    tools::BashValues values("s.sh");
    return tools::read_launch_script(script, "s.sh", values);
}

std::string value(const SettingsFile& file, const std::string& name) {
    const tools::Setting* setting = file.find(name);
    REQUIRE_MESSAGE(setting != nullptr, name);
    return setting->text();
}

std::string fault(const std::string& script) {
    return fault_of([&] { read(script); });
}

} // namespace

TEST_CASE("bash: quotes, escapes, continued lines and comments") {
    CHECK(last("run 'a b' \"c d\" e\\ f g#h # rest\n") == Words{"run", "a b", "c d", "e f", "g#h"});
    CHECK(last("run --a 1 \\\n  --b 2 \\\n  # --c 3 \\\n  --d 4\n") == Words{"--d", "4"});
    CHECK(last("run --a 1 \\\r\n --b 2\r\n") == Words{"run", "--a", "1", "--b", "2"});
    CHECK(last("A='x y'; run $A \"$A\" '$A' \"\" $B\n").size() == 7);
    CHECK(last("run \"a'b\" 'c\"d'") == Words{"run", "a'b", "c\"d"});
}

TEST_CASE("bash: variables, their defaults and arithmetic") {
    CHECK(last("N=4\nrun ${N} ${M:-7} ${M-8} ${N:+yes} ${M:+no} $((N * (2 + M0))) $(( 8 * N / 2 - 1 ))") ==
          Words{"run", "4", "7", "8", "yes", "\x01$((N * (2 + M0)))\x01", "15"});
    CHECK(last("N=${N:-\"2\"}\nW=$(($N*8))\nrun $W") == Words{"run", "16"});
    CHECK(last(": ${A:=3}\nA+=4\nrun $A") == Words{"run", "34"});
    CHECK(last("A=${B:-${C:-deep}}\nrun $A ${A,,} ${#A}") == Words{"run", "deep", "deep", "4"});
    CHECK(last("export A=1 B=2\nunset A\nrun ${A:-none} $B") == Words{"run", "none", "2"});
}

TEST_CASE("bash: arrays") {
    CHECK(last("A=(\n  --x 1 # one\n  # --y 2\n  --z \"3 4\"\n)\nA+=(--w)\nrun \"${A[@]}\"") ==
          Words{"run", "--x", "1", "--z", "3 4", "--w"});
    CHECK(last("A=(a b c)\nrun ${A[1]} ${#A[@]} ${A[@]}") == Words{"run", "b", "3", "a", "b", "c"});
    CHECK(last("E=()\nrun \"${E[@]}\" end") == Words{"run", "end"});
}

TEST_CASE("bash: branches are read where the file decides them, and told where it does not") {
    CHECK(last("A=2\nif [ \"$A\" -gt 1 ]; then B=big; else B=small; fi\nrun $B") == Words{"run", "big"});
    CHECK(last("if [[ -n \"${KEY:-}\" ]]; then B=1; elif [[ x == x* ]]; then B=2; fi; run $B") == Words{"run", "2"});
    CHECK(last("A=fp8\ncase $A in bf16) F=0;; fp8|mxfp8) F=1;; *) F=2;; esac\nrun $F") == Words{"run", "1"});
    CHECK(last("[ -z \"$A\" ] && B=unset || B=set\nrun $B") == Words{"run", "unset"});
    CHECK(last("for i in 1 2; do L=\"$L$i\"; done\nrun ${L:-}").size() == 2);
    CHECK(last("f() { X=$((1+1)); }\nf\nrun $X") == Words{"run", "2"});
    const SettingsFile file = read("if [ -f /data ]; then A=1; fi\npython train.py --a ${A:-0} --num-layers 2\n");
    REQUIRE(file.unread.size() == 1);
    CHECK(file.unread[0].line == 1);
    CHECK(value(file, "--a") == "0");
}

TEST_CASE("bash: what a command would print is unknown, and nothing is run") {
    const SettingsFile file =
        read("H=$(touch broken; hostname)\npython pretrain_gpt.py --host $H --layers `echo 2` --n 3\n");
    CHECK(file.find("--host")->unknown());
    CHECK(value(file, "--host") == "$(touch broken; hostname)");
    CHECK(file.find("--layers")->unknown());
    CHECK(value(file, "--n") == "3");
}

TEST_CASE("bash: programs inside of words and documents") {
    CHECK(value(read("C='python train.py --num-layers 4'\nsrun -N 2 --ntasks-per-node=8 bash -c \"$C\"\n"),
                "--num-layers") == "4");
    const SettingsFile file = read("N=4\nexport CMD=\"python pretrain_gpt.py --lr 1 --num-layers ${N}\"\nsbatch "
                                   "<<EOF\n#!/bin/bash\n#SBATCH --nodes=$N\n"
                                   "#SBATCH --ntasks-per-node=8\nsrun bash -c \"\\${CMD}\"\nEOF\n");
    CHECK(value(file, "--num-layers") == "4");
    CHECK(file.nodes == 4);
    CHECK(file.processes == 8);
}

TEST_CASE("bash: how many processes start, and whose arguments are read") {
    const SettingsFile file =
        read("#!/bin/bash\n#SBATCH --nodes=8\nG=8\nmkdir -p --mode 7 out\nA=(--nproc_per_node $G --nnodes 4)\n"
             "torchrun ${A[@]} pretrain_gpt.py --num-layers=32 --bf16 --recompute-modules a b\n");
    CHECK(file.nodes == 4);
    CHECK(file.processes == 8);
    CHECK(value(file, "--num-layers") == "32");
    CHECK(file.find("--bf16")->values.empty());
    CHECK(file.find("--recompute-modules")->values == Words{"a", "b"});
    CHECK(file.find("--nnodes") == nullptr);
    const SettingsFile alone = read("# arguments\n--num-layers 2\n--bf16\n\n--seq-length 4096 # tokens\n");
    CHECK(alone.settings.size() == 3);
    CHECK(value(alone, "--seq-length") == "4096");
}

TEST_CASE("bash: broken and endless scripts are refused with their line") {
    CHECK(fault("A=1\nB='open\n").find("s.sh:2") != std::string::npos);
    CHECK(fault("A=(1 2\n").find("array") != std::string::npos);
    CHECK(fault("cat <<EOF\nno end\n").find("<<") != std::string::npos);
    CHECK(fault("f() { f; }\nf\n").find("nested too deep") != std::string::npos);
    CHECK(fault("C='bash -c \"$C\"'\neval eval eval x\nA='eval \"$A\"'\neval \"$A\"\n").find("too deep") !=
          std::string::npos);
    CHECK(
        fault(
            "A=x\nfor i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26; do A=\"$A$A\"; done\n")
            .find("MiB") != std::string::npos);
    CHECK(fault(std::string(5000, '(')).find("deep") != std::string::npos);
    CHECK(fault("A=" + std::string(500, '$') + std::string(500, '{')).find("2: ") == 0);
}

TEST_CASE("bash: patterns") {
    CHECK(tools::matches_pattern("--log-interval", "--log-*"));
    CHECK(tools::matches_pattern("abc", "a*c"));
    CHECK(tools::matches_pattern("abc", "*b?"));
    CHECK(!tools::matches_pattern("abc", "*b"));
    CHECK(!tools::matches_pattern("", "?"));
}

TEST_CASE("bash: words behind functions, set and shift") {
    CHECK(last("f() { run --a $1 \"$@\" $#; }\nf 2 'b c'") == Words{"run", "--a", "2", "2", "b c", "2"});
    CHECK(last("set -- x y z\nshift\nrun $1 ${2} ${3:-none} $#") == Words{"run", "y", "z", "none", "2"});
    // A function's words are its own.
    CHECK(last("set -- x\nf() { :; }\nf y\nrun $1") == Words{"run", "x"});
    CHECK(last("run $1").back().find('\x01') == 0);
}

TEST_CASE("bash: the folder of the script, in the forms that people ask for it") {
    const auto folder = [](const std::string& words) {
        tools::BashValues values("jobs/moe/s.sh");
        const tools::BashRun run = tools::follow_bash("run " + words, "jobs/moe/s.sh", values);
        return run.commands.back().words.back();
    };
    CHECK(folder("$(dirname $0)") == "jobs/moe");
    CHECK(folder("\"$(dirname \"$(readlink -f \"$0\")\")\"") == "jobs/moe");
    CHECK(folder("\"$(cd -- \"$(dirname -- \"${BASH_SOURCE[0]}\")\" &>/dev/null && pwd)\"") == "jobs/moe");
    CHECK(folder("$(cd \"$(dirname \"$0\")/..\" && pwd)/common") == "jobs/common");
    CHECK(folder("$(dirname $(dirname $0))") == "jobs");
    CHECK(folder("$(dirname $(which python))").find('\x01') == 0);
    CHECK(folder("$(cat $0)").find('\x01') == 0);
}

TEST_CASE("bash: a script that asks for a variable by leaving with a failure is read on") {
    CHECK(last("if [ -z \"$DATA\" ]; then\n  echo needed\n  exit 1\nfi\nrun --a 1") == Words{"run", "--a", "1"});
    CHECK(last("run --a 1\nexit 0\nrun --a 2") == Words{"run", "--a", "1"});
}
