// The verb import on models that no profile is: blocks that Megatron's arguments compose, hybrids, and their words
// back.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <filesystem>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

// Settings that every script here has, in the style of Megatron-LM's functional tests.
const std::string common =
    "--micro-batch-size 1 --global-batch-size 32 --seq-length 1024 --bf16 --use-distributed-optimizer ";

Json imported(const Folder& folder, const std::string& words) {
    folder.write("args.txt", common + words + "\n");
    return document(folder.run("moe-plan import args.txt --hardware h100 --gpus 8 --out plan.json --json"));
}

// The arguments that the plan is launched with, as one text.
std::string launched(const Folder& folder) {
    std::string text = " ";
    const Json launch = document(folder.run("moe-plan launch plan.json --megatron-lm --json"));
    for (const Json& word : launch["args"]) text += word.get<std::string>() + " ";
    return text;
}

// Findings of a severity on a field that begins so.
int findings(const Json& read, const std::string& severity, const std::string& field) {
    int count = 0;
    for (const Json& finding : read["findings"])
        count += finding["severity"] == severity && finding["field"].get<std::string>().rfind(field, 0) == 0 ? 1 : 0;
    return count;
}

bool has(const std::string& text, const std::string& words) {
    return text.find(" " + words + " ") != std::string::npos;
}

const std::string gpt = "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --disable-bias-linear "
                        "--position-embedding-type rope --num-experts 8 ";

} // namespace

TEST_CASE("import: experts of plain GELU MLPs under LayerNorm keep what their arguments say") {
    const Folder folder;
    const Json read =
        imported(folder, gpt + "--moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --expert-model-parallel-size 4 "
                               "--moe-token-dispatcher-type alltoall --vocab-size 50257");
    CHECK(read["plan"]["model"]["name"] == "imported");
    CHECK(findings(read, "warning", "model.") == 0);
    const std::string args = launched(folder);
    CHECK(has(args, "--normalization LayerNorm"));
    CHECK(!has(args, "--swiglu"));
    CHECK(has(args, "--ffn-hidden-size 2048"));
    // Two matrices of 512 x 2048 for each of 8 experts, 4 x 512 x 512 of attention, the router, and tied embeddings.
    folder.write("config.json", read["plan"]["model"].dump());
    const Json model = document(folder.run("moe-plan show model config.json --json"));
    CHECK(model["parameters"] == 12 * (8 * 2 * 512 * 2048 + 4 * 512 * 512 + 8 * 512 + 4 * 512) + 50257 * 512 + 2 * 512);
    CHECK(model["executable"] == true);
}

TEST_CASE("import: sinkhorn brings its own weights, with one expert and with several") {
    const Folder folder;
    const std::string sinkhorn =
        gpt + "--moe-router-load-balancing-type sinkhorn --vocab-size 50257 --moe-router-topk ";
    for (const char* top_k : {"1", "2"}) {
        const Json read = imported(folder, sinkhorn + top_k);
        CHECK(read["plan"]["router"]["load_balancing"] == "sinkhorn");
        CHECK(has(launched(folder), "--moe-router-load-balancing-type sinkhorn"));
    }
}

TEST_CASE("import: a selection bias that moves is the model's, and sigmoids are divided by their sum") {
    const Folder folder;
    const Json read = imported(
        folder,
        "--num-layers 14 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --swiglu --normalization "
        "RMSNorm "
        "--disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
        "--multi-latent-attention --qk-layernorm --q-lora-rank 768 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0 "
        "--num-experts 64 --moe-layer-freq ([0]*3+[1]*11) --moe-ffn-hidden-size 1024 "
        "--moe-shared-expert-intermediate-size 1024 --moe-router-topk 8 --moe-router-pre-softmax "
        "--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --mtp-num-layers 1 "
        "--expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --vocab-size 129280");
    CHECK(read["plan"]["router"]["bias_update"] == 0.001);
    CHECK(findings(read, "warning", "model.") == 0);
    const std::string args = launched(folder);
    CHECK(has(args, "--moe-router-enable-expert-bias --moe-router-bias-update-rate 0.001"));
    CHECK(has(args, "--rotary-scaling-factor 40"));
    CHECK(has(args, "--mscale 1 --mscale-all-dim 1"));
    CHECK(has(args, "--moe-router-num-groups 8 --moe-router-group-topk 4"));
    CHECK(has(args, "--mtp-num-layers 1"));
}

TEST_CASE("import: a hybrid of letters of its own has the layers and depths of its pattern") {
    const Folder folder;
    const std::string hybrid =
        "--hidden-size 1024 --num-attention-heads 16 --group-query-attention --num-query-groups 2 --kv-channels 64 "
        "--ffn-hidden-size 896 --squared-relu --normalization RMSNorm --disable-bias-linear --position-embedding-type "
        "none "
        "--untie-embeddings-and-output-weights --mamba-num-heads 16 --num-experts 16 --moe-router-topk 4 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-ffn-hidden-size 896 "
        "--moe-shared-expert-intermediate-size 1792 --moe-token-dispatcher-type alltoall --vocab-size 131072 ";
    const Json read =
        imported(folder, hybrid + "--hybrid-layer-pattern MEMEM*EM|MEM*E/*E/*E --pipeline-model-parallel-size 2");
    CHECK(read["plan"]["model"]["hybrid_override_pattern"] == "MEMEM*EMMEM*E");
    CHECK(read["plan"]["model"]["num_nextn_predict_layers"] == 2);
    CHECK(findings(read, "warning", "model.") == 0);
    CHECK(has(launched(folder), "--hybrid-layer-pattern MEMEM*EM|MEM*E/*E/*E"));
    // The older name of the argument.
    const Json older = imported(folder, hybrid + "--is-hybrid-model --num-layers 8 --hybrid-override-pattern MEMEM*EM");
    CHECK(older["plan"]["model"]["hybrid_override_pattern"] == "MEMEM*EM");
    CHECK(findings(older, "warning", "--hybrid") == 0);
}

TEST_CASE("import: gated delta layers of sizes of their own") {
    const Folder folder;
    const Json read = imported(
        folder,
        gpt + "--swiglu --normalization RMSNorm --qk-layernorm --attention-output-gate --linear-attention-freq 3 "
              "--experimental-attention-variant gated_delta_net --linear-conv-kernel-dim 4 --linear-key-head-dim 64 "
              "--linear-value-head-dim 64 --linear-num-key-heads 4 --linear-num-value-heads 8 --vocab-size 50257");
    CHECK(findings(read, "warning", "model.") == 0);
    const std::string args = launched(folder);
    CHECK(has(args, "--experimental-attention-variant gated_delta_net"));
    CHECK(has(args, "--linear-num-key-heads 4 --linear-num-value-heads 8"));
}

TEST_CASE("import: a vocabulary follows from the tokenizer's name, and is told; else one line asks for it") {
    const Folder folder;
    const auto vocab = [&folder](const std::string& words) {
        const Json read = imported(folder, gpt + words);
        CHECK(findings(read, "warning", "model.vocab") == 1);
        return read["plan"]["model"]["vocab_size"].get<int>();
    };
    CHECK(vocab("--tokenizer-type GPT2BPETokenizer") == 50257);
    CHECK(vocab("--vocab-file ${DATA}/vocab.json --merge-file ${DATA}/merges.txt") == 50257);
    CHECK(vocab("--tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen3-30B-A3B-Base") == 151936);
    CHECK(vocab("--tokenizer-type HuggingFaceTokenizer --tokenizer-model ${ROOT}/mixtral-8x7b-v0.1/") == 32000);
    folder.write("args.txt", common + gpt + "--tokenizer-type TikTokenizer --tokenizer-model a.json\n");
    check_line(folder.run("moe-plan import args.txt --hardware h100 --gpus 8"), 2, "says no vocab");
    folder.write("size.txt", "--vocab-size 131072\n");
    const Json read = document(folder.run("moe-plan import args.txt size.txt --hardware h100 --gpus 8 --json"));
    CHECK(read["plan"]["model"]["vocab_size"] == 131072);
}

TEST_CASE("import: layers in BF16 say nothing of a plan in BF16, and Muon is Muon with any momentum") {
    const Folder folder;
    const Json read =
        imported(folder, gpt + "--vocab-size 50257 --first-last-layers-bf16 --optimizer muon --muon-momentum 0.9");
    CHECK(!read["plan"].contains("bf16_layers"));
    CHECK(read["plan"]["optimizer"] == "muon");
    CHECK(findings(read, "warning", "optimizer") == 0);
}

TEST_CASE("import: scripts that a script reads or starts are followed") {
    const Folder folder;
    std::filesystem::create_directories(folder.file("jobs/models"));
    folder.write("jobs/models/moe.sh", "MODEL_ARGS=(\n   " + gpt + "--vocab-size 50257\n)\n");
    folder.write("jobs/common.sh", "torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py " + common +
                                       "--expert-model-parallel-size $1 ${@:2} ${MODEL_ARGS[@]} $EXTRA\n");
    folder.write("jobs/run.sh", "SCRIPT_DIR=\"$(cd -- \"$(dirname -- \"${BASH_SOURCE[0]}\")\" &>/dev/null && pwd)\"\n"
                                "source \"${SCRIPT_DIR}/models/moe.sh\"\nNODES=2 bash ./common.sh 4\n");
    const Json read = document(folder.run("moe-plan import jobs/run.sh --hardware h100 --json"));
    CHECK(read["plan"]["mesh"]["gpus"] == 16);
    CHECK(read["plan"]["mesh"]["ep"] == 4);
    CHECK(read["plan"]["model"]["hidden_size"] == 512);
    // With --alone, which the page's imports have, no file that a script names is read.
    check_line(folder.run("moe-plan import jobs/run.sh --hardware h100 --alone"), 2, "jobs/run.sh");
    // A file of sizes alone beside the rest.
    folder.write("rest.txt", common + "\n");
    const Json sizes =
        document(folder.run("moe-plan import jobs/models/moe.sh rest.txt --hardware h100 --gpus 8 --json"));
    CHECK(sizes["plan"]["model"]["num_hidden_layers"] == 12);
    folder.write("self.sh", "source self.sh\n");
    check_line(folder.run("moe-plan import self.sh --hardware h100"), 2, "nested too deep");
    folder.write("lost.sh", "source other/env.sh\npython pretrain_gpt.py " + common + gpt + "--vocab-size 50257\n");
    const Json lost = document(folder.run("moe-plan import lost.sh --hardware h100 --gpus 8 --json"));
    REQUIRE(lost["unknown"].size() == 1);
    CHECK(lost["unknown"][0]["why"] == "no such file beside the script: give it before this one");
}

TEST_CASE("import: what a plan has not beside other choices is left out and told, where it changes no time") {
    const Folder folder;
    const Json read =
        imported(folder, gpt + "--moe-router-topk 2 --moe-router-load-balancing-type sinkhorn --moe-z-loss-coeff 1e-3 "
                               "--vocab-size 50257 --tp-comm-overlap");
    CHECK(findings(read, "warning", "--tp-comm-overlap") == 0);
    CHECK(read["plan"].value("tp_overlap", false) == false);
    const Json moved = imported(
        folder, gpt + "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk 2 "
                      "--optimizer-cpu-offload --optimizer-offload-fraction 1.0 --use-precision-aware-optimizer "
                      "--vocab-size 50257");
    CHECK(!moved["plan"].contains("router"));
    CHECK(findings(moved, "warning", "bias_update") == 1);
}

TEST_CASE("import: AutoModel's YAML names its model as it is published") {
    const Folder folder;
    const auto yaml = [&folder](const std::string& model) {
        folder.write("job.yaml",
                     "model:\n  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained\n"
                     "  pretrained_model_name_or_path: " +
                         model +
                         "\ndistributed:\n  strategy: fsdp2\n  ep_size: 8\nstep_scheduler:\n  global_batch_size: 64\n"
                         "  local_batch_size: 1\n");
        return folder.run("moe-plan import job.yaml --from automodel --hardware h100 --gpus 8 --seq 2048 --json");
    };
    const Json read = document(yaml("Qwen/Qwen3-30B-A3B-Base"));
    CHECK(read["plan"]["model"]["name"] == "Qwen3-30B-A3B");
    CHECK(read["plan"]["workload"]["seq"] == 2048);
    CHECK(read["findings"].dump().find("is taken for Qwen3-30B-A3B by its name") != std::string::npos);
    const Json nano = document(yaml("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"));
    CHECK(nano["plan"]["model"]["name"] == "Nemotron-3-Nano");
    // A degree is its own setting's value, whatever others beside it lack.
    folder.write(
        "stages.yaml",
        "model:\n  pretrained_model_name_or_path: meta-llama/Llama-3.1-8B\ndistributed:\n  strategy: fsdp2\n"
        "  tp_size: 2\n  pp_size: 2\n  sequence_parallel: false\n  pipeline:\n    pp_schedule: interleaved1f1b\n"
        "    pp_microbatch_size: 4\nstep_scheduler:\n  global_batch_size: 256\n  local_batch_size: 32\n");
    const Json stages =
        document(folder.run("moe-plan import stages.yaml --from automodel --hardware h100 --gpus 8 --seq 2048 --json"));
    CHECK(stages["plan"]["mesh"]["tp"] == 2);
    CHECK(stages["plan"]["mesh"]["pp"] == 2);
    CHECK(stages["plan"]["mesh"]["dp"] == 2);
    check_line(yaml("zai-org/GLM-4.5V"), 2, "no profile is known of the model zai-org/GLM-4.5V: give its config.json");
    check_line(folder.run("moe-plan import job.yaml --from automodel --hardware h100 --gpus 8 --model Qwen3-30B-A3B"),
               2, "says no length of sequences: give --seq");
}
