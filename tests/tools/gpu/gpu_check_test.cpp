// tools/gpu-check without a GPU: what it makes of the programs that it runs, played by scripts.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdlib>
#include <string>

using moe::test::Folder;
using moe::test::Outcome;
using Json = nlohmann::ordered_json;

namespace {

// A build whose programs are scripts: the kernels' test begins with `kernels` and has three cases, of which the first
// has plain kernels too and reports what is nearest to its bar there; compare says what was measured.
void set_up(const Folder& folder, const std::string& kernels, const std::string& memory_gib) {
    REQUIRE(folder.run("mkdir -p build/tests/kernels build/tests/engine build/tools").status == 0);
    const auto script = [&](const std::string& name, const std::string& text) {
        folder.write("build/" + name, "#!/bin/sh\n" + text + "\n");
    };
    script("tests/kernels/kernels_cuda_test", kernels + R"(
row='"name": "gemm", "unit": "relative error", "ratio": 0.25'
case "$*" in
"--plain --list-test-cases") printf '[doctest] all cases\n====\ngemm: one, two\n' && exit ;;
*--list-test-cases) printf '[doctest] all cases\n====\ngemm: one, two\nrope: heads\ncross_entropy: rows\n' && exit ;;
*--plain*) row='"name": "gemm", "unit": "relative error", "ratio": 0.75' ;;
*--bench*) row='"name": "gemm: beside a copy", "unit": "us", "ratio": 0.5' ;;
esac
echo "{\"device\": \"a GPU\", \"gemm\": \"a library\", \"attention\": \"another\", \"cases\": 5,
    \"rows\": [{$row, \"ours\": 1.0, \"reference\": 2.0, \"bar\": 1.0, \"ok\": true}]}" > "$2"
echo "[doctest] test cases:   1 |   1 passed | 0 failed")");
    script("tools/moe-plan-cuda.so", "exit 1");
    script("tests/engine/engine_cuda_test", "test -x \"$MOE_PLAN_CUDA\"");
    // Plans that save memory take 8 GiB less; every run learns the same.
    script("tools/moe-plan", R"(case $1 in
search)
    echo "$*" > asked
    echo '{"plans": [{"step_seconds": 0.25}]}'
    exit ;;
execute)
    asked=$*; asked=${asked#*--steps }; run=${asked#*--run-dir }; run=${run%% *}
    mkdir -p "$run"
    printf '{"steps": [{"loss": 1.0}' > "$run/run.json"
    for step in $(seq 2 ${asked%% *}); do printf ', {"loss": 1.0}'; done >> "$run/run.json"
    printf '], "graph": {"nodes": 7, "host_copies": 0, "host_seconds": 2e-5}}' >> "$run/run.json" ;;
compare)
    predicted=10.0 measured=)" + memory_gib +
                                 R"(
    if grep -qE 'recompute=full|bf16_moments|offload=' asked; then predicted=2.0 measured=2.0; fi
    echo "{\"predicted_tflops_per_gpu\": 102.0, \"measured_tflops_per_gpu\": 100.0, \"predicted_memory_gib\": $predicted,
        \"measured_memory_gib\": $measured, \"predicted_step_seconds\": 1.1, \"measured_step_seconds\": 1.1, \"by_kind\": [{\"kind\": \"gemm\", \"count\": 3, \"predicted_seconds\": 1.05,
        \"measured_seconds\": 1.0}, {\"kind\": \"zero\", \"count\": 1, \"predicted_seconds\": 9.0, \"measured_seconds\": 0.01}]}"
    exit ;;
esac
echo '{}')");
    REQUIRE(folder.run("chmod +x build/*/* build/tests/*/*").status == 0);
}

Outcome check(const Folder& folder, const std::string& arguments = "") {
    const char* program = std::getenv("GPU_CHECK");
    REQUIRE_MESSAGE(program != nullptr, "GPU_CHECK is not set: run this through meson test");
    return folder.run("python3 " + std::string(program) + " --build \"$PWD/build\" --out \"$PWD/out.json\" " +
                      arguments);
}

} // namespace

TEST_CASE("gpu-check: without a device it is skipped and says so") {
    const Folder folder;
    set_up(folder, "echo 'skipped: no CUDA device'; exit 77", "10.0");
    for (int carried = 0; carried < 2; ++carried) {
        const Outcome outcome = check(folder);
        CHECK(outcome.status == 77);
        CHECK(outcome.out == "skipped: no CUDA device\n");
        // The programs alone, as they are carried to another machine.
        folder.run("mv build whole; mkdir build; cp whole/tests/*/* whole/tools/* build; rm -r whole");
    }
}

TEST_CASE("gpu-check: what a sanitizer reports, of libraries left out") {
    const Folder folder;
    set_up(folder, "", "10.0");
    folder.write("compute-sanitizer", R"(#!/bin/sh
echo "$CUDA_MODULE_LOADING $*" >> asked_for
race() { echo "========= Error: Race reported between Write access at $1+0x520 in a.cu:13"; }
case "$*" in
*memcheck*) echo '========= ERROR SUMMARY: 0 errors' ;;
*tc=gemm*) race 'sm90_gemm_kernel(int)'; echo '========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)' ;;
*tc=rope*) race 'moe::cuda::rope_kernel(int)'; echo '========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)' ;;
*) echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)' ;;
esac
)");
    folder.write("nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA X (UUID: u)'\n");
    REQUIRE(folder.run("chmod +x compute-sanitizer nvidia-smi").status == 0);
    const auto sanitizers = [&](const std::string& cases) {
        const std::string program = std::getenv("GPU_CHECK");
        return folder.run("PATH=\"$PWD:$PATH\" python3 " + program + " --build \"$PWD/build\" --out \"$PWD/out.json\"" +
                          " --work \"$PWD\" --parts sanitizers --cases '" + cases + "'");
    };
    CHECK(sanitizers("gemm*,cross*").status == 0);
    CHECK(Json::parse(folder.read("out.json"))["rows"].size() == 4);
    CHECK(folder.read("asked_for").find("-tc=gemm: one? two") != std::string::npos);
    CHECK(folder.read("asked_for").rfind("LAZY --tool ", 0) == 0);
    CHECK(sanitizers("*").status == 1);
    const Json document = Json::parse(folder.read("out.json"));
    CHECK(document["device"] == "NVIDIA X");
    CHECK(document["command"] == "tools/gpu-check --parts sanitizers");
    for (const Json& row : document["rows"]) CHECK(row["ok"] == (row["name"] != "racecheck: rope: heads"));
    const Outcome none = sanitizers("attention*");
    CHECK(none.status == 1);
    CHECK(none.out.find("no case is called attention*") != std::string::npos);
}

TEST_CASE("gpu-check: one table and one document of all bars, status 0 where all are met") {
    const Folder folder;
    set_up(folder, "", "10.1");
    const Outcome outcome = check(folder);
    CHECK(outcome.status == 0);
    const Json document = Json::parse(folder.read("out.json"));
    CHECK(document["device"] == "a GPU");
    CHECK(outcome.out.find("a GPU, a library, another: 20 comparisons in 4 cases") != std::string::npos);
    CHECK(document["rows"][1]["ratio"] == 0.75); // behind the engine's row; of the four cases that report this one
    CHECK(document["rows"][3]["name"] == "gemm: beside a copy");
    CHECK(document["passed"] == true);
    int steps = 0, memory = 0;
    for (const Json& row : document["rows"]) {
        const std::string name = row["name"];
        CHECK(row["ok"] == true);
        CHECK(outcome.out.find(name) != std::string::npos);
        CHECK(name.find(": zero") == std::string::npos); // below 5 % of the step
        steps += name.ends_with(": step");
        memory += name.ends_with(": memory");
    }
    CHECK(document["plans"].size() == 13);
    CHECK(document["plans"][0]["by_kind"].size() == 2);
    CHECK(steps == 13);
    CHECK(memory == 13);
    CHECK(outcome.out.find("step in blockwise FP8 beside BF16") != std::string::npos);
    CHECK(outcome.out.find("300 steps of text, loss 1.000 to 1.000") != std::string::npos);
    for (const char* precision : {"fp8-blockwise", "mxfp8", "fp8-tensor", "nvfp4"})
        CHECK(outcome.out.find(std::string("1,000 steps in ") + precision +
                               ", mbs=8, 4 seeds, loss 1.000 to 1.0000, BF16's 1.0000") != std::string::npos);
    CHECK(outcome.out.find("1,000 steps in bf16, mbs=4, 4 seeds") != std::string::npos);
    CHECK(outcome.out.find("memory that offload=optimizer saves") != std::string::npos);
}

TEST_CASE("gpu-check: a bar that is missed, a test that fails and a time that is over are rows and status 1") {
    const Folder folder;
    set_up(folder, "", "9.7"); // 3 % off
    CHECK(check(folder).status == 1);
    CHECK(folder.read("out.json").find("\"ok\": false") != std::string::npos);
    const auto not_ok = [&](const std::string& kernels, const std::string& name) {
        set_up(folder, kernels, "10.0");
        CHECK(check(folder).status == 1);
        const Json rows = Json::parse(folder.read("out.json"))["rows"];
        return std::any_of(rows.begin(), rows.end(),
                           [&](const Json& row) { return row["name"] == name && row["ok"] == false; });
    };
    const std::string of_rope = "case \"$*\" in *tc=rope*) ";
    CHECK(not_ok(of_rope + "echo far off; exit 1 ;; esac", "kernels: rope: heads: exit status 1"));
    CHECK(not_ok(of_rope + "echo 'test cases:   0 |'; exit 0 ;; esac", "kernels: rope: heads: ran no case"));
    CHECK(not_ok("exit 1", "kernels: all cases"));
    set_up(folder, "", "10.0");
    const Outcome late = check(folder, "--seconds 5");
    CHECK(late.status == 1);
    CHECK(late.out.find("not run, the time was over") != std::string::npos);
}

TEST_CASE("gpu-check: a plan that does not fit the card is skipped by name") {
    const Folder folder;
    set_up(folder, "", "10.1");
    const std::string searches = folder.read("build/tools/moe-plan");
    const std::string small =
        "case \"$*\" in *offload=attn_norm*) echo 'no plan for 1 GPUs fits' >&2; exit 3 ;; esac\n";
    folder.write("build/tools/moe-plan", "#!/bin/sh\n" + small + searches);
    REQUIRE(folder.run("chmod +x build/tools/moe-plan").status == 0);
    const Outcome outcome = check(folder);
    CHECK(outcome.status == 0);
    const Json document = Json::parse(folder.read("out.json"));
    REQUIRE(document["skipped"].size() == 1);
    CHECK(document["skipped"][0].get<std::string>().find(": no plan for 1 GPUs fits") != std::string::npos);
    CHECK(outcome.out.find("skipped: search --model") != std::string::npos);
    CHECK(document["plans"].size() == 12);
}

TEST_CASE("gpu-check: families are slices of published models, priced by the profile that is given") {
    const Folder folder;
    set_up(folder, "", "10.1");
    CHECK(check(folder, "--parts families --profile h200 --work \"$PWD\"").status == 0);
    const Json document = Json::parse(folder.read("out.json"));
    CHECK(document["plans"].size() == 27);
    CHECK(document["plans"][0]["name"] == "Qwen3-Next-80B-A3B, 4 layers, 64 experts, mbs=1");
    CHECK(folder.read("asked").find("--hardware h200 ") != std::string::npos);
    const Outcome cut = folder.run(
        "python3 -B -c \"import os, sys; sys.path.insert(0, os.path.dirname('" + std::string(std::getenv("GPU_CHECK")) +
        "') + '/gpu'); import gpu_families; print(gpu_families.sliced({'num_hidden_layers': 4, 'num_experts': 8, "
        "'hybrid_override_pattern': 'M*EM', 'layer_types': [1, 2, 3, 4], 'first_k_dense_replace': 3}, 2, 4))\"");
    CHECK(cut.err.empty());
    CHECK(cut.out ==
          "{'num_hidden_layers': 2, 'num_experts': 4, 'hybrid_override_pattern': 'M*', 'layer_types': [1, 2], "
          "'first_k_dense_replace': 1, 'vocab_size': 32768, 'num_nextn_predict_layers': 0}\n");
}

TEST_CASE("gpu-check: what the scripts beside PyTorch say becomes rows, with the bars of the shapes that have one") {
    const Folder folder;
    folder.write(
        "grouped",
        R"( 128 experts  65536 rows  2048x768   wgrad        ours   544  torch   498  dense   771  ours/torch 1.09  error 6.1e-07
 128 experts  65536 rows  2048x768   wgrad +=     ours   369  torch   182  dense   773  ours/torch 2.03  error 6.2e-07
 128 experts  65536 rows  2048x768   wgrad BF16   ours   600  torch   500  dense   773  ours/torch 1.20  error 1.7e-03
  32 experts  65536 rows  4096x7168  forward E4M3 ours  1191  torch  1270  ours/torch 0.94  error 1.7e-03
   1 experts   8192 rows  5120x2048  dense E4M3   ours  1088  torch  1122  bf16   734  ours/torch 0.97  error 1.7e-03
)");
    folder.write("attention", R"(torch 2.11, cuDNN 91900, backward: in any order
4x4096  heads  32/4   128/128 window 0    causal forward  603 torch  601 ratio 1.00  backward  450 torch  445 ratio 1.01  scratch 1 MiB  errors 1.0e-03 same bits
1x8192  heads  64/8   64/64 window 128  causal forward  100                        backward   90                        scratch 1 MiB  errors 1.0e-03 same bits
torch 2.11, cuDNN 91900, backward: deterministic
4x4096  heads  32/4   128/128 window 0    causal forward  603 torch  601 ratio 1.00  backward  400 torch  445 ratio 0.90  scratch 1 MiB  errors 1.0e-03 same bits
)");
    const Outcome outcome = folder.run(
        "python3 -B -c \"import os, sys; sys.path.insert(0, os.path.dirname('" + std::string(std::getenv("GPU_CHECK")) +
        "') + '/gpu'); import gpu_torch; [print(*row, sep='|') for f in (gpu_torch.grouped, "
        "gpu_torch.attention) for row in f(open(f.__name__).read())]\"");
    CHECK(outcome.err.empty());
    CHECK(outcome.out == R"(128 experts, 65,536 rows, 2048x768, wgrad|544.0|498.0|1.1
128 experts, 65,536 rows, 2048x768, wgrad +=|369.0|182.0|None
128 experts, 65,536 rows, 2048x768, wgrad BF16|600.0|500.0|1.1
32 experts, 65,536 rows, 4096x7168, forward E4M3|1191.0|1270.0|1.0
1 experts, 8,192 rows, 5120x2048, dense E4M3|1088.0|1122.0|None
attention 4x4096, heads 32/4, 128/128, causal, forward|603.0|601.0|0.97
attention 4x4096, heads 32/4, 128/128, causal, backward in any order|450.0|445.0|0.97
attention 4x4096, heads 32/4, 128/128, causal, backward deterministic|400.0|445.0|0.9
)");
}

TEST_CASE("the measurements' table is that of their documents, and a document says what it missed") {
    const Folder folder;
    const auto measured = [&](const std::string& arguments) {
        return folder.run("python3 -B \"$(dirname \"$GPU_CHECK\")/bench/measured.py\" " + arguments);
    };
    const Outcome table = measured("--check");
    CHECK(table.status == 0);
    CHECK_MESSAGE(table.out == "profiles/measured/TABLE.md holds this table\n", table.out);
    const Outcome one = measured("h200-2026-11-24-whole-check");
    CHECK(one.status == 0);
    CHECK(one.out.find("commit: 5af7433\n") != std::string::npos);
    CHECK(one.out.find("2048x768, wgrad: beside PyTorch: ours 544, reference 505, ratio 1.077, bar 1.1 TFLOPS") !=
          std::string::npos);
    CHECK(measured("nothing").status == 2);
}

TEST_CASE("gpu-check --gpus: what several GPUs are held to, on as many as there are") {
    const Folder folder;
    set_up(folder, "", "10.0");
    folder.write("build/tests/engine/engine_cuda_test", R"(#!/bin/sh
case $1 in
*collectives*) echo '[{"name": "all_gather", "unit": "us", "ours": 1.0, "reference": 1.0, "ratio": 1.0, "bar": 1.05, "ok": true}]' \
    > "$MOE_PLAN_OUT" ;;
*drawn*) echo "24 drawn plans over $MOE_PLAN_GPUS GPUs, eager and as graphs in turn: farthest at 0.011 of its tolerance, 0 near ties" ;;
esac)");
    REQUIRE(folder.run("mkdir build/tools/bench").status == 0);
    const auto tokens = [&](const std::string& combined) {
        folder.write("build/tools/bench/bench-dispatch", R"(#!/bin/sh
echo "2 GPUs; peer copy 0 to 1: 396.0 GB/s, all to the next at once: 390.0"
echo "tokens width top/of skew          | dispatch                              | combine"
echo " 16384  7168  8/128  0.0  peers    $2 |   1000.0 us  240.0 link  1800.0 rows |   1162.0 us  )" +
                                                             combined + R"( link  1700.0 rows"
echo " 16384  7168  8/128  0.0  E4M3     $2 |   1000.0 us  220.0 link  1800.0 rows | "
echo "  4096  2048  8/128  0.5  peers    $2 |   1000.0 us  100.0 link  1800.0 rows |   1162.0 us  100.0 link  1700.0 rows"
echo " 16384  4096  1/8    0.0  peers    $2 |    230.0 us  292.0 link   582.0 rows |    262.0 us  257.0 link   500.0 rows"
[ "$CUDA_VISIBLE_DEVICES $*" = "0,1 --peers 24" ])");
        REQUIRE(folder.run("chmod +x build/tools/bench/*").status == 0);
    };
    tokens("235.0");
    // The last of the processes is killed or stopped, and the first one says so; two steps are asked of a plan that has
    // no room.
    folder.write("build/tools/moe-plan", R"(#!/bin/sh
case "$1 $*" in
*--resume*) echo '{"steps": [{"step": 21}]}' && exit ;;
execute*)
    if [ -n "$RANK" ]; then
        case "$*" in
        *"--steps 2") echo "rank 0: cannot allocate an arena of 9.00 GiB in X, which has 1.00 GiB free; use more ranks" >&2; exit 1 ;;
        esac
        mkdir -p saved/step-00000020
        [ "$RANK" = 1 ] && exec sleep 30
        sleep 0.5 && echo "moe-plan: rank 1 has died" >&2
        exit 1
    fi
    mkdir -p run
    printf '{"steps": [{"loss": 1.0}' > run/run.json
    for step in $(seq 2 300); do printf ', {"loss": 1.0}'; done >> run/run.json
    echo ']}' >> run/run.json
    echo '{"steps": [{"loss": 1, "tflops_per_gpu": 480}, {"loss": 1, "overflow": 3, "tflops_per_gpu": 500}]}' && exit ;;
search*)
    plan='{"plan": {"mesh": {"gpus": 2, "tp": 1, "ep": 2}, "mbs": 4, "dispatcher": "hybridep"}, "tflops_per_gpu": 505, "step_seconds": 1.1}'
    echo "{\"plans\": [$plan, $plan]}" && exit ;;
compare*)
    echo '{"error": 0.02, "predicted_step_seconds": 1, "measured_step_seconds": 1, "predicted_tflops_per_gpu": 561,
        "measured_tflops_per_gpu": 550, "predicted_exposed_communication_seconds": 0.01, "predicted_memory_gib": 10,
        "measured_exposed_communication_seconds": 0.02, "measured_memory_gib": 10, "by_kind": []}' && exit ;;
esac
echo '{}')");
    folder.write("nvidia-smi", "#!/bin/sh\nfor gpu in 0 1 2; do echo \"GPU $gpu: NVIDIA X (UUID: u)\"; done\n");
    REQUIRE(folder.run("chmod +x nvidia-smi build/*/* build/tests/*/*").status == 0);
    const char* program = std::getenv("GPU_CHECK");
    REQUIRE(program != nullptr);
    const Outcome outcome =
        folder.run("PATH=\"$PWD:$PATH\" python3 " + std::string(program) +
                   " --gpus 8 --profile h200-measured --build \"$PWD/build\" --out \"$PWD/out.json\"");
    CHECK(outcome.status == 0);
    CHECK(outcome.out.find("8 GPUs asked for, 3 here: measured on 2") == 0);
    const Json document = Json::parse(folder.read("out.json"));
    CHECK(document["device"] == "2 x NVIDIA X");
    CHECK(document["command"] == "tools/gpu-check --gpus 2");
    int memory = 0, faults = 0;
    for (const Json& row : document["rows"]) {
        const std::string name = row["name"];
        INFO(name);
        CHECK(row["ok"] == true);
        memory += name.ends_with(": memory");
        faults += name.find("a process of 2 is ") == 0 || name.find("a plan that has no room on 2 GPUs") == 0 ||
                  name.find("1 of 6 steps over 2 GPUs") == 0;
    }
    CHECK(memory == 16);
    CHECK(faults == 4);
    CHECK(outcome.out.find("24 drawn plans over 2 GPUs") != std::string::npos);
    CHECK(document["rows"][1]["name"] ==
          "dispatch of 16384 x 7168, top 8 of 128, over 2 GPUs by 24 multiprocessors: beside a peer copy");
    CHECK(document["rows"][1]["bar"] == 0.6);
    CHECK(document["rows"][2]["ours"] == 235.0);
    CHECK(document["rows"][3]["bar"].is_null()); // one expert for each token has no bar
    CHECK(document["rows"][5]["name"].get<std::string>().find("24 drawn plans") == 0);
    CHECK(outcome.out.find("mean error of 16 predicted steps") != std::string::npos);
    CHECK(outcome.out.find("choice 2: 505.0 predicted, 500.0 TFLOPS/GPU reached, ep=2 mbs=4 dispatcher=hybridep") !=
          std::string::npos);
    CHECK(outcome.out.find("the planner's first choice beside the best of its first 2") != std::string::npos);
    // Routed tokens alone, of which combine misses its bar; and without the program that times them.
    const auto dispatch = [&] {
        return folder.run("PATH=\"$PWD:$PATH\" python3 " + std::string(program) +
                          " --gpus 2 --parts dispatch --build \"$PWD/build\"");
    };
    tokens("230.0");
    CHECK(dispatch().status == 1);
    REQUIRE(folder.run("rm build/tools/bench/bench-dispatch").status == 0);
    CHECK(dispatch().out.find("skipped: dispatch and combine over 2 GPUs: no bench-dispatch in bench") == 0);
    folder.write("nvidia-smi", "#!/bin/sh\nexit 9\n");
    CHECK(folder.run("PATH=\"$PWD:$PATH\" python3 " + std::string(program) + " --gpus 2").status == 77);
}
