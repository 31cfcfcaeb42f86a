// One process per rank: the same losses as threads, under every launcher's variables, and one line when a rank is gone.
#include "tests/tools/verbs/command.hpp"
#include "tests/tools/verbs/stopped_thread.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

using moe::test::await_end;
using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using moe::test::Outcome;
using moe::test::stop_thread;
using moe::test::thread_named;
using Json = nlohmann::ordered_json;

namespace {

void set_up(const Folder& folder) {
    moe::test::write_dataset(folder, "Pack my box with five dozen liquor jugs. ");
    moe::test::write_plan(folder, "--fix tp=2 --fix ep=4 --fix pp=2", "plan.json");
}

// A port of this test's own, most likely: below those that the system gives to whoever calls.
std::string port() {
    static int next = 10000 + static_cast<int>(::getpid() % 20000);
    return std::to_string(next++);
}

// Starts a process per rank behind `rank` and `world` set to the variables of a launcher; pids in "pids", output of
// rank r in out.r and err.r. Ends when all have ended, with their exit statuses one behind the other in "statuses".
std::string start(const std::string& rank, const std::string& world, const std::string& arguments,
                  const std::string& meanwhile = "") {
    return "rm -f pids; for r in 0 1 2 3 4 5 6 7; do env " + rank + "=$r " + world + "=8 MASTER_PORT=" + port() +
           " moe-plan execute plan.json --data text --lr 0.01 " + arguments +
           " > out.$r 2> err.$r & echo $! >> pids; done; " + meanwhile +
           " for p in $(cat pids); do wait $p; echo $?; done > statuses";
}

const std::string when_under_way = "for i in $(seq 600); do grep -q 'step 2/' err.0 && break; sleep 0.1; done; ";

} // namespace

TEST_CASE("processes take the steps that threads take, under the variables of every launcher") {
    const Folder folder;
    set_up(folder);
    const std::string how = "--steps 3 --valid-data text --eval-interval 2 --eval-batches 2 --json ";
    const Json threads =
        document(folder.run("moe-plan execute plan.json --data text --lr 0.01 --record-routing threads " + how));
    const std::pair<const char*, const char*> launchers[] = {
        {"RANK", "WORLD_SIZE"}, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, {"SLURM_PROCID", "SLURM_NTASKS"}};
    for (const auto& [rank, world] : launchers) {
        CAPTURE(rank);
        folder.run(start(rank, world, how + "--run-dir run --replay-routing threads --record-routing processes"));
        CHECK(folder.read("statuses") == "0\n0\n0\n0\n0\n0\n0\n0\n");
        for (const char* file : {"/step-00000001.safetensors", "/step-00000003.safetensors"})
            CHECK(folder.read(std::string("processes") + file) == folder.read(std::string("threads") + file));
        const Json processes = Json::parse(folder.read("out.0"));
        for (int i = 0; i < 3; ++i) {
            CHECK(processes["steps"][i]["loss"] == threads["steps"][i]["loss"]);
            CHECK(processes["steps"][i]["grad_norm"] == threads["steps"][i]["grad_norm"]);
            CHECK(processes["steps"][i]["routers"] == threads["steps"][i]["routers"]);
        }
        CHECK(processes["evaluations"] == threads["evaluations"]);
        for (int r = 1; r < 8; ++r)
            CHECK((folder.read("out." + std::to_string(r)) + folder.read("err." + std::to_string(r))).empty());
    }
    // The timeline has the rows of all processes.
    const Json compared = document(folder.run("moe-plan compare run --json"));
    std::size_t ops = 0;
    for (const Json& kind : compared["by_kind"]) ops += kind["count"].get<std::size_t>();
    CHECK(compared["matched_ops"].get<std::size_t>() == ops);
    CHECK(!folder.read("run/routing.csv").empty());
}

TEST_CASE("processes clip the attention heads that threads clip, and the history tells how many") {
    const Folder folder;
    moe::test::write_dataset(folder, "Pack my box with five dozen liquor jugs. ");
    folder.write(
        "config.json",
        R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 256, "hidden_size": 64,
                     "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 64,
                     "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
                     "hidden_act": "silu", "tie_word_embeddings": false, "max_position_embeddings": 4096})");
    REQUIRE(
        folder
            .run("moe-plan search --model config.json --hardware cpu-local --gpus 8 --gbs 8 --seq 64 --precision fp32 "
                 "--fix tp=2 --fix cp=2 --fix ep=2 --fix pp=2 --out plan.json")
            .status == 0);
    const std::string how = "--steps 3 --qk-clip 0.05 --qk-clip-alpha 0.6 --json ";
    const Json threads =
        document(folder.run("moe-plan execute plan.json --data text --lr 0.01 --metrics history " + how));
    folder.run(start("RANK", "WORLD_SIZE", how));
    CHECK(folder.read("statuses") == "0\n0\n0\n0\n0\n0\n0\n0\n");
    const Json processes = Json::parse(folder.read("out.0"));
    std::istringstream history(folder.read("history/metrics.jsonl"));
    int clipped = 0;
    for (int i = 0; i < 3; ++i) {
        const Json& step = threads["steps"][i];
        CHECK(step["max_logit"].get<double>() > 0.0);
        clipped += step["clipped_heads"].get<int>();
        std::string line;
        std::getline(history, line);
        for (const char* name : {"loss", "max_logit", "clipped_heads"}) {
            CHECK(processes["steps"][i][name] == step[name]);
            CHECK(Json::parse(line)[name] == step[name]);
        }
    }
    CHECK(clipped > 0);
    CHECK(
        threads["steps"][1]["loss"] !=
        document(folder.run("moe-plan execute plan.json --data text --lr 0.01 --steps 2 --json"))["steps"][1]["loss"]);
}

TEST_CASE("mpirun starts a process per rank, with the losses of threads") {
    const Folder folder;
    const std::string mpirun =
        "env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe --bind-to none ";
    if (folder.run(mpirun + "-n 2 true").status != 0) {
        MESSAGE("skipped: no mpirun that starts processes here (Debian's openmpi-bin)");
        return;
    }
    set_up(folder);
    const Json threads = document(folder.run("moe-plan execute plan.json --data text --lr 0.01 --steps 3 --json"));
    const Outcome run = folder.run("MASTER_PORT=" + port() + " " + mpirun +
                                   "-n 8 moe-plan execute plan.json --data text --lr 0.01 --steps 3 --json");
    const Json processes = document(run);
    REQUIRE(processes["steps"].size() == 3);
    for (int i = 0; i < 3; ++i) {
        CHECK(processes["steps"][i]["loss"] == threads["steps"][i]["loss"]);
        CHECK(processes["steps"][i]["grad_norm"] == threads["steps"][i]["grad_norm"]);
    }
    CHECK(run.err.find("8 processes") != std::string::npos);
}

namespace {

// Two hosts are two network namespaces with a cable between them: nothing else leads from one to the other.
struct TwoHosts {
    const Folder& folder;
    std::string a = "moe-plan-a-" + std::to_string(::getpid()), b = "moe-plan-b-" + std::to_string(::getpid());
    std::string cable = std::to_string(::getpid() % 100000);
    bool made = false;

    explicit TwoHosts(const Folder& in) : folder(in) {
        made = folder
                   .run("ip netns add " + a + " && ip netns add " + b + " && ip link add va" + cable + " netns " + a +
                        " type veth peer name vb" + cable + " netns " + b + " && ip -n " + a +
                        " addr add 10.77.0.1/24 dev va" + cable + " && ip -n " + b + " addr add 10.77.0.2/24 dev vb" +
                        cable + " && ip -n " + a + " link set va" + cable + " up && ip -n " + b + " link set vb" +
                        cable + " up && ip -n " + a + " link set lo up && ip -n " + b + " link set lo up")
                   .status == 0;
        if (!made) MESSAGE("skipped: no network namespaces here (they need root and iproute2)");
    }
    ~TwoHosts() { folder.run("ip netns del " + a + "; ip netns del " + b); }
    TwoHosts(const TwoHosts&) = delete;
    TwoHosts& operator=(const TwoHosts&) = delete;

    // Runs a plan of eight ranks with half of them on each; the document of rank 0.
    Json execute(const std::string& plan) const {
        folder.run("export MOE_PLAN_JOB_TOKEN=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \\n'); "
                   "rm -f pids; for r in 0 1 2 3 4 5 6 7; do host=" +
                   a + "; if [ $r -ge 4 ]; then host=" + b +
                   "; fi; ip netns exec $host env RANK=$r WORLD_SIZE=8 MASTER_ADDR=10.77.0.1 MASTER_PORT=" + port() +
                   " \"$(command -v moe-plan)\" execute " + plan +
                   " --data text --lr 0.01 --steps 2 --json"
                   " > out.$r 2> err.$r & echo $! >> pids; done; "
                   "for p in $(cat pids); do wait $p; echo $?; done > statuses");
        CHECK(folder.read("statuses") == "0\n0\n0\n0\n0\n0\n0\n0\n");
        return Json::parse(folder.read("out.0"));
    }
    // Bytes that have left the first host so far.
    double sent() const {
        const Outcome link = folder.run("ip -n " + a + " -s -j link show dev va" + cable);
        return Json::parse(link.out)[0]["stats64"]["tx"]["bytes"].get<double>();
    }
};

void check_steps(const Json& processes, const Json& threads) {
    for (int i = 0; i < 2; ++i) {
        CHECK(processes["steps"][i]["loss"] == threads["steps"][i]["loss"]);
        CHECK(processes["steps"][i]["grad_norm"] == threads["steps"][i]["grad_norm"]);
    }
}

} // namespace

TEST_CASE("processes on two hosts take the steps that threads take") {
    const Folder folder;
    const TwoHosts hosts(folder);
    if (!hosts.made) return;
    set_up(folder);
    const Json threads = document(folder.run("moe-plan execute plan.json --data text --lr 0.01 --steps 2 --json"));
    // The address can be reached from elsewhere, and no token was drawn.
    check_line(folder.run("ip netns exec " + hosts.a +
                          " env RANK=0 WORLD_SIZE=8 MASTER_ADDR=10.77.0.1 \"$(command -v moe-plan)\" "
                          "execute plan.json --data text"),
               2, "MASTER_ADDR = 10.77.0.1: other machines can reach it, and the job has no token");
    check_steps(hosts.execute("plan.json"), threads);
}

// Of its six experts a token has three on the other host, in the mean: one level sends as many rows, two levels one.
TEST_CASE("processes on two hosts: dispatch in two levels sends a token to the other host once") {
    const Folder folder;
    const TwoHosts hosts(folder);
    if (!hosts.made) return;
    moe::test::write_dataset(folder, "Pack my box with five dozen liquor jugs. ");
    folder.write(
        "config.json",
        R"({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 256, "hidden_size": 256,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 16,
            "num_local_experts": 16, "num_experts_per_tok": 6, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": false, "max_position_embeddings": 4096})");
    REQUIRE(folder
                .run("moe-plan search --model config.json --hardware cpu-local --gpus 8 --gbs 8 --seq 256 "
                     "--precision fp32 --fix tp=1 --fix cp=1 --fix pp=1 --fix ep=8 --fix dispatcher=alltoall "
                     "--out rows.json")
                .status == 0);
    // The same plan on a machine whose NVLink joins four ranks, for which two levels are made.
    Json plan = Json::parse(folder.read("rows.json"));
    plan["dispatcher"] = "hybridep";
    plan["hardware"]["nvlink_domain"] = plan["hardware"]["nvlink_domain_used"] = 4;
    folder.write("levels.json", plan.dump());
    const auto measured = [&](const std::string& file) {
        const Json threads =
            document(folder.run("moe-plan execute " + file + " --data text --lr 0.01 --steps 2 --json"));
        const double before = hosts.sent();
        check_steps(hosts.execute(file), threads);
        return hosts.sent() - before;
    };
    const double rows = measured("rows.json"), levels = measured("levels.json");
    // Four exchanges in each of two layers, of 4 ranks with 256 tokens of 1 KiB, in each of two steps. What else goes,
    // gradients and weights, is the same, and packets have heads.
    const double once = 2.0 * 2 * 4 * (4 * 256 * 1024.0);
    CHECK(levels > once);
    CHECK(rows - levels > 1.7 * once);
    CHECK(rows - levels < 2.3 * once);
}

TEST_CASE("processes run a step again where routed rows overflow, as threads do") {
    const Folder folder;
    set_up(folder);
    REQUIRE(folder
                .run("moe-plan search --model tiny-qwen3-moe --hardware cpu-local --gpus 8 --gbs 8 --seq 256 "
                     "--precision fp32 --fix tp=1 --fix ep=4 --fix pp=2 --fix mbs=1 --fix capacity=1 --out plan.json")
                .status == 0);
    const Json threads = document(folder.run("moe-plan execute plan.json --data text --lr 0.01 --steps 2 --json"));
    folder.run(start("RANK", "WORLD_SIZE", "--steps 2 --json"));
    CHECK(folder.read("statuses") == "0\n0\n0\n0\n0\n0\n0\n0\n");
    const Json processes = Json::parse(folder.read("out.0"));
    for (int i = 0; i < 2; ++i) {
        CHECK(threads["steps"][i]["overflow"] > 0.0);
        for (const char* figure : {"loss", "grad_norm", "overflow"})
            CHECK(processes["steps"][i][figure] == threads["steps"][i][figure]);
    }
    CHECK(folder.read("err.0").find("too many for the planned capacity: the step was run again") != std::string::npos);
}

TEST_CASE("processes save together, and a run of threads goes on from it") {
    const Folder folder;
    set_up(folder);
    folder.run(start("RANK", "WORLD_SIZE", "--steps 100000 --checkpoint c --json",
                     when_under_way + "kill -TERM $(sed -n 4p pids);"));
    CHECK(folder.read("statuses") == "0\n0\n0\n0\n0\n0\n0\n0\n");
    const Json run = Json::parse(folder.read("out.0"));
    const int last = run["steps"].back()["step"];
    const Outcome more = folder.run("moe-plan execute plan.json --data text --lr 0.01 --json --checkpoint c --resume "
                                    "--steps " +
                                    std::to_string(last + 1));
    CHECK(document(more)["steps"][0]["step"] == last + 1);
    CHECK(more.err.find("skipped") == std::string::npos);
}

TEST_CASE("when a rank is killed or stopped, the others end within 30 s with one line that names it and the op") {
    const Folder folder;
    set_up(folder);
    for (const char* signal : {"KILL", "STOP"}) {
        CAPTURE(signal);
        // The victim is not waited for while it is stopped.
        folder.run(start("RANK", "WORLD_SIZE", "--steps 100000 --json",
                         when_under_way + "v=$(sed -n 6p pids); date +%s > begin; kill -" + signal +
                             " $v; for p in $(grep -v \"^$v$\" pids); do wait $p; echo $?; done > others; "
                             "date +%s > end; kill -KILL $v;"));
        CHECK(std::stol(folder.read("end")) - std::stol(folder.read("begin")) <= 30);
        CHECK(folder.read("others") == "1\n1\n1\n1\n1\n1\n1\n");
        const std::string gone = std::string(signal) == "KILL" ? "rank 5 has died" : "rank 5 has stopped";
        for (const int r : {1, 2, 3, 4, 6, 7}) {
            const std::string line = folder.read("err." + std::to_string(r));
            CAPTURE(line);
            CHECK(std::count(line.begin(), line.end(), '\n') == 1);
            CHECK(line.find("slot ") != std::string::npos); // the op and where it stands
            CHECK(line.find(gone) != std::string::npos);
        }
    }
}

TEST_CASE("a rank that hangs in an op ends the run, its own process included, with one line that names it and the op") {
    const Folder folder;
    set_up(folder);
    for (const bool processes : {true, false}) {
        CAPTURE(processes);
        const std::string arguments = "--steps 100000 --json --hang-timeout 3";
        const std::string command = processes
                                        ? start("RANK", "WORLD_SIZE", arguments)
                                        : "rm -f pids; moe-plan execute plan.json --data text --lr 0.01 " + arguments +
                                              " > out.0 2> err.0 & echo $! > pids; wait $!; echo $? > statuses";
        folder.run("rm -f err.0 pids"); // of the case before
        std::thread run([&] { folder.run(command); });
        const auto under_way = [&] { return folder.read("err.0").find("step 2/") != std::string::npos; };
        for (int i = 0; i < 600 && !under_way(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
        std::istringstream pids(folder.read("pids"));
        std::vector<pid_t> all{std::istream_iterator<pid_t>(pids), {}};
        const pid_t process = all.empty() ? 0 : all.at(processes ? 5 : 0), thread = thread_named(process, "rank 5");
        const bool stopped = thread != 0 && stop_thread(thread);
        const bool ended = stopped && await_end(process, thread, 30.0);
        for (const pid_t pid : all)
            if (!ended) ::kill(pid, SIGKILL);
        run.join();
        REQUIRE(thread != 0);
        if (!stopped) {
            MESSAGE("skipped: this system does not allow one process to trace another");
            return;
        }
        CHECK(ended);
        const std::string statuses = folder.read("statuses");
        CHECK(statuses == (processes ? "1\n1\n1\n1\n1\n1\n1\n1\n" : "1\n"));
        for (int r = 0; r < (processes ? 8 : 1); ++r) {
            const std::string log = folder.read("err." + std::to_string(r));
            CAPTURE(log);
            // A thread may be stopped while it holds the lock of all ranks, as no computation does: others hang at it.
            CHECK(log.find(processes ? "moe-plan: rank 5: " : "moe-plan: rank ") != std::string::npos);
            CHECK(log.find("slot ") != std::string::npos);
            CHECK(log.find("hangs: nothing has ended for 3 s") != std::string::npos);
        }
    }
}

TEST_CASE("an op that takes longer than the limit, but whose rank waits for others, is no hang") {
    const Folder folder;
    set_up(folder);
    // The whole run is suspended for longer than the limit: no rank gets on, and none is to blame.
    folder.run(start("RANK", "WORLD_SIZE", "--steps 40 --json --hang-timeout 2",
                     when_under_way + "kill -STOP $(cat pids); sleep 4; kill -CONT $(cat pids); "));
    CHECK(folder.read("statuses") == "0\n0\n0\n0\n0\n0\n0\n0\n");
}

TEST_CASE("processes that do not fit the plan are refused") {
    const Folder folder;
    set_up(folder);
    check_line(folder.run("env RANK=1 WORLD_SIZE=4 moe-plan execute plan.json --data text"), 2,
               "has 8 ranks, but 4 processes were started");
    check_line(folder.run("env RANK=9 WORLD_SIZE=8 moe-plan execute plan.json --data text"), 2, "RANK = 9");
    check_line(folder.run("env RANK=1 WORLD_SIZE=8 MOE_PLAN_JOB_TOKEN=short moe-plan execute plan.json --data text"), 2,
               "MOE_PLAN_JOB_TOKEN: has 5 characters, fewer than 16");
    check_line(folder.run("env RANK=0 WORLD_SIZE=8 moe-plan execute plan.json --data text --listen 0.0.0.0"), 2,
               "--listen = 0.0.0.0: other machines can reach it");
}
