// Job files: what they say, and that each one runs the plan's ranks, with stand-ins for the cluster's own commands.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <unistd.h>

#include <string>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using moe::test::Outcome;
using Json = nlohmann::ordered_json;

namespace {

const std::string arguments = " --data text --arguments '--lr 0.01 --steps 2 --json' ";

// A plan of 8 ranks, its data, and a folder "bin" in which job files find moe-plan.
void set_up(const Folder& folder) {
    moe::test::write_dataset(folder, "Pack my box with five dozen liquor jugs. ");
    moe::test::write_plan(folder, "--fix tp=2 --fix ep=4 --fix pp=2", "plan.json");
    REQUIRE(folder.run("mkdir bin && ln -s \"$MOE_PLAN\" bin/moe-plan").status == 0);
}

void stand_in(const Folder& folder, const std::string& command, const std::string& script) {
    folder.write("bin/" + command, "#!/bin/bash\n" + script);
    REQUIRE(folder.run("chmod +x bin/" + command).status == 0);
}

std::string port() {
    static int next = 30000 + static_cast<int>(::getpid() % 2000);
    return std::to_string(next++);
}

// Runs it where "bin" comes first, and holds its losses to those of threads.
void check_losses(const Folder& folder, const std::string& command) {
    const Json threads = document(folder.run("moe-plan execute plan.json --data text --lr 0.01 --steps 2 --json"));
    const Json ranks = document(folder.run("export PATH=\"$PWD/bin:$PATH\"; " + command));
    REQUIRE(ranks["steps"].size() == 2);
    for (int i = 0; i < 2; ++i) CHECK(ranks["steps"][i]["loss"] == threads["steps"][i]["loss"]);
    CHECK(ranks["ranks"] == 8);
}

} // namespace

TEST_CASE("launch --slurm: two nodes of four processes each train what threads train") {
    const Folder folder;
    set_up(folder);
    const Json job =
        document(folder.run("moe-plan launch plan.json --slurm --gpus-per-node 4 --out job.sh --json" + arguments));
    CHECK(job["nodes"] == 2);
    CHECK(job["processes_per_node"] == 4);
    CHECK(job["text"] == folder.read("job.sh"));
    for (const char* line : {"#SBATCH --nodes=2\n", "#SBATCH --ntasks-per-node=4\n"})
        CHECK(folder.read("job.sh").find(line) != std::string::npos);
    CHECK(folder.read("job.sh").find("gpus-per-node") == std::string::npos); // a plan for cores
    stand_in(folder, "scontrol", "echo 127.0.0.1; sleep 0.1; echo node2\n");
    stand_in(folder, "srun", R"(shift
for rank in 0 1 2 3 4 5 6 7; do
  SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 4)) SLURM_NTASKS=8 SLURM_NNODES=2 "$@" &
done
wait
)");
    check_losses(folder, "SLURM_JOB_ID=" + port() + " SLURM_JOB_NODELIST='node[1-2]' ./job.sh");
}

TEST_CASE("launch --mpi: mpirun is told how many processes, and how many on a node") {
    const Folder folder;
    set_up(folder);
    REQUIRE(folder.run("moe-plan launch plan.json --mpi --out job.sh" + arguments).status == 0);
    stand_in(folder, "mpirun", R"(printf '%s ' "$@" > words
while [ "$1" != moe-plan ]; do shift; done
for rank in 0 1 2 3 4 5 6 7; do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_LOCAL_RANK=$rank OMPI_COMM_WORLD_SIZE=8 "$@" &
done
wait
)");
    check_losses(folder, "MASTER_PORT=" + port() + " ./job.sh");
    CHECK(folder.read("words").find("-n 8 --map-by ppr:8:node") == 0);
    CHECK(folder.read("words").find(" -x MOE_PLAN_JOB_TOKEN ") != std::string::npos);
    // Every start draws a token of its own.
    stand_in(folder, "mpirun", "echo \"$MOE_PLAN_JOB_TOKEN\"\n");
    const std::string tokens = folder.run("export PATH=\"$PWD/bin:$PATH\"; ./job.sh && ./job.sh").out;
    REQUIRE(tokens.size() == 2 * 65);
    CHECK(tokens.substr(0, 64) != tokens.substr(65, 64));
}

TEST_CASE("launch --k8s: a pod per node runs that node's ranks") {
    const Folder folder;
    set_up(folder);
    const Outcome text = folder.run("moe-plan launch plan.json --k8s --gpus-per-node 4 --image here/moe:1" + arguments);
    REQUIRE(text.status == 0);
    for (const char* line : {"  completions: 2\n", "          image: here/moe:1\n", "  completionMode: Indexed\n",
                             "            - name: MOE_PLAN_JOB_TOKEN\n"})
        CHECK(text.out.find(line) != std::string::npos);
    // The script and the plan as they stand in the manifest, without their indentation.
    folder.write("job.yaml", text.out);
    folder.run("sed -n '/^            - |/,/^          volumeMounts/p' job.yaml | sed '1d;$d;s/^ *//;"
               "s|/plan/plan.json|carried.json|' > pod.sh");
    folder.run("sed -n '/^  plan.json: |/,/^---/p' job.yaml | sed '1d;$d;s/^    //' > carried.json");
    CHECK(folder.read("carried.json") == folder.read("plan.json"));
    check_losses(folder, "export MASTER_ADDR=127.0.0.1 MASTER_PORT=" + port() +
                             "; JOB_COMPLETION_INDEX=1 bash pod.sh & JOB_COMPLETION_INDEX=0 bash pod.sh && wait");
}

TEST_CASE("launch: GPUs of a node as the hardware has them; bad requests are one line") {
    const Folder folder;
    REQUIRE(folder.run("moe-plan " + moe::test::gpu_search + "--out h100.json").status == 0);
    const Json job = document(folder.run("moe-plan launch h100.json --slurm --json"));
    CHECK(job["nodes"] == 2);
    CHECK(job["text"].get<std::string>().find("#SBATCH --gpus-per-node=8\n") != std::string::npos);
    CHECK(job["text"].get<std::string>().find(" --backend cuda ") != std::string::npos);
    check_line(folder.run("moe-plan launch h100.json"), 2, "one of --slurm, --mpi and --k8s");
    check_line(folder.run("moe-plan launch h100.json --slurm --mpi"), 2, "one of --slurm, --mpi and --k8s");
    check_line(folder.run("moe-plan launch h100.json --k8s"), 2, "needs --image");
    check_line(folder.run("moe-plan launch h100.json --mpi --gpus-per-node 5"), 2,
               "the plan's 16 ranks do not fill whole nodes: use a divisor of 16");
    check_line(folder.run("moe-plan launch none.json --mpi"), 2, "none.json");
    REQUIRE(folder
                .run("moe-plan search --model Qwen3-30B-A3B --hardware gb200-nvl72 --gpus 8 --gbs 64 --seq 4096 "
                     "--precision mxfp8 --top 1 --out mxfp8.json")
                .status == 0);
    const Outcome warned = folder.run("moe-plan launch mxfp8.json --slurm --json");
    CHECK(document(warned)["nodes"] == 2);
    CHECK(warned.err.find("execute cannot run this plan: ") != std::string::npos);
    // Eight cards of a node without NVLink; the kernels of execute are not built for them.
    REQUIRE(folder
                .run("moe-plan search --model Qwen3-30B-A3B --hardware l40s --gpus 32 --gbs 64 --seq 4096 "
                     "--precision bf16 --top 1 --out l40s.json")
                .status == 0);
    const Outcome cards = folder.run("moe-plan launch l40s.json --slurm --json");
    CHECK(document(cards)["nodes"] == 4);
    CHECK(document(cards)["processes_per_node"] == 8);
    CHECK(cards.err.find("compute capability 9.0") != std::string::npos);
}

namespace {

// A plan for 16 H100 and the script that trains it with Megatron-LM, with a stand-in for torchrun.
void write_megatron_script(const Folder& folder) {
    REQUIRE(folder.run("mkdir bin && moe-plan " + moe::test::gpu_search + "--out h100.json").status == 0);
    REQUIRE(folder.run("moe-plan launch h100.json --megatron-lm --out train.sh").status == 0);
    stand_in(folder, "torchrun", "printf '%s\\n' \"$@\"\n");
}

} // namespace

TEST_CASE("launch --megatron-lm: the script passes on what args says, data and checkpoints by variables") {
    const Folder folder;
    write_megatron_script(folder);
    const Json said = document(folder.run("moe-plan launch h100.json --megatron-lm --json"));
    CHECK(said["text"] == folder.read("train.sh"));
    const std::string run = "PATH=\"$PWD/bin:$PATH\" ";
    const Outcome alone = folder.run(run + "./train.sh");
    CHECK(alone.status == 1);
    CHECK(alone.err.find("set MASTER_ADDR to the first node") != std::string::npos);
    const Outcome plain = folder.run(run + "NODE_RANK=1 MASTER_ADDR=first ./train.sh --seed 7");
    REQUIRE(plain.status == 0);
    std::string words = "--node-rank\n1\n--nnodes\n2\n--nproc-per-node\n8\n--master-addr\nfirst\n--master-port\n29500\n"
                        "Megatron-LM/pretrain_gpt.py\n";
    for (const Json& word : said["args"]) words += word.get<std::string>() + "\n";
    CHECK(plain.out == words + "--seed\n7\n");
    const Outcome data =
        folder.run(run + "MASTER_ADDR=first DATA='0.3 a 0.7 b' TOKENIZER=tokenizer CHECKPOINTS='my dir' "
                         "STEPS=9 ./train.sh");
    for (const char* part : {"\n--data-path\n0.3\na\n0.7\nb\n--split\n", "\n--tokenizer-model\ntokenizer\n",
                             "\n--save\nmy dir\n--load\nmy dir\n", "\n--train-iters\n9\n"})
        CHECK_MESSAGE(data.out.find(part) != std::string::npos, part);
    CHECK(data.out.find("--mock-data") == std::string::npos);
    CHECK(folder.run(run + "MASTER_ADDR=first DATA=a ./train.sh").status == 1);
}

TEST_CASE("launch --megatron-lm: under Slurm one task of a node starts its processes") {
    const Folder folder;
    write_megatron_script(folder);
    stand_in(folder, "scontrol", "echo node7; echo node8\n");
    stand_in(folder, "srun", "shift\nfor node in 0 1; do SLURM_NODEID=$node \"$@\" > said$node; done\n");
    REQUIRE(folder.run("PATH=\"$PWD/bin:$PATH\" SLURM_JOB_ID=5 SLURM_JOB_NODELIST='node[7-8]' ./train.sh").status == 0);
    CHECK(folder.read("said1").starts_with("--node-rank\n1\n--nnodes\n2\n--nproc-per-node\n8\n--master-addr\nnode7\n"));
    CHECK(folder.read("said0").starts_with("--node-rank\n0\n"));
}

TEST_CASE("launch for other engines: files, documents, and refusals that write nothing") {
    const Folder folder;
    REQUIRE(folder.run("moe-plan " + moe::test::gpu_search + "--out h100.json").status == 0);
    const Json core = document(folder.run("moe-plan launch h100.json --megatron-core --out core.json --json"));
    CHECK(core["class"] == "TransformerConfig");
    CHECK(core["kwargs"]["num_moe_experts"] == 128);
    CHECK(Json::parse(folder.read("core.json")) == core);
    const Json bridge = document(folder.run("moe-plan launch h100.json --megatron-bridge --json"));
    CHECK(bridge["recipe"] == "qwen3_30b_a3b_pretrain_config");
    CHECK(bridge["args"][1] == bridge["recipe"]);
    check_line(folder.run("moe-plan launch h100.json --megatron-lm --torchtitan"), 2, "one of --slurm");
    check_line(folder.run("moe-plan launch h100.json --megatron-lm --out h100.json"), 2, "--out");
    REQUIRE(folder.run("moe-plan " + moe::test::gpu_search + "--fix precision=fp8-blockwise --out fp8.json").status ==
            0);
    check_line(folder.run("moe-plan launch fp8.json --torchtitan --out job.toml"), 2, "precision fp8-blockwise: ");
    CHECK_FALSE(folder.holds("job.toml"));
}
