// The verb explain: walls, deltas and front of a small plan, two plans against each other, refusals.
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using moe::test::page_data;
using Json = nlohmann::ordered_json;

namespace {

const std::string request = "moe-plan " + moe::test::gpu_search;

struct Explained : Folder {
    Explained() { REQUIRE(run(request + "--fix pp=1 --fix ep=8 --fix mbs=1 --out plan.json").status == 0); }
};

double sum(const Json& list, const char* key) {
    double total = 0.0;
    for (const Json& item : list) total += item[key].get<double>();
    return total;
}

} // namespace

TEST_CASE("explain: the walls add up to the replay's figures") {
    const Explained folder;
    const Json replay = document(folder.run("moe-plan replay plan.json --json"));
    const Json explained = document(folder.run("moe-plan explain plan.json --json"));
    CHECK(explained["step_seconds"] == replay["step_seconds"]);
    const Json& memory = explained["walls"]["memory"];
    CHECK(memory["memory_gib"].get<double>() == nearly(replay["memory_gib"].get<double>()));
    CHECK(sum(memory["classes"], "gib") == nearly(memory["memory_gib"].get<double>()));
    double exposed = 0.0;
    for (const char* axis : {"tensor", "context", "expert", "pipeline", "data"})
        exposed += replay["breakdown"][axis].get<double>();
    CHECK(sum(explained["walls"]["communication"]["axes"], "exposed_seconds") == nearly(exposed));
    const Json& interval = replay["interval"];
    CHECK(interval["low"] < replay["tflops_per_gpu"]);
    CHECK(interval["high"] > interval["low"]);
    CHECK(interval["coverage"] == 0.8);
    const Json& compute = explained["walls"]["compute"];
    // Computing and the optimizer fill the compute stream: the classes hold what the breakdown calls so.
    const Json& b = replay["breakdown"];
    CHECK(
        sum(compute["classes"], "busy_seconds") ==
        nearly(b["compute"].get<double>() + b["recompute"].get<double>() + b["optimizer"].get<double>()).epsilon(0.05));
    CHECK(compute["mfu"].get<double>() > 0.05);
    CHECK(compute["mfu"].get<double>() < 1.0);
    for (const Json& c : compute["classes"])
        CHECK(c["seconds_at_peak"].get<double>() <= c["busy_seconds"].get<double>() * 1.001);
}

TEST_CASE("explain: deltas name plans that replay to about their figures") {
    const Explained folder;
    const Json explained = document(folder.run("moe-plan explain plan.json --json"));
    const Json& deltas = explained["deltas"];
    REQUIRE(deltas.size() > 8);
    int replayed = 0;
    for (const Json& delta : deltas) {
        const double gain =
            delta["tflops_per_gpu"].get<double>() / explained["base"]["tflops_per_gpu"].get<double>() - 1;
        CHECK(delta["gain"].get<double>() == nearly(gain));
        if (delta["field"] != "recompute" && delta["field"] != "precision") continue;
        Json plan = Json::parse(folder.read("plan.json"));
        if (delta["field"] == "precision")
            plan["precision"] = delta["to"];
        else if (delta["to"] == "none")
            plan["recompute"] = Json::array();
        else if (delta["to"].get<std::string>().find('+') == std::string::npos)
            plan["recompute"] = {delta["to"]};
        else
            continue;
        folder.write("other.json", plan.dump());
        const Json replay = document(folder.run("moe-plan replay other.json --json"));
        CHECK(delta["step_seconds"].get<double>() == nearly(replay["step_seconds"].get<double>()).epsilon(0.03));
        ++replayed;
    }
    CHECK(replayed >= 3);
    bool here = false; // the plan itself, or one that beats it, is on the front
    for (const Json& point : explained["front"])
        here = here || (point["step_seconds"] <= explained["base"]["step_seconds"] &&
                        point["memory_gib"] <= explained["base"]["memory_gib"]);
    CHECK(here);
}

TEST_CASE("explain --versus: the parts of both plans stand side by side") {
    const Explained folder;
    REQUIRE(folder.run(request + "--fix pp=2 --fix ep=8 --fix mbs=1 --fix ep_overlap=off --out other.json").status ==
            0);
    const Json explained = document(folder.run("moe-plan explain plan.json --versus other.json --json"));
    const Json other = document(folder.run("moe-plan replay other.json --json"));
    const Json& versus = explained["versus"];
    CHECK(sum(versus["breakdown"], "here_seconds") == nearly(explained["step_seconds"].get<double>()));
    CHECK(sum(versus["breakdown"], "there_seconds") == nearly(other["step_seconds"].get<double>()));
    CHECK(sum(versus["memory"], "there_gib") == nearly(other["memory_gib"].get<double>()));
    bool pp = false, sends = false;
    for (const Json& f : versus["fields"]) pp = pp || (f["field"] == "pp" && f["from"] == "1" && f["to"] == "2");
    for (const Json& k : versus["by_kind"])
        sends = sends || (k["kind"] == "send" && k["here_seconds"] == 0.0 && k["there_seconds"].get<double>() > 0.0);
    CHECK(pp);
    CHECK(sends);
    const auto text = folder.run("moe-plan explain plan.json --versus other.json");
    CHECK(text.status == 0);
    CHECK(text.out.find("it differs in pp 1 -> 2") != std::string::npos);
}

TEST_CASE("explain: a plan that does not fit gets the smallest change that does") {
    const Explained folder;
    Json plan = Json::parse(folder.read("plan.json"));
    plan["recompute"] = Json::array();
    for (const int mbs : {1, 2, 4}) { // the smallest that does not fit, so that the one below it does
        plan["mbs"] = mbs;
        folder.write("large.json", plan.dump());
        if (document(folder.run("moe-plan replay large.json --json"))["fits"] == false) break;
    }
    const auto text = folder.run("moe-plan explain large.json");
    REQUIRE(text.status == 0);
    CHECK(text.out.find("This plan does not fit") != std::string::npos);
    CHECK(text.out.find("Smallest change that fits: ") != std::string::npos);
    check_line(folder.run("moe-plan explain absent.json"), 2, "absent.json");
    check_line(folder.run("moe-plan explain plan.json --versus absent.json"), 2, "absent.json");
}

TEST_CASE("replay --report: one page that asks nobody and holds what replay and explain say") {
    const Explained folder;
    REQUIRE(folder.run("moe-plan replay plan.json --report report.html").status == 0);
    const std::string page = folder.read("report.html");
    CHECK(page.find("default-src 'none'; script-src 'sha256-") != std::string::npos);
    CHECK(page.find("connect-src 'none'") != std::string::npos);
    for (const char* foreign : {"<link rel=\"stylesheet", "@import", " src=", "unsafe-inline"})
        CHECK_MESSAGE(page.find(foreign) == std::string::npos, foreign);
    const Json report = page_data(page);
    CHECK(report["schema"] == "moe-plan/report/1");
    CHECK(report["command"] == "moe-plan replay plan.json --report report.html");
    CHECK(report["explain"] == document(folder.run("moe-plan explain plan.json --json")));
    const Json replayed = document(folder.run("moe-plan replay plan.json --json"));
    CHECK(report["tokens_per_second_per_gpu"] == replayed["tokens_per_second_per_gpu"]);
    double parts = 0.0;
    for (const Json& part : report["breakdown"]) parts += part["seconds"].get<double>();
    CHECK(parts == nearly(replayed["step_seconds"].get<double>()));
    // One forward and one backward of every micro-batch on every stage, none of which ends behind the step.
    const Json& plan = report["explain"]["plan"];
    const std::int64_t each = plan["workload"]["gbs"].get<std::int64_t>() / plan["mesh"]["dp"].get<std::int64_t>() /
                              plan["mbs"].get<std::int64_t>() * plan["mesh"]["vpp"].get<std::int64_t>();
    std::map<std::int64_t, std::int64_t> forwards;
    double last = 0.0;
    for (const Json& box : report["pipeline"]["boxes"]) {
        if (report["pipeline"]["kinds"][box[1].get<std::size_t>()] == "forward") ++forwards[box[0].get<std::int64_t>()];
        last = std::max(last, (box[4].get<double>() + box[5].get<double>()) * 1e-6);
    }
    CHECK(forwards.size() == plan["mesh"]["pp"].get<std::size_t>());
    for (const auto& entry : forwards) CHECK(entry.second == each);
    CHECK(last < 1.01 * report["explain"]["step_seconds"].get<double>());
    for (const Json& part : report["memory_over_time"]["classes"])
        CHECK(part["gib"].size() == report["memory_over_time"]["seconds"].size());
}

TEST_CASE("replay --set: another plan of the same request, or one line") {
    const Explained folder;
    REQUIRE(
        folder.run("moe-plan replay plan.json --set mbs=2 --set dispatcher=alltoall --report changed.json").status ==
        0);
    const Json changed = Json::parse(folder.read("changed.json"))["explain"]["plan"];
    CHECK(changed["mbs"] == 2);
    CHECK(changed["dispatcher"] == "alltoall");
    check_line(folder.run("moe-plan replay plan.json --set mbs"), 2, "--set mbs: must be FIELD=VALUE");
    check_line(folder.run("moe-plan replay plan.json --set mbss=1"), 2, "mbss");
    check_line(folder.run("moe-plan replay plan.json --set ep=7"), 2, "ep");
}

TEST_CASE("explain of a request: its best plan, or which constraint kills what and which change helps" *
          doctest::skip(sanitized())) {
    const Folder folder;
    const std::string words =
        " --model Qwen3-30B-A3B --hardware h100 --gpus 16 --gbs 64 --seq 4096 --fix pp=1 --fix tp=1 "
        "--fix ep=16 --fix mbs=1";
    const Json found = document(folder.run("moe-plan search" + words + " --json"));
    const Json best = document(folder.run("moe-plan explain" + words + " --json"));
    CHECK(best["feasible"] == true);
    CHECK(best["plan"] == found["plans"][0]["plan"]);
    const std::string none = " --model DeepSeek-V3 --hardware h100 --gpus 8 --gbs 64 --seq 4096";
    check_line(folder.run("moe-plan search" + none), 3, "'memory'");
    const moe::test::Outcome refused = folder.run("moe-plan explain" + none + " --json");
    CHECK(refused.status == 3);
    CHECK(refused.err.find("moe-plan: no plan for 8 GPUs") == 0);
    const Json why = Json::parse(refused.out);
    CHECK(why["feasible"] == false);
    CHECK(why["reason"].get<std::string>().find("no plan for 8 GPUs") == 0);
    CHECK(why["constraints"][0]["constraint"] == "memory");
    CHECK(why["closest"][0]["memory_gib"] > why["closest"][0]["limit_gib"]);
    REQUIRE(!why["remedies"].empty());
    CHECK(why["remedies"][0]["change"] == "gpus");
    const moe::test::Outcome text = folder.run("moe-plan explain" + none);
    CHECK(text.status == 3);
    CHECK(text.out.find("change alone that gives a plan") != std::string::npos);
    moe::test::check_width(text.out, 80);
    check_line(folder.run("moe-plan explain"), 2, "give either PLAN or a request");
    check_line(folder.run("moe-plan explain" + words + " --fix tpp=1"), 2, "did you mean tp?");
}
