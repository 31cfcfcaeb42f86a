// Families of mixed layers, a few layers deep: what they are lowered to is what is counted.
#include "planner/lower/lower.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/program/program.hpp"
#include "tests/support/mixed_models.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

using namespace moe;

namespace {

model::Model read(const std::string& config) { return families::model_from_json(config, "config.json"); }

plan::Plan small_plan(const model::Model& model, std::int64_t seq) {
    plan::Plan plan = published_plan("Qwen3-30B-A3B", "h100", "bridge-26.06", seq);
    plan.model = std::make_shared<const model::Model>(model);
    plan.gpus = plan.dp = 2;
    plan.gbs = 2;
    plan.edp = 2;
    return plan;
}

std::int64_t declared(const program::Program& program) {
    std::int64_t sum = 0;
    for (const program::Parameter& parameter : program.parameters) sum += parameter.local_elements();
    return sum;
}

} // namespace

TEST_CASE("mixed layers, lowered: declared weights are the counted ones, products of a forward the model's FLOPs") {
    for (const std::string& config : small_mixed_models()) {
        CAPTURE(config);
        const model::Model model = read(config);
        const plan::Plan plan = small_plan(model, 512);
        REQUIRE(plan::check_plan(plan).message == "");
        const program::Program program = lower::lower(plan, 0);
        CHECK(declared(program) == model::count_parameters(model).total);
        double products = 0.0;
        for (const program::Op& op : program.templates[0].ops)
            if (op.module != program::Module::router &&
                (op.kind == program::OpKind::gemm || op.kind == program::OpKind::grouped_gemm ||
                 op.kind == program::OpKind::attention))
                products += op.flops;
        // A third of training's FLOPs, less the norms that MTP's inputs are counted with.
        const double norms = 6.0 * 3.0 * static_cast<double>(model.hidden) * static_cast<double>(model.mtp.size());
        const double counted = (model::model_flops_per_token(model, 512) - norms) * 512.0 / 3.0;
        CHECK(products == nearly(counted).epsilon(1e-9));
    }
}

TEST_CASE("Granite 4, lowered: scans and experts in one layer, the counted weights") {
    const model::Model model = read(small_granite());
    const plan::Plan plan = small_plan(model, 512);
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    CHECK(declared(program) == model::count_parameters(model).total);
    int scans = 0, grouped = 0, attentions = 0;
    for (const program::Op& op : program.templates[0].ops) {
        scans += op.kind == program::OpKind::scan;
        grouped += op.kind == program::OpKind::grouped_gemm;
        attentions += op.kind == program::OpKind::attention;
    }
    CHECK(scans == 2);
    CHECK(attentions == 1);
    CHECK(grouped == 6);
}

TEST_CASE("gated delta nets, lowered: the counted weights, one rule a layer, tokens traded for heads under CP") {
    const model::Model model = read(R"({"architectures": ["Qwen3NextForCausalLM"], "hidden_size": 256,
        "num_hidden_layers": 4, "vocab_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 512, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": false, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 32, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4})");
    CHECK(model.not_executable.empty());
    plan::Plan plan = small_plan(model, 512);
    CHECK(declared(lower::lower(plan, 0)) == model::count_parameters(model).total);
    plan.dp = 1, plan.cp = 2, plan.edp = 2;
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    for (const auto& [index, kind] :
         {std::pair{0, program::OpKind::delta_rule}, std::pair{1, program::OpKind::delta_rule_grad}}) {
        int rules = 0, exchanges = 0;
        for (const program::Op& op : program.templates[static_cast<std::size_t>(index)].ops) {
            exchanges += op.kind == program::OpKind::all_to_all;
            if (op.kind != kind) continue;
            ++rules;
            const auto& delta = std::get<program::StateAttr>(op.attr);
            CHECK(delta.rows == 512); // all tokens
            CHECK(delta.key_heads == 2);
            CHECK(delta.value_heads == 4);
            // Three products with a state and a chunk's inner ones, 2 FLOPs each.
            CHECK(delta.flops() == nearly(2.0 * 512 * 4 * (3.0 * 32 * 64 + 64.0 * (32 + 64))));
        }
        CHECK(rules == 3);
        CHECK(exchanges == 6); // the full layer's ring has none
    }
    plan.cp = 8, plan.gpus = 8, plan.edp = 8;
    CHECK(plan::check_plan(plan).counter == "heads % tp cp");
}

TEST_CASE("norms behind attention and MLP: two more a layer, forward and backward, and their weights") {
    const model::Model model = read(small_mixed_models()[0]);
    model::Model without = model;
    without.post_norms = false;
    const auto norms = [](const model::Model& of) {
        const program::Program program = lower::lower(small_plan(of, 512), 0);
        std::pair<int, int> count;
        for (const program::Op& op : program.templates[0].ops) count.first += op.kind == program::OpKind::rmsnorm;
        for (const program::Op& op : program.templates[1].ops) count.second += op.kind == program::OpKind::rmsnorm_grad;
        return count;
    };
    const auto [forward, backward] = norms(model);
    CHECK(forward - norms(without).first == 8);
    CHECK(backward - norms(without).second == 8);
    CHECK(model::count_parameters(model).total - model::count_parameters(without).total == 8 * 256);
    CHECK(model::model_flops_per_token(model, 512) == model::model_flops_per_token(without, 512));
    const std::vector<program::Parameter> parameters = lower::lower(small_plan(model, 512), 0).parameters;
    for (const char* name : {"post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"})
        CHECK(std::count_if(parameters.begin(), parameters.end(), [&](const program::Parameter& p) {
                  return p.name.find(std::string(".") + name + ".") != std::string::npos;
              }) == 4);
}

TEST_CASE("Gemma 4, lowered: norms of both branches, values made of keys") {
    const model::Model model = read(small_mixed_models()[4]);
    REQUIRE(model.architecture == "Gemma4ForCausalLM");
    const program::Program program = lower::lower(small_plan(model, 512), 0);
    int forward = 0, backward = 0;
    for (const program::Op& op : program.templates[0].ops) forward += op.kind == program::OpKind::rmsnorm;
    for (const program::Op& op : program.templates[1].ops) backward += op.kind == program::OpKind::rmsnorm_grad;
    CHECK(forward == 4 * 8 + 1); // a layer has 8, the model one at its end
    CHECK(backward == 4 * 8 + 1);
    int normed = 0, made = 0, scaled = 0, weighed = 0;
    for (const program::Op& op : program.templates[0].ops) {
        scaled += op.kind == program::OpKind::scale && op.in.size() > 1; // by the number of each layer
        weighed += op.kind == program::OpKind::expert_scale;
        if (op.kind != program::OpKind::value_norm) continue;
        const auto cols = [&](program::TensorId id) { return program.tensors[static_cast<std::size_t>(id)].cols; };
        ++normed;
        made += cols(op.out[0]) - cols(op.in[0]) == 128; // one head of values, of the last layer alone
    }
    CHECK(normed == 4);
    CHECK(made == 1);
    CHECK(scaled == 4);
    CHECK(weighed == 4);
}

TEST_CASE("gates of heads: one column a head beside the queries, under tensor and context parallelism as well") {
    const model::Model model = read(small_mixed_models().back());
    plan::Plan plan = small_plan(model, 512);
    plan.tp = 2;
    plan.dp = 1;
    plan.cp = 1;
    REQUIRE(plan::check_plan(plan).message == "");
    const auto widths = [](const program::Program& program) {
        std::vector<std::int64_t> list;
        for (const program::Parameter& p : program.parameters)
            if (p.name.find("g_proj") != std::string::npos) list.push_back(p.local_rows);
        return list;
    };
    CHECK(widths(lower::lower(plan, 0)) == std::vector<std::int64_t>{4, 4, 4, 2, 4, 4});
    plan.tp = 1;
    plan.cp = 2;
    plan.cp_comm = plan::ContextComm::alltoall;
    REQUIRE(plan::check_plan(plan).message == "");
    CHECK(lower::lower(plan, 0).templates[0].ops.size() > 0);
}
