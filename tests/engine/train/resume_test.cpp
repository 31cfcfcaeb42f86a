// What a resumed run may change: each field is refused by its name, and allowed by it.
#include "engine/train/resume.hpp"
#include "tests/engine/base/refusals.hpp"

#include <doctest/doctest.h>

#include <functional>
#include <utility>

using namespace moe;

namespace {

constexpr const char* config =
    R"({"name":"m","hidden_size":64,"rms_norm_eps":1e-6,"num_experts_per_tok":2,"rope_parameters":{"rope_theta":10000.0},)"
    R"("dtype":"bfloat16","sliding_window":null})";

data::DataPosition position() {
    return {true, 128, 8, {{"text", 1000, 10, 7, 1.0, 0, 0, 128, 512, 4}, {"code", 2000, 4, 8, 3.0, 1, 0, 128, 0, 0}}};
}

weights::RunState stored() { return {4, 32, 1, "m", config, {}, position(), {}, 0}; }
train::ResumedRun same() { return {config, 1, position()}; }

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    return text.replace(text.find(from), from.size(), to);
}

} // namespace

TEST_CASE("a resumed run that is the same says nothing") {
    CHECK(train::check_resume("c", stored(), same(), {}).empty());
    train::ResumedRun silent = same();
    silent.config = replaced(replaced(replaced(config, "bfloat16", "float32"), R"("m")", R"("other")"),
                             R"(,"sliding_window":null)", "");
    silent.data.datasets[0].prefix = "moved/text";
    CHECK(train::check_resume("c", stored(), silent, {}).empty());
    CHECK(train::same_order(stored(), silent));
}

TEST_CASE("a field that is stated as its default is no change, and one that is not is one") {
    const std::string qwen =
        R"({"name":"m","architectures":["Qwen3MoeForCausalLM"],"hidden_size":64,"num_hidden_layers":2,)"
        R"("num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"intermediate_size":128,)"
        R"("moe_intermediate_size":32,"num_experts":8,"num_experts_per_tok":2,"vocab_size":256,"rope_theta":10000.0})";
    const auto with = [&](const std::string& field) { return replaced(qwen, "\"hidden", field + ",\"hidden"); };
    weights::RunState before = stored();
    before.config = qwen;
    train::ResumedRun now = same();
    for (const char* field : {"\"tie_word_embeddings\":false", "\"rms_norm_eps\":1e-6", "\"hidden_act\":\"silu\"",
                              "\"decoder_sparse_step\":1", "\"rope_scaling\":null"}) {
        CAPTURE(field);
        now.config = with(field);
        CHECK(train::check_resume("c", before, now, {}).empty());
        std::swap(before.config, now.config);
        CHECK(train::check_resume("c", before, now, {}).empty());
        std::swap(before.config, now.config);
    }
    now.config = replaced(qwen, "10000.0", "10000");
    CHECK(train::check_resume("c", before, now, {}).empty());
    for (const char* field : {"\"tie_word_embeddings\":true", "\"rms_norm_eps\":1e-5", "\"decoder_sparse_step\":2"}) {
        CAPTURE(field);
        now.config = with(field);
        CHECK(mentions(message([&] { train::check_resume("c", before, now, {}); }), " was absent, this run has "));
        std::swap(before.config, now.config);
        CHECK(mentions(message([&] { train::check_resume("c", before, now, {}); }), ", this run has absent: "));
        std::swap(before.config, now.config);
    }
}

TEST_CASE("what changes the meaning of a run is refused by its field, and allowed by it") {
    struct Case {
        const char* field;
        std::function<void(train::ResumedRun&)> change;
    };
    const std::vector<Case> cases{
        {"rope_parameters.rope_theta", [](auto& r) { r.config = replaced(r.config, "10000.0", "500000.0"); }},
        {"rms_norm_eps", [](auto& r) { r.config = replaced(r.config, "1e-6", "1e-5"); }},
        {"num_experts_per_tok", [](auto& r) { r.config = replaced(r.config, "tok\":2", "tok\":4"); }},
        {"sliding_window", [](auto& r) { r.config = replaced(r.config, "null", "4096"); }},
        {"seed", [](auto& r) { r.seed = 2; }},
        {"shuffle", [](auto& r) { r.data.shuffled = false; }},
        {"data", [](auto& r) { r.data.datasets[1].weight = 1.0; }},
        {"data", [](auto& r) { r.data.datasets[1].mark = 9; }},
        {"data", [](auto& r) { r.data.datasets.pop_back(); }},
        {"ema", [](auto& r) { r.ema = 0.999; }},
        {"optimizer", [](auto& r) { r.muon = true; }},
        {"freeze", [](auto& r) { r.freeze = {"embed*"}; }},
        {"lr_group",
         [](auto& r) {
             r.lr_groups = {"*experts*=0.5", "norm=2,decay=0"};
         }},
    };
    for (const Case& c : cases) {
        CAPTURE(c.field);
        train::ResumedRun now = same();
        c.change(now);
        const std::string said = message([&] { train::check_resume("c", stored(), now, {"something"}); });
        CAPTURE(said);
        CHECK(mentions(said, fmt::format("c: {} was ", c.field)));
        CHECK(mentions(said, fmt::format("add --allow-change {} ", c.field)));
        const std::vector<std::string> allowed = train::check_resume("c", stored(), now, {c.field});
        REQUIRE_FALSE(allowed.empty());
        CHECK(mentions(allowed.front(), c.field));
    }
    // The last part of a name is enough.
    train::ResumedRun now = same();
    cases[0].change(now);
    CHECK(train::check_resume("c", stored(), now, {"rope_theta"}).size() == 1);
}

TEST_CASE("a long list that differs at its end alone is refused") {
    std::string types;
    for (int layer = 0; layer < 40; ++layer) types += R"("full_attention",)";
    const std::string begin = R"({"name":"m","layer_types":[)" + types;
    weights::RunState before = stored();
    before.config = begin + R"("full_attention"]})";
    train::ResumedRun now = same();
    now.config = begin + R"("sliding_attention"]})";
    CHECK(mentions(message([&] { train::check_resume("c", before, now, {}); }), "c: layer_types was ["));
}

TEST_CASE("a changed batch is said, and so is data without a position") {
    train::ResumedRun now = same();
    now.data.global_batch = 16;
    now.data.seq = 64;
    const std::vector<std::string> said = train::check_resume("c", stored(), now, {});
    REQUIRE(said.size() == 1);
    CHECK(mentions(said[0], "a step was 8 samples of 128 tokens, now 16 of 64"));
    weights::RunState old = stored();
    old.data = {};
    REQUIRE(train::check_resume("c", old, same(), {}).size() == 1);
    CHECK(mentions(train::check_resume("c", old, same(), {})[0], "keeps no position in its data"));
}
