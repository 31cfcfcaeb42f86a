// Hybrids of Mamba-2, attention, experts and MLPs: what a pattern is read as, what its layers are lowered to.
#include "planner/lower/lower.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/program/program.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"
#include "tests/support/published_plan.hpp"

#include <doctest/doctest.h>

#include <array>
#include <limits>
#include <map>
#include <string>

using namespace moe;

namespace {

std::string config(const std::string& pattern, const std::string& rest = "") {
    return R"({"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": ")" + pattern +
           R"(", "hidden_size": 256,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 384,
        "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 64,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "moe_latent_size": 64,
        "moe_shared_expert_intermediate_size": 192, "vocab_size": 512)" +
           rest + "}";
}

plan::Plan plan_of(const std::string& text) {
    plan::Plan plan = published_plan("Qwen3-30B-A3B", "h100", "bridge-26.06");
    plan.model = std::make_shared<const model::Model>(families::model_from_json(text, "config.json"));
    plan.gpus = 4;
    plan.tp = plan.dp = 2;
    plan.ep = 4;
    plan.edp = 1;
    plan.gbs = 4;
    plan.seq = 512;
    return plan;
}

std::string refused(const std::string& text) {
    return fault_of([&] { families::model_from_json(text, "config.json"); });
}

} // namespace

TEST_CASE("hybrid: every letter is a layer of one part, an MTP depth has two") {
    const model::Model model =
        families::model_from_json(config("ME*M-E", R"(, "num_nextn_predict_layers": 2)"), "config.json");
    REQUIRE(model.layers.size() == 6);
    CHECK(model.hybrid);
    CHECK(model.kind_of(0).attention.kind == model::AttentionKind::mamba);
    CHECK(!model.kind_of(0).moe);
    CHECK(!model.kind_of(0).dense());
    CHECK(model.layers[0] == model.layers[3]);
    CHECK(model.kind_of(1).attention.kind == model::AttentionKind::none);
    CHECK(model.kind_of(1).moe->latent == 64);
    CHECK(model.kind_of(1).moe->router.scoring == model::Scoring::sigmoid);
    CHECK(model.kind_of(2).attention.rope_dim == 0);
    CHECK(model.kind_of(4).dense_ffn == 384);
    REQUIRE(model.mtp.size() == 2);
    const model::LayerKind& depth = model.kinds[static_cast<std::size_t>(model.mtp[0])];
    CHECK(depth.attention.kind == model::AttentionKind::gqa);
    CHECK(depth.moe.has_value());
    CHECK(model.not_executable.empty());
    CHECK(model.kind_of(0).attention.step_max == std::numeric_limits<double>::infinity());
}

TEST_CASE("hybrid: what contradicts itself is refused by field") {
    CHECK(refused(config("MEXM-E")).find("hybrid_override_pattern = \"MEXM-E\"") != std::string::npos);
    CHECK(refused(config("ME*M-")).find("must have num_hidden_layers = 6 letters") != std::string::npos);
    CHECK(refused(config("ME*M-E", R"(, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "ME")"))
              .find("mtp_hybrid_override_pattern") != std::string::npos);
    CHECK(refused(config("ME*M-E", R"(, "mamba_expand": 2, "mamba_num_heads": 9)")).find("mamba_num_heads") !=
          std::string::npos);
    for (const char* field :
         {R"("use_conv_bias": false)", R"("use_bias": true)", R"("mamba_proj_bias": true)",
          R"("mamba_hidden_act": "relu")", R"("mlp_bias": true)", R"("tie_word_embeddings": true)",
          R"("time_step_limit": [1.0, 0.5])", R"("time_step_limit": [0.0, {"__float__": "-Infinity"}])"}) {
        const std::string text = field, name = text.substr(1, text.find('"', 1) - 1);
        CAPTURE(text);
        CHECK(refused(config("ME*M-E", ", " + text)).find("config.json: " + name + " = ") != std::string::npos);
    }
    const auto obstacle = [](const std::string& rest) {
        return families::model_from_json(config("ME*M-E", rest), "config.json").not_executable;
    };
    CHECK(obstacle(R"(, "time_step_limit": [0.001, {"__float__": "Infinity"}])").empty());
    CHECK(obstacle(R"(, "conv_kernel": 9)") == "conv_kernel = 9: only up to 8 is trained");
    plan::Plan plan = plan_of(config("ME*M-E"));
    REQUIRE(plan::check_plan(plan).message == "");
    plan.tp = 1;
    plan.cp = 4;
    plan.dp = 1;
    CHECK(plan::check_plan(plan).message.find("n_groups = 2") != std::string::npos);
    plan = plan_of(config("MMMMMM"));
    CHECK(plan::check_plan(plan).message.find("has no experts") != std::string::npos);
}

TEST_CASE("hybrid: products of a forward are the model's FLOPs, experts work and tokens travel in the latent width") {
    const plan::Plan plan = plan_of(config("ME*M-E"));
    const program::Program program = lower::lower(plan, 0);
    std::map<program::OpKind, int> count;
    int moved = 0;
    double products = 0.0;
    for (const program::Op& op : program.templates[0].ops) {
        ++count[op.kind];
        if (op.kind == program::OpKind::gemm && op.module != program::Module::router) products += op.flops;
        if (op.kind == program::OpKind::grouped_gemm) products += op.flops;
        if (op.kind == program::OpKind::all_to_all_rows &&
            std::get<program::RowsAttr>(op.attr).cols > 1) { // not the routing weights
            ++moved;
            CHECK(op.bytes == nearly(256.0 * 2 * 64 * 2)); // two copies of each of 256 tokens
        }
    }
    CHECK(moved == 4);
    CHECK(count[program::OpKind::scan] == 2);
    CHECK(count[program::OpKind::attention] == 1);
    CHECK(count[program::OpKind::grouped_gemm] == 4);
    // Multiply-accumulates per token, of one rank of tp = 2. Per Mamba layer: 8 heads of 32, 2 groups of 16, 8 steps.
    const double mamba = 256.0 * (2 * 256 + 2 * 32 + 8) + 256.0 * 256;
    const double attention = 256.0 * (256 + 2 * 128) + 256.0 * 256, mlp = 2.0 * 256 * 384;
    const double shared = 2.0 * 256 * 192, experts = 2.0 * 2 * 64 * 128; // without the router's down projection
    const double up = 64.0 * 256;
    const double tokens = 512.0 * plan.mbs;
    const double split = 2 * mamba + attention + mlp + 2 * (shared + experts + up) + 256.0 * 512;
    CHECK(products == nearly(2.0 * tokens * split / 2).epsilon(1e-9));
}

TEST_CASE("hybrid: a scan moves its tokens, its chunks' states and their products") {
    const program::Program program = lower::lower(plan_of(config("ME*M-E")), 0);
    int scans = 0;
    for (const program::Op& op : program.templates[0].ops) {
        if (op.kind != program::OpKind::scan) continue;
        ++scans;
        const auto& scan = std::get<program::ScanAttr>(op.attr);
        CHECK(scan.rows == 512);
        CHECK(scan.heads == 4); // of one rank of tp = 2
        // Elements of a row: 128 of the heads, 16 of the groups, 128 * 16 / 64 of states, 64 of products.
        CHECK(op.bytes == nearly(512.0 * (16 * 128 + 16 * 16 + 12 * 32 + 8 * 64)));
    }
    CHECK(scans == 2);
    int gradients = 0;
    for (const program::Op& op : program.templates[1].ops) {
        gradients += op.kind == program::OpKind::scan_grad;
        if (op.kind == program::OpKind::scan_grad)
            CHECK(op.bytes == nearly(512.0 * (42 * 128 + 42 * 16 + 38 * 32 + 28 * 64)));
    }
    CHECK(gradients == 2);
}

TEST_CASE("hybrid: of our own engine Mamba's layer is a convolution, a rule and a norm, with the counted weights") {
    plan::Plan plan = plan_of(config("ME*M-E", R"(, "time_step_limit": [0.001, 0.5])"));
    plan.stack = "moe-plan";
    plan.tp = plan.ep = 1;
    plan.cp = 2;
    plan.edp = 4;
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    std::int64_t declared = 0;
    for (const program::Parameter& parameter : program.parameters) declared += parameter.local_elements();
    CHECK(declared == model::count_parameters(*plan.model).total);
    for (const auto& [index, kinds] :
         {std::pair{0, std::array{program::OpKind::short_conv, program::OpKind::ssd, program::OpKind::gated_norm}},
          std::pair{1, std::array{program::OpKind::short_conv_grad, program::OpKind::ssd_grad,
                                  program::OpKind::gated_norm_grad}}}) {
        std::map<program::OpKind, int> count;
        for (const program::Op& op : program.templates[static_cast<std::size_t>(index)].ops) {
            ++count[op.kind];
            if (op.kind != kinds[1]) continue;
            const auto& state = std::get<program::StateAttr>(op.attr);
            CHECK(state.rows == 512); // all tokens, of half of the heads
            CHECK(state.key_heads == 1);
            CHECK(state.value_heads == 4);
            CHECK(state.step_min == 0.001);
            CHECK(state.step_max == 0.5);
            // Two products with a state and half a chunk's inner ones, 2 FLOPs each.
            CHECK(state.flops() == nearly(2.0 * 512 * 4 * (2.0 * 16 * 32 + 32.0 * (16 + 32))));
        }
        for (const program::OpKind kind : kinds) CHECK(count[kind] == 2);
        CHECK(count[program::OpKind::scan] + count[program::OpKind::scan_grad] == 0);
        CHECK(count[program::OpKind::all_to_all] == 4); // there and back
    }
}

TEST_CASE("hybrid: under context parallelism a scan has all tokens of some heads") {
    plan::Plan plan = plan_of(config("ME*M-E"));
    plan.tp = 1;
    plan.cp = 2;
    REQUIRE(plan::check_plan(plan).message == "");
    const program::Program program = lower::lower(plan, 0);
    for (const auto& [index, kind] : {std::pair{0, program::OpKind::scan}, std::pair{1, program::OpKind::scan_grad}}) {
        int scans = 0, exchanges = 0;
        for (const program::Op& op : program.templates[static_cast<std::size_t>(index)].ops) {
            exchanges += op.kind == program::OpKind::all_to_all;
            if (op.kind != kind) continue;
            ++scans;
            CHECK(std::get<program::ScanAttr>(op.attr).rows == 512);
            CHECK(std::get<program::ScanAttr>(op.attr).heads == 4);
            CHECK(std::get<program::ScanAttr>(op.attr).groups == 1);
        }
        CHECK(scans == 2);
        CHECK(exchanges == 4); // attention's ring has none
    }
}
