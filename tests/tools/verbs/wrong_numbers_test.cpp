// Numbers that are none, or that the libraries below would take for others: refused in one line that names them as
// they were given, with nothing written.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <string>

using moe::test::check_line;
using moe::test::Folder;

TEST_CASE("command line: whole numbers are decimal digits within 64 bits") {
    const Folder folder;
    const auto refused = [&folder](const std::string& options, const std::string& words) {
        check_line(folder.run("moe-plan search --model tiny-qwen3-moe --hardware cpu-local --gpus 8 " + options +
                              " --precision fp32 --out plan.json"),
                   2, words);
        CHECK_FALSE(folder.holds("plan.json"));
    };
    refused("--gbs 010 --seq 64", "--gbs 010: must be a whole number in plain decimal digits"); // not 8
    refused("--gbs 8 --seq 0x40", "--seq 0x40: must be a whole number in plain decimal digits");
    refused("--gbs 8 --seq -064", "--seq -064: must be a whole number in plain decimal digits");
    refused("--gbs 18446744073709551616 --seq 64", "--gbs 18446744073709551616: must be a whole number within 64 bits");
    refused("--gbs 8 --seq -99999999999999999999", "--seq -99999999999999999999: must be a whole number within 64");
    refused("--gbs 8 --seq 6_4", "--seq 6_4: must be");
    refused("--gbs 0 --seq 64", "--gbs 0: must be between 1 and");
}

TEST_CASE("replay: a field is set once") {
    const Folder folder;
    moe::test::write_plan(folder, "", "plan.json");
    check_line(folder.run("moe-plan replay plan.json --set mbs=1 --set tp=1 --set mbs=2"), 2,
               "--set mbs=1 --set mbs=2: a field has one value: leave one of them out");
}

TEST_CASE("compare --profile: a kernel without a time is no kernel at time 0") {
    const Folder folder;
    moe::test::write_plan(folder, "", "plan.json");
    const auto refused = [&folder](const std::string& members, const std::string& words) {
        folder.write("t.json", "{\"traceEvents\": [{\"ph\": \"X\", \"cat\": \"kernel\", \"name\": \"k\", " + members +
                                   "\"args\": {\"stream\": 7}}]}");
        check_line(folder.run("moe-plan compare plan.json --profile t.json"), 2, "t.json: kernel \"k\": " + words);
    };
    refused("\"dur\": 5, ", "ts: must be a number of microseconds");
    refused("\"ts\": \"7\", \"dur\": 5, ", "ts: must be a number of microseconds");
    refused("\"ts\": 1e300, \"dur\": 5, ", "ts: must be a number of microseconds");
    refused("\"ts\": 7, \"dur\": [5], ", "dur: must be a number of microseconds from 0");
    refused("\"ts\": 7, \"dur\": -5, ", "dur: must be a number of microseconds from 0");
}

TEST_CASE("import: a length or a batch that is no number is named, and not called missing") {
    const Folder folder;
    const auto refused = [&folder](const std::string& training, const std::string& words) {
        folder.write("job.toml", "[model]\nname = \"qwen3\"\nflavor = \"8B\"\n[training]\n" + training + "\n");
        check_line(folder.run("moe-plan import job.toml --hardware h100 --gpus 8 --out plan.json"), 2, words);
        CHECK_FALSE(folder.holds("plan.json"));
    };
    refused("seq_len = nan", "job.toml:5: training.seq_len nan: must be a whole number");
    refused("seq_len = -4096", "job.toml:5: training.seq_len -4096: must be a whole number");
    refused("seq_len = \"long\"", "job.toml:5: training.seq_len long: must be a whole number");
    refused("seq_len = 4096\nglobal_batch_size = \"all\"", "job.toml:6: training.global_batch_size all: must be");
    folder.write("args.txt", "--use-mcore-models --seq-length 99999999999999999999 --micro-batch-size 1\n");
    check_line(folder.run("moe-plan import args.txt --model Mixtral-8x7B --hardware h100 --gpus 8"), 2,
               "--seq-length 99999999999999999999: must be a whole number of 1 or more, within 64 bits");
}
