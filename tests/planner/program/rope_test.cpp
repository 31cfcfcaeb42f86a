// rope_scaling of real configs: which pairs keep their frequency, and what multiplies rotated columns and logits.
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numbers>

using namespace moe;

namespace {

model::Model llama(const std::string& more) {
    return families::model_from_json(
        R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 2,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "rope_theta": 500000.0, "max_position_embeddings": 131072)" +
            (more.empty() ? "" : ", " + more) + "}",
        "config.json");
}

// The frequency that pair i keeps, as a fraction of its own.
double kept(const program::FrequencyScale& s, double theta, int dim, int i) {
    const double f = std::pow(theta, -2.0 * i / dim), u = s.turns > 0.0 ? f * s.turns : i;
    const double keep = std::clamp((u - s.low) / (s.high - s.low), 0.0, 1.0);
    return keep + (1.0 - keep) / s.factor;
}

} // namespace

TEST_CASE("DeepSeek-V3's YaRN: pairs up to 10 kept, from 23 on slowed 40 times, logits times 1.8739") {
    // The profile leaves out what no cost depends on; this is the published config.json's.
    const std::string scaling = R"("rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, )";
    std::string config = families::load_model("DeepSeek-V3").config_json;
    model::Model model = families::model_from_json(config.insert(config.find('{') + 1, scaling), "config.json");
    const program::FrequencyScale s = program::frequency_scale(model.rope_of({}), 64);
    // 64 ln(4096 / 64 pi) / (2 ln 10000) = 10.47 and 64 ln(4096 / 2 pi) / (2 ln 10000) = 22.51, rounded outwards.
    CHECK(kept(s, 10000.0, 64, 0) == nearly(1.0));
    CHECK(kept(s, 10000.0, 64, 10) == nearly(1.0));
    CHECK(kept(s, 10000.0, 64, 11) == nearly(12.0 / 13 + 1.0 / 13 / 40));
    CHECK(kept(s, 10000.0, 64, 22) == nearly(1.0 / 13 + 12.0 / 13 / 40));
    CHECK(kept(s, 10000.0, 64, 23) == nearly(1.0 / 40));
    CHECK(kept(s, 10000.0, 64, 31) == nearly(1.0 / 40));
    CHECK(s.magnitude == nearly(1.0)); // mscale and mscale_all_dim are equal

    plan::Plan plan;
    model.mtp.clear();
    plan.model = std::make_shared<const model::Model>(model);
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "moe-plan";
    plan.seq = 4096;
    plan.gbs = 1;
    int found = 0;
    for (const program::Template& tmpl : lower::lower(plan, 0).templates)
        for (const program::Op& op : tmpl.ops) {
            if (const auto* attention = std::get_if<program::AttentionAttr>(&op.attr)) {
                const double m = 0.1 * std::log(40.0) + 1.0;
                if (attention->scale != nearly(m * m / std::sqrt(192.0))) FAIL(attention->scale);
                ++found;
            } else if (const auto* rope = std::get_if<program::MlaRopeAttr>(&op.attr)) {
                if (rope->scale.factor != 40.0) FAIL(rope->scale.factor);
            } else if (const auto* norm = std::get_if<program::NormAttr>(&op.attr)) {
                if (norm->eps != 1e-6) FAIL(norm->eps);
            }
        }
    CHECK(found == 3 * 61); // forward, backward, and the last backward, which reduces gradients
}

TEST_CASE("Llama 3.1's scaling by wavelength") {
    const model::Model model = llama(R"("rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})");
    CHECK(model.not_executable.empty());
    const program::FrequencyScale s = program::frequency_scale(model.rope_of({}), 128);
    for (int i = 0; i < 64; ++i) {
        const double wavelength = 2.0 * std::numbers::pi * std::pow(500000.0, i / 64.0);
        const double smooth = (8192.0 / wavelength - 1.0) / 3.0;
        const double want = wavelength < 2048.0 ? 1.0 : wavelength > 8192.0 ? 1.0 / 8 : smooth + (1.0 - smooth) / 8;
        CAPTURE(i);
        CHECK(kept(s, 500000.0, 128, i) == nearly(want));
    }
    CHECK(s.magnitude == 1.0);
}

TEST_CASE("YaRN without mscale multiplies the rotated columns; linear scaling slows every pair; none changes nothing") {
    const model::Model yarn = llama(R"("rope_scaling": {"type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 32768})");
    CHECK(program::frequency_scale(yarn.rope_of({}), 128).magnitude == nearly(0.1 * std::log(4.0) + 1.0));
    const model::Model given = llama(R"("rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 0.7,
        "original_max_position_embeddings": 32768})");
    CHECK(program::frequency_scale(given.rope_of({}), 128).magnitude == 0.7);
    const model::Model kept_apart = llama(R"("rope_scaling": {"type": "yarn", "factor": 1.0, "attention_factor": 0.7,
        "original_max_position_embeddings": 32768})");
    CHECK(program::frequency_scale(kept_apart.rope_of({}), 128).magnitude == 0.7);
    // transformers takes the ratio of both lengths where factor is missing.
    const model::Model by_length =
        llama(R"("rope_scaling": {"type": "yarn", "original_max_position_embeddings": 32768})");
    CHECK(program::frequency_scale(by_length.rope_of({}), 128).factor == 4.0);
    const model::Model linear = llama(R"("rope_scaling": {"type": "linear", "factor": 2.5})");
    for (const int i : {0, 1, 63})
        CHECK(kept(program::frequency_scale(linear.rope_of({}), 128), 500000.0, 128, i) == 1.0 / 2.5);
    for (const int i : {0, 1, 63})
        CHECK(kept(program::frequency_scale(llama("").rope_of({}), 128), 500000.0, 128, i) == 1.0);
}

TEST_CASE("scalings that cannot be trained are named") {
    const auto obstacle = [](const std::string& scaling) {
        return llama("\"rope_scaling\": {" + scaling + "}").not_executable;
    };
    CHECK(obstacle(R"("type": "dynamic", "factor": 2.0)").find("rope_scaling = dynamic: only linear") == 0);
    CHECK(obstacle(R"("type": "linear", "factor": 0.5)").find("factor = 0.5: must be at least 1") != std::string::npos);
    CHECK(obstacle(R"("type": "yarn", "factor": 2.0, "beta_fast": 0)").find("must be above 0") != std::string::npos);
    CHECK(obstacle(R"("type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 3)")
              .find("must not be below low_freq_factor") != std::string::npos);
    CHECK(
        families::model_from_json(R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 64, "rope_scaling": {"type": "yarn", "factor": 2.0}})",
                                  "config.json")
            .not_executable.find("original_max_position_embeddings is missing") != std::string::npos);
}
