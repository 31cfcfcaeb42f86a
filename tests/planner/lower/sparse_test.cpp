// DeepSeek sparse attention: which layers pick keys, parameters and FLOPs, what a layer is lowered to, where it is cut.
#include "planner/lower/emit/builder.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/schedule.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <string>

using namespace moe;

namespace {

// Two dense layers, then experts; 4 heads of 64 + 32 over a latent of 128, an indexer of 2 heads of 64.
std::string config(const std::string& rest = "") {
    return R"({"architectures": ["GlmMoeDsaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 6,
        "num_attention_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32, "v_head_dim": 48, "intermediate_size": 384, "moe_intermediate_size": 128,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 2, "index_n_heads": 2,
        "index_head_dim": 64, "index_topk": 128, "vocab_size": 512)" +
           rest + "}";
}
const char* shared_by_three = R"(, "index_topk_freq": 3, "index_skip_topk_offset": 1)";

model::Model read(const std::string& text) { return families::model_from_json(text, "config.json"); }
std::string refused(const std::string& text) {
    return fault_of([&] { read(text); });
}

plan::Plan plan_of(const std::string& text) {
    plan::Plan plan = published_plan("Qwen3-30B-A3B", "h100", "bridge-26.06");
    plan.model = std::make_shared<const model::Model>(read(text));
    plan.gpus = plan.dp = plan.edp = 4;
    plan.gbs = 4;
    plan.seq = 512;
    return plan;
}

std::string pickers(const model::Model& model) {
    std::string letters;
    for (const int kind : model.layers)
        letters += model.kinds[static_cast<std::size_t>(kind)].attention.indexes() ? 'F' : 'S';
    return letters;
}

std::map<program::OpKind, int> count(const program::Program& program, std::size_t index) {
    std::map<program::OpKind, int> counts;
    for (const program::Op& op : program.templates[index].ops) ++counts[op.kind];
    return counts;
}

} // namespace

TEST_CASE("sparse attention: layers pick keys or share those of the last that did, as configs say in three ways") {
    CHECK(pickers(read(config())) == "FFFFFF");
    CHECK(pickers(read(config(shared_by_three))) == "FSSFSS");
    CHECK(pickers(read(config(R"(, "index_topk_freq": 3)"))) == "FFSSFS"); // an offset of 2 where none is given
    CHECK(pickers(read(config(R"(, "index_topk_pattern": "FSFSSF")"))) == "FSFSSF");
    CHECK(pickers(read(config(R"(, "indexer_types": ["full", "full", "shared", "full", "shared", "shared"])"))) ==
          "FFSFSS");
    const model::Model glm = families::load_model("GLM-5.2");
    CHECK(pickers(glm).substr(0, 12) == "FFFSSSFSSSFS");
    const std::string all = pickers(glm);
    CHECK(std::count(all.begin(), all.end(), 'F') == 21); // arXiv 2603.12201: one of four behind the first three
    CHECK(glm.kinds[static_cast<std::size_t>(glm.mtp.front())].attention.indexes());
    CHECK(glm.not_executable.empty());
}

TEST_CASE("sparse attention: a choice that cannot be is refused by field") {
    const auto holds = [](const std::string& line, const std::string& words) {
        CAPTURE(line);
        CHECK(line.find(words) != std::string::npos);
    };
    holds(refused(config(R"(, "index_topk_pattern": "SFFFFF")")), "the first layer cannot share");
    holds(refused(config(R"(, "index_topk_pattern": "FSX")")), "index_topk_pattern = \"FSX\"");
    holds(refused(config(R"(, "indexer_types": ["full"])")), "must have num_hidden_layers = 6 entries, found 1");
    holds(refused(config(R"(, "indexer_types": ["full", "full", "half", "full", "full", "full"])")),
          "must be made of shared and full");
    holds(refused(config(R"(, "mlp_layer_types": ["dense"])")), "mlp_layer_types");
    holds(refused(config(R"(, "index_n_heads": 0)")), "index_n_heads");
    std::string narrow = config();
    narrow.replace(narrow.find(R"("index_head_dim": 64)"), 20, R"("index_head_dim": 16)");
    holds(refused(narrow), "must hold the qk_rope_head_dim = 32 columns");
}

TEST_CASE("sparse attention: parameters and FLOPs are the published ones") {
    CHECK(model::count_parameters(families::load_model("GLM-5")).total_no_mtp == nearly(744e9).epsilon(2e-3));
    CHECK(model::count_parameters(families::load_model("GLM-5")).active_no_embed == nearly(40e9).epsilon(0.03));
    // NVIDIA-NeMo/Megatron-Bridge pull request 5401: 499.60 TFLOPS on each of 192 GPUs for 39.4292 s and 3,072
    // sequences of 4,096, without the indexer's loss: its projections and scores have no gradient there.
    const model::Model glm = families::load_model("GLM-5.2");
    const double published = 499.60e12 * 192 * 39.4292 / (3072.0 * 4096);
    const double projections = 2048.0 * 32 * 128 + 6144.0 * (128 + 32), seen = 2048.0 * (1 - 2048.0 / 8192);
    const double loss = 2.0 * 22 * (projections + 2 * 32 * 128 * seen), all = 2.0 * 22 * (2 * 32 * 128 * (2048 - seen));
    plan::Plan plan = plan_of(config());
    plan.model = std::make_shared<const model::Model>(glm);
    plan.seq = 4096;
    const auto flops = [&](double coefficient, plan::IndexerStage stage) {
        plan.indexer = {coefficient, stage};
        return plan::flops_per_token(plan);
    };
    const double sparse = flops(1.0, plan::IndexerStage::sparse), none = flops(0.0, plan::IndexerStage::sparse);
    CHECK(none == nearly(published).epsilon(2e-4));
    CHECK(sparse == model::model_flops_per_token(glm, 4096));
    CHECK(sparse - none == nearly(loss).epsilon(1e-9));
    CHECK(flops(0.5, plan::IndexerStage::dense_loss) - sparse == nearly(all).epsilon(1e-9));
    // In the warm-up attention goes over all keys as well: 64 heads over latents of 512 and 64 columns, in 78 layers
    // and MTP's.
    const double core = 6.0 * 79 * 64 * (2 * 512 + 64) * (2048 - seen);
    CHECK(flops(1.0, plan::IndexerStage::warm_up) - sparse == nearly(all + core).epsilon(1e-9));
    // Behind top-k positions a query sees no more keys; the indexer compares all of them.
    CHECK(model::keys_seen(glm.kind_of(0).attention, 1024) == nearly(512));
    CHECK(model::keys_seen(glm.kind_of(0).attention, 131072) == nearly(2048 * (1 - 2048.0 / 262144)));
    const double longer = model::model_flops_per_token(glm, 262144) - model::model_flops_per_token(glm, 131072);
    const double compared = 2.0 * 22 * 32 * 128 * 65536.0, more = 2048.0 * 2048 / 524288;
    CHECK(longer == nearly(compared + more * (6.0 * 79 * 64 * (2 * 512 + 64) + 4.0 * 22 * 32 * 128)));
}

TEST_CASE("sparse attention: products of a forward are the model's FLOPs, the core works on all keys picked") {
    const plan::Plan plan = plan_of(config(shared_by_three));
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    double products = 0.0;
    for (const program::Op& op : program.templates[0].ops) {
        if (op.kind == program::OpKind::gemm && op.module != program::Module::router) products += op.flops;
        if (op.kind == program::OpKind::attention) {
            const auto& attr = std::get<program::AttentionAttr>(op.attr);
            CHECK(attr.qk_dim == 128 + 32);
            CHECK(attr.v_dim == 128);
            CHECK(op.flops == nearly(2.0 * 512 * 128 * 4 * (160 + 128)));
        }
        if (op.kind == program::OpKind::pick_keys) CHECK(op.flops == nearly(2.0 * 512 * 256 * 2 * 64));
    }
    std::map<program::OpKind, int> forward = count(program, 0), backward = count(program, 1);
    CHECK(forward[program::OpKind::pick_keys] == 2);
    CHECK(forward[program::OpKind::attention] == 6);
    CHECK(backward[program::OpKind::pick_keys_grad] == 2);
    CHECK(backward[program::OpKind::attention_grad] == 6);
    const double attention = 96.0 * (256 + 4 * 96) + 128.0 * (256 + 4 * (64 + 48)) + 256.0 * 32 + 4.0 * 48 * 256;
    const double indexer = 96.0 * 128 + 256.0 * (64 + 2);
    const double mlp = 3.0 * 256 * 384, shared = 3.0 * 256 * 128;
    CHECK(products == nearly(2.0 * 512 * (6 * attention + 2 * indexer + 2 * mlp + 4 * shared + 256.0 * 512)));
}

TEST_CASE("sparse attention: products of indexers' gradients are in the price and the FLOPs where they are trained") {
    plan::Plan plan = plan_of(config(shared_by_three));
    const auto gradients = [&plan](double coefficient) { // products of index_q, index_k and index_w
        plan.indexer.loss = coefficient;
        const program::Program program = lower::lower(plan, 0);
        double sum = 0.0;
        for (const program::Op& op : program.templates[1].ops)
            if (op.kind == program::OpKind::gemm && op.phase == program::Phase::wgrad)
                for (const program::TensorId id : op.out)
                    if (program.tensors[static_cast<std::size_t>(id)].name.find("index_") != std::string::npos)
                        sum += op.flops;
        return sum;
    };
    CHECK(gradients(0.0) == 0.0);
    const double projections = 96.0 * 128 + 256.0 * (64 + 2), seen = 128.0 * (1 - 128.0 / 1024);
    CHECK(gradients(1.0) == nearly(2 * 2.0 * 512 * projections));
    plan.indexer.loss = 0.0;
    const double none = plan::flops_per_token(plan);
    plan.indexer.loss = 1.0;
    CHECK(plan::flops_per_token(plan) - none == nearly(2 * 2.0 * (projections + 2 * 2 * 64 * seen)).epsilon(1e-9));
}

TEST_CASE("sparse attention: heads are split over TP, the indexer is not, CP brings all keys to its queries") {
    plan::Plan plan = plan_of(config());
    plan.tp = 2;
    plan.cp = 2;
    plan.dp = 1;
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    for (const program::Op& op : program.templates[0].ops) {
        if (op.kind == program::OpKind::attention) {
            const auto& attr = std::get<program::AttentionAttr>(op.attr);
            CHECK(attr.heads == 2);
            CHECK(attr.seq_q == 256);
            CHECK(attr.seq_k == 512);
            CHECK(op.flops == nearly(2.0 * 256 * 128 * 2 * (160 + 128)));
        }
        if (op.kind == program::OpKind::pick_keys) CHECK(op.flops == nearly(2.0 * 256 * 256 * 2 * 64));
    }
    int gathered = 0, scattered = 0;
    for (const program::Op& op : program.templates[0].ops)
        gathered += op.kind == program::OpKind::all_gather && op.group == emit::groups::context;
    for (const program::Op& op : program.templates[1].ops)
        scattered += op.kind == program::OpKind::reduce_scatter && op.group == emit::groups::context;
    CHECK(gathered == 12); // keys and index keys of every layer
    CHECK(scattered == 12);
}

TEST_CASE("sparse attention: a choice that later layers share is kept, another is made again with its layer") {
    for (const auto& [rest, again] : {std::pair{std::string(shared_by_three), 0}, std::pair{std::string(), 6}}) {
        plan::Plan plan = plan_of(config(rest));
        plan.recompute = plan::recompute::full;
        const program::Program program = lower::lower(plan, 0);
        int picks = 0;
        for (const program::Op& op : program.templates[1].ops) picks += op.kind == program::OpKind::pick_keys;
        CHECK(picks == again);
        CHECK(memory::plan_memory(program).arena_bytes > 0);
    }
}

TEST_CASE("sparse attention: a stage begins with a layer that picks its own keys") {
    plan::Plan plan = plan_of(config(shared_by_three));
    plan.pp = 2;
    plan.dp = plan.edp = 2;
    CHECK(plan::check_plan(plan).message == ""); // three layers each
    plan.layout = "Ett|ttttL";
    CHECK(plan::check_plan(plan).message.find("a stage begins with layer 2") != std::string::npos);
    plan.layout = "Ettt|tttL";
    CHECK(plan::check_plan(plan).message == "");
    CHECK(plan::cut_units(*plan.model) == 3);
    const std::vector<plan::Stage> cut = plan::balanced_stages(*plan.model, plan.seq, 2);
    CHECK(cut[0].layers == 3);
    CHECK(plan::balanced_stages(*plan.model, plan.seq, 3)[1].layers == 3);
    CHECK(fault_of([&] { plan::balanced_stages(*plan.model, plan.seq, 4); }).find("4 for 3 units") !=
          std::string::npos);
    const model::Model glm = families::load_model("GLM-5.2");
    for (const int count : {4, 8, 16})
        for (const plan::Stage& stage : plan::balanced_stages(glm, 4096, count))
            if (stage.layers > 0) CHECK(plan::may_begin_stage(glm, stage.first_layer));
}

TEST_CASE("sparse attention: stages of the indexer in ops; choices that it excludes are refused by field") {
    plan::Plan plan = plan_of(config());
    const auto picked = [&] {
        const program::Program program = lower::lower(plan, 0);
        std::int64_t keys = 0;
        for (const program::Op& op : program.templates[0].ops)
            if (op.kind == program::OpKind::attention) keys = std::get<program::AttentionAttr>(op.attr).picked;
        return std::pair{keys, count(program, 1)[program::OpKind::pick_keys_grad]};
    };
    CHECK(picked() == std::pair{std::int64_t{128}, 6});
    plan.indexer.stage = plan::IndexerStage::dense_loss;
    CHECK(picked() == std::pair{std::int64_t{128}, 6});
    plan.indexer.stage = plan::IndexerStage::warm_up;
    CHECK(picked() == std::pair{std::int64_t{512}, 6});
    plan.indexer = {0.0, plan::IndexerStage::sparse};
    CHECK(picked() == std::pair{std::int64_t{128}, 0});
    CHECK(plan::check_plan(plan).message == "");

    plan.indexer.stage = plan::IndexerStage::warm_up;
    CHECK(plan::check_plan(plan).message.find("indexer_stage = warm_up: there is no loss") != std::string::npos);
    plan.indexer.stage = plan::IndexerStage::sparse;
    plan.cp = 2, plan.dp = 2, plan.cp_comm = plan::ContextComm::alltoall;
    CHECK(plan::check_plan(plan).message.find("cp_comm = alltoall: keys that an indexer picks") != std::string::npos);
    plan::Plan dense = plan_of(R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 384, "vocab_size": 512})");
    dense.indexer.loss = 0.5;
    CHECK(plan::check_plan(dense).message.find("indexer_loss = 0.5: ") != std::string::npos);
    dense.indexer = {1.0, plan::IndexerStage::dense_loss};
    CHECK(plan::check_plan(dense).message.find("indexer_stage = dense_loss: ") != std::string::npos);
}

TEST_CASE("sparse attention: the indexers' loss is counted where it is reported, from what all heads see together") {
    plan::Plan plan = plan_of(config(shared_by_three));
    REQUIRE(lower::lower(plan, 0).io.indexers.empty()); // of the published stack
    plan.stack = "moe-plan";
    const program::Program one = lower::lower(plan, 0);
    REQUIRE(one.io.indexers.size() == 2);
    CHECK(one.io.indexers[0].layer == 0);
    CHECK(one.io.indexers[1].layer == 3);
    std::map<program::OpKind, int> alone = count(one, 1);
    CHECK(alone[program::OpKind::xlogx] == 0);
    const auto divergences = [&](const program::Program& program) {
        std::int64_t rows = 0, keys = 0;
        for (const program::Op& op : program.templates[1].ops) {
            if (op.kind != program::OpKind::xlogx) continue;
            const program::Tensor& p = program.tensors[static_cast<std::size_t>(op.in[0])];
            rows += p.rows, keys += p.cols;
            CHECK(op.bytes == nearly(4.0 * static_cast<double>(p.rows * p.cols) + 4.0)); // read, and the sum
            CHECK(std::get<program::ScaleAttr>(op.attr).factor == nearly(1.0 / (4 * 512)));
        }
        return std::pair{rows, keys};
    };
    plan.tp = 2, plan.dp = 2;
    const program::Program two = lower::lower(plan, 0);
    CHECK(divergences(two) == std::pair{std::int64_t{2 * 256}, std::int64_t{2 * 128}});
    const int sums = count(two, 1)[program::OpKind::reduce_scatter];
    plan.indexer.stage = plan::IndexerStage::dense_loss;
    CHECK(divergences(lower::lower(plan, 0)) == std::pair{std::int64_t{2 * 256}, std::int64_t{2 * 512}});
    // Queries, keys and weights of an indexer have a sum of their gradients, and its loss has one.
    plan.indexer = {0.0, plan::IndexerStage::sparse};
    const program::Program none = lower::lower(plan, 0);
    CHECK(none.io.indexers.empty());
    CHECK(sums - count(none, 1)[program::OpKind::reduce_scatter] == 2 * 4);
}
