// Runs that end before their time: SIGTERM, Ctrl-C, SIGKILL at any moment, damaged checkpoints, and going on after
// each.
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using moe::test::Outcome;
using Json = nlohmann::ordered_json;

namespace {

// A folder with a dataset and two plans for the same model.
void set_up(const Folder& folder) {
    moe::test::write_dataset(folder, "Sphinx of black quartz, judge my vow. ");
    moe::test::write_plan(folder, "--fix pp=2 --fix ep=4", "plan.json");
    moe::test::write_plan(folder, "--fix tp=2 --fix pp=1", "other.json");
}

std::string execute(const std::string& plan, int steps, const std::string& more) {
    return "moe-plan execute " + plan + " --data text --lr 0.01 --json --steps " + std::to_string(steps) + " " + more;
}

double loss(const Json& run, std::size_t from_the_end) {
    const Json& steps = run["steps"];
    return steps[steps.size() - 1 - from_the_end]["loss"];
}

// Steps of the folders that carry a checkpoint's final name.
std::vector<int> steps_in(const std::string& path) {
    std::vector<int> steps;
    std::error_code missing;
    for (const auto& entry : std::filesystem::directory_iterator(path, missing)) {
        const std::string name = entry.path().filename().string();
        if (name.rfind("step-", 0) == 0 && name.find('.') == std::string::npos)
            steps.push_back(std::stoi(name.substr(5)));
    }
    return steps;
}

// The newest of them; 0 without any.
int newest_step(const std::string& path) {
    const std::vector<int> steps = steps_in(path);
    return steps.empty() ? 0 : *std::max_element(steps.begin(), steps.end());
}

} // namespace

TEST_CASE("a resumed run takes the steps that the whole run takes") {
    const Folder folder;
    set_up(folder);
    const Json whole = document(folder.run(execute("plan.json", 6, "")));
    document(folder.run(execute("plan.json", 4, "--checkpoint c --save-interval 3")));
    CHECK(folder.holds("c/step-00000003/index.json"));
    CHECK(folder.holds("c/step-00000004/rank-00007.safetensors"));
    const Json rest = document(folder.run(execute("plan.json", 6, "--checkpoint c --resume")));
    REQUIRE(rest["steps"].size() == 2);
    CHECK(rest["steps"][0]["step"] == 5);
    CHECK(rest["steps"][1]["loss"] == whole["steps"][5]["loss"]);
    // Another plan, from the same checkpoint.
    std::filesystem::remove_all(folder.file("c/step-00000006"));
    const Json other = document(folder.run(execute("other.json", 6, "--checkpoint c --resume")));
    CHECK(loss(other, 0) == nearly(loss(whole, 0)).epsilon(1e-5));
    // Nothing is left to do.
    const Outcome done = folder.run(execute("plan.json", 6, "--checkpoint c --resume --run-dir run"));
    CHECK(document(done)["steps"].empty());
    CHECK(done.err.find("Nothing to train") != std::string::npos);
    CHECK(folder.holds("run/run.json"));
}

TEST_CASE("an exported checkpoint starts a run where it stands") {
    const Folder folder;
    set_up(folder);
    const Json whole = document(folder.run(execute("plan.json", 3, "")));
    document(folder.run(execute("plan.json", 2, "--checkpoint c")));
    const Json exported = document(folder.run("moe-plan export --checkpoint c --out hf --json"));
    CHECK(exported["step"] == 2);
    CHECK(folder.holds("hf/model.safetensors"));
    // The weights are the same, without moments; the samples begin anew, so that only a resumed run sees the third
    // step's.
    const Json first = document(folder.run(execute("other.json", 1, "--init-from hf")));
    CHECK(loss(first, 0) < loss(whole, 0));
    check_line(folder.run("moe-plan export --checkpoint c --out hf"), 2, "hf");
    check_line(folder.run(execute("other.json", 1, "--init-from hf --upcycle")), 2, "holds no dense model");
    check_line(folder.run(execute("other.json", 1, "--upcycle")), 2, "--init-from");
}

TEST_CASE("SIGTERM or Ctrl-C saves and ends the run with exit status 0") {
    for (const std::string signal : {"TERM", "INT"}) {
        CAPTURE(signal);
        const Folder folder;
        set_up(folder);
        // A shell makes what it starts in the background deaf to SIGINT; env gives it its ears back.
        const Outcome ended = folder.run(
            "env --default-signal=INT " + execute("plan.json", 100000, "--checkpoint c --run-dir run") +
            " & pid=$!; for i in $(seq 1200); do grep -q 'step 2/' ../$(basename $PWD).err && break; sleep 0.05; "
            "done; kill -" +
            signal + " $pid; wait $pid");
        const Json run = document(ended);
        const int last = run["steps"].back()["step"];
        CHECK(ended.err.find("Saved step " + std::to_string(last)) != std::string::npos);
        CHECK(folder.holds("run/measured.json"));
        const Json more = document(folder.run(execute("plan.json", last + 1, "--checkpoint c --resume")));
        CHECK(more["steps"][0]["step"] == last + 1);
    }
}

namespace {

// Checkpoints that were damaged on purpose, and are until a run writes them anew.
class Damage {
public:
    explicit Damage(std::string folder) : folder_(std::move(folder)) {}

    // The newest checkpoint that nobody has damaged.
    int newest_whole() const {
        int newest = 0;
        for (const int step : steps()) newest = damaged(step) ? newest : std::max(newest, step);
        return newest;
    }
    bool any_newer() const {
        const std::vector<int> all = steps();
        return std::any_of(all.begin(), all.end(), [&](int step) { return step > newest_whole(); });
    }
    // Cuts a file of that checkpoint, or turns a bit of it over.
    void strike(int step, std::mt19937& random) {
        std::vector<std::string> files;
        for (const auto& entry : std::filesystem::directory_iterator(path_of(step)))
            files.push_back(entry.path().string());
        std::sort(files.begin(), files.end());
        const std::string& file = files[random() % files.size()];
        std::string bytes = text_of(file);
        const std::size_t at = random() % bytes.size();
        if (random() % 2 == 0)
            bytes.resize(at);
        else
            bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
        std::ofstream(file, std::ios::binary | std::ios::trunc) << bytes;
        struck_[step] = {file, bytes};
    }

private:
    static std::string text_of(const std::string& path) {
        std::ostringstream text;
        text << std::ifstream(path, std::ios::binary).rdbuf();
        return text.str();
    }
    std::string path_of(int step) const {
        const std::string digits = std::to_string(step);
        return folder_ + "/step-" + std::string(8 - digits.size(), '0') + digits;
    }
    bool damaged(int step) const {
        const auto found = struck_.find(step);
        return found != struck_.end() && text_of(found->second.first) == found->second.second;
    }
    std::vector<int> steps() const { return steps_in(folder_); }

    std::string folder_;
    std::map<int, std::pair<std::string, std::string>> struck_; // file and what it holds since, by step
};

} // namespace

TEST_CASE(
    "a run killed at any moment, or without room, or beside another, goes on where its last whole checkpoint is") {
    const Folder folder;
    set_up(folder);
    constexpr int steps = 100000; // more than any run before its end takes
    const int kills = static_cast<int>(environment("MOE_PLAN_KILLS", 5));
    const auto seed = static_cast<unsigned>(environment("MOE_PLAN_SEED", 5));
    std::mt19937 random(seed);
    Damage damage(folder.file("c"));
    int reached = 0, progressed = 0, faults[5] = {};
    const std::string run = execute("plan.json", steps, "--checkpoint c --save-interval 1 --resume");
    for (int i = 0; i < kills; ++i) {
        const std::string seconds = std::to_string(std::uniform_real_distribution<>(0.05, 0.7)(random));
        const int fault = i < 5 ? i : static_cast<int>(random() % 5);
        CAPTURE(seed);
        CAPTURE(i);
        CAPTURE(fault);
        ++faults[fault];
        if (fault == 1 && newest_step(folder.file("c")) == reached && steps_in(folder.file("c")).size() > 1) {
            damage.strike(reached, random);
            reached = damage.newest_whole();
        }
        const bool older = damage.any_newer();
        std::string command = fmt::format("timeout -s {} {} {}", fault == 2 ? "TERM" : "KILL", seconds, run);
        if (fault == 3) // no file may be longer than that, in blocks of 512 bytes: as on a full disk
            command = fmt::format("trap '' XFSZ; ulimit -f {}; {}", 16 + random() % 60, command);
        if (fault == 4) // another run at the same time; one of both is sent away
            command = fmt::format("{} > other.out 2> other.err & {}; status=$?; kill -KILL $! 2> /dev/null; "
                                  "wait $!; exit $status",
                                  run, command);
        const Outcome ended = folder.run(command);
        CAPTURE(ended.err);
        // Whatever it was doing, nothing that carries a final name is damaged, but what was damaged here.
        if (!older) CHECK(ended.err.find("skipped") == std::string::npos);
        CHECK_MESSAGE((ended.status == 137 || ended.status == 124 || ended.status == 0 ||
                       (fault == 3 && ended.status == 1) || (fault == 4 && ended.status == 2)),
                      ended.status);
        if (ended.status == 1) CHECK(ended.err.find("cannot write") != std::string::npos);
        if (ended.status == 2) CHECK(ended.err.find("another run writes there") != std::string::npos);
        const int newest = damage.newest_whole();
        CHECK(newest >= reached);
        progressed += newest > reached ? 1 : 0;
        reached = newest;
    }
    MESSAGE(kills, " ends (killed ", faults[0], ", killed behind damage ", faults[1], ", SIGTERM ", faults[2],
            ", no room ", faults[3], ", beside another ", faults[4], "), ", progressed,
            " of them behind a new checkpoint; step ", reached);
    const Json rest = document(folder.run(execute("plan.json", reached + 1, "--checkpoint c --resume")));
    REQUIRE(rest["steps"].size() == 1);
    const Json whole = document(folder.run(execute("plan.json", reached + 1, "")));
    CHECK(loss(rest, 0) == loss(whole, 0));
}

TEST_CASE("damaged checkpoints are named and skipped; senseless requests are refused") {
    const Folder folder;
    set_up(folder);
    document(folder.run(execute("plan.json", 3, "--checkpoint c --save-interval 1")));
    std::ofstream(folder.file("c/step-00000003/rank-00002.safetensors"), std::ios::trunc) << "short";
    const Outcome resumed = folder.run(execute("plan.json", 3, "--checkpoint c --resume"));
    CHECK(document(resumed)["steps"][0]["step"] == 3);
    CHECK(resumed.err.find("skipped: c/step-00000003/rank-00002.safetensors") != std::string::npos);
    check_line(folder.run("moe-plan execute plan.json --data text --checkpoint c"), 2, "add --resume to go on");
    check_line(folder.run("moe-plan execute plan.json --data text --resume"), 2, "--resume: needs --checkpoint");
    check_line(folder.run("moe-plan execute plan.json --data text --save-interval 2"), 2, "needs --checkpoint");
    check_line(folder.run("moe-plan execute plan.json --data text --keep-checkpoints 2"), 2, "needs --checkpoint");
    check_line(folder.run("moe-plan execute plan.json --data text --checkpoint d --keep-checkpoints -2"), 2,
               "--keep-checkpoints -2");
    document(folder.run(execute("plan.json", 6, "--checkpoint k --save-interval 1 --keep-checkpoints 2")));
    CHECK(folder.holds("k/step-00000006/index.json"));
    CHECK(folder.holds("k/step-00000005/index.json"));
    CHECK(!folder.holds("k/step-00000004"));
    check_line(folder.run("moe-plan execute plan.json --data text --checkpoint d --save-interval -2"), 2,
               "--save-interval -2");
    check_line(folder.run("moe-plan execute plan.json --data text --steps 9 --seed 2 --checkpoint c --resume"), 2,
               "seed was 1, this run has 2: add --allow-change seed");
}

TEST_CASE("what changes the meaning of a run is refused on resume; a changed batch is said") {
    const Folder folder;
    set_up(folder);
    document(folder.run(execute("plan.json", 2, "--checkpoint c")));
    const std::string resume = "--checkpoint c --resume ";
    check_line(folder.run(execute("plan.json", 3, resume + "--shuffle off")), 2, "shuffle was on, this run has off");
    moe::test::write_dataset(folder, "Another text than the one before. ");
    check_line(folder.run(execute("plan.json", 3, resume)), 2, "--allow-change data");
    const Outcome allowed = folder.run(execute("plan.json", 3,
                                               resume + "--allow-change data --allow-change shuffle "
                                                        "--shuffle off"));
    document(allowed);
    CHECK(allowed.err.find("data was 1 text") != std::string::npos);
    Json plan = Json::parse(std::ifstream(folder.file("plan.json")));
    plan["model"]["rms_norm_eps"] = 0.01;
    std::ofstream(folder.file("eps.json")) << plan;
    check_line(folder.run(execute("eps.json", 4, resume + "--shuffle off")), 2, "--allow-change rms_norm_eps");
    plan = Json::parse(std::ifstream(folder.file("plan.json")));
    plan["workload"]["seq"] = plan["workload"]["seq"].get<int>() / 2;
    std::ofstream(folder.file("short.json")) << plan;
    const Outcome shorter = folder.run(execute("short.json", 4, resume + "--shuffle off"));
    CHECK(document(shorter)["steps"][0]["step"] == 4);
    CHECK(shorter.err.find("a step was ") != std::string::npos);
    check_line(folder.run(execute("plan.json", 3, "--allow-change data")), 2, "--allow-change: needs --resume");
}

TEST_CASE("a folder of another tool is not resumed from, and two runs do not share one") {
    const Folder folder;
    set_up(folder);
    std::filesystem::create_directories(folder.file("m/iter_0000100"));
    check_line(folder.run(execute("plan.json", 2, "--checkpoint m --resume")), 2,
               "holds iter_0000100 and no checkpoint");
    const Outcome second = folder.run(
        execute("plan.json", 100000, "--checkpoint c") +
        "& pid=$!; for i in $(seq 1200); do grep -q 'step 1/' ../$(basename $PWD).err && break; sleep 0.05; "
        "done; moe-plan execute plan.json --data text --steps 2 --checkpoint c 2> second; echo $? >> second; "
        "kill $pid; wait $pid");
    document(second);
    std::stringstream said;
    said << std::ifstream(folder.file("second")).rdbuf();
    CHECK(said.str().find("another run writes there (host ") != std::string::npos);
    CHECK(said.str().find("\n2\n") != std::string::npos);
}
