// Hugging Face folders: any plan takes and gives back the same weights, in every layout; what does not fit is named.
#include "engine/train/huggingface.hpp"
#include "engine/train/initial_weights.hpp"
#include "engine/weights/safetensors.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/model/families/load_model.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/samples.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <filesystem>
#include <functional>

using namespace moe;

namespace {

train::TrainOptions seeded(std::uint64_t seed) {
    train::TrainOptions options;
    options.seed = seed;
    return options;
}

// The tensors of an exported folder by name: shape and values.
using Content = std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<float>>>;

Content content_of(const std::string& folder) {
    const weights::StoredWeights weights(folder);
    Content content;
    for (const std::string& name : weights.names()) {
        const weights::StoredTensor& tensor = *weights.find(name);
        std::vector<float> values(static_cast<std::size_t>(tensor.elements));
        weights::read_floats(tensor, name, 0, values);
        content[name] = {tensor.shape, values};
    }
    return content;
}

void write_content(const std::string& folder, const Content& content) {
    std::vector<weights::TensorToWrite> tensors;
    for (const auto& [name, tensor] : content) tensors.push_back({name, tensor.first});
    std::filesystem::remove_all(folder);
    weights::write_weights(folder, tensors, program::Dtype::f32, 1 << 30,
                           [&](const weights::TensorToWrite& t) { return content.at(t.name).second; });
}

// Experts as transformers 5 holds them: [E, 2f, h] and [E, h, f] of a layer, under "mlp".
Content fused(const Content& content) {
    Content out;
    for (const auto& [name, tensor] : content) {
        const std::size_t at = name.find(".experts.");
        const bool apart = at != std::string::npos && name[at + 9] >= '0' && name[at + 9] <= '9';
        if (!apart) {
            std::string renamed = name;
            const std::size_t block = renamed.find(".block_sparse_moe.");
            if (block != std::string::npos) renamed.replace(block, 18, ".mlp.");
            out[renamed] = tensor;
        }
    }
    const auto layer_experts = [&](int layer, const std::string& block, const std::array<const char*, 3>& names) {
        const std::string from = "model.layers." + std::to_string(layer) + "." + block + ".experts.";
        const std::string to = "model.layers." + std::to_string(layer) + ".mlp.experts.";
        for (int e = 0; content.count(from + std::to_string(e) + "." + names[0] + ".weight"); ++e) {
            const auto part = [&](int i) -> const auto& {
                return content.at(from + std::to_string(e) + "." + names[static_cast<std::size_t>(i)] + ".weight");
            };
            auto& [in_shape, in] = out[to + "gate_up_proj"];
            auto& [down_shape, down] = out[to + "down_proj"];
            in_shape = {e + 1, 2 * part(0).first[0], part(0).first[1]};
            down_shape = {e + 1, part(2).first[0], part(2).first[1]};
            for (const int i : {0, 1}) in.insert(in.end(), part(i).second.begin(), part(i).second.end());
            down.insert(down.end(), part(2).second.begin(), part(2).second.end());
        }
    };
    for (int layer = 0; layer < 6; ++layer) { // MTP's behind the model's
        layer_experts(layer, "mlp", {"gate_proj", "up_proj", "down_proj"});
        layer_experts(layer, "block_sparse_moe", {"w1", "w3", "w2"});
    }
    return out;
}

void check_equal(const train::Trainer& a, const train::Trainer& b) {
    REQUIRE(a.parameters().size() == b.parameters().size());
    for (const auto& [name, shape] : a.parameters()) {
        CAPTURE(name);
        CHECK(a.read_weight(name) == b.read_weight(name));
    }
}

using Fields = std::vector<std::pair<std::string, std::string>>;

struct RoundTrip {
    const char* model;
    int ranks;
    Fields split;
};

} // namespace

TEST_CASE("weights survive export and import between plans bit for bit") {
    const std::vector<RoundTrip> cases = {
        {"qwen3", 8, {{"tp", "2"}, {"ep", "4"}}},
        {"qwen2", 8, {{"tp", "2"}, {"pp", "2"}, {"ep", "2"}, {"etp", "2"}}},
        {"mixtral", 4, {{"ep", "2"}, {"etp", "2"}}},
        {"deepseek2", 8, {{"tp", "4"}, {"ep", "8"}}},
        {"deepseek3", 4, {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "2"}}},
        {"llama", 4, {{"tp", "4"}}},
        {"gptoss", 8, {{"tp", "2"}, {"pp", "2"}, {"ep", "4"}}},
        {"deepseek3-mtp", 4, {{"tp", "2"}, {"ep", "4"}}},
    };
    for (const RoundTrip& c : cases) {
        CAPTURE(c.model);
        const Folder folder;
        const plan::Plan one = small_plan(c.model, 1), many = small_plan(c.model, c.ranks, c.split);
        train::Trainer first(one, seeded(3));
        const train::SampleSource drawn = made_up_tokens(one.model->vocab);
        const train::SampleSource tokens = [&](std::int64_t sample, std::span<std::int32_t> out) {
            drawn(sample % one.gbs, out); // every step sees the same batch
        };
        first.step(tokens); // so that the weights are no seed's
        train::export_weights(first, folder / "one", {program::Dtype::f32, 20'000});
        CHECK(std::filesystem::exists(folder / "one/model.safetensors.index.json"));

        train::Trainer second(many, seeded(4));
        const train::LoadReport report = train::load_weights(second, folder / "one");
        CHECK(report.loaded == static_cast<std::int64_t>(first.parameters().size()));
        CHECK(train::describe(report).empty());
        check_equal(first, second);
        train::export_weights(second, folder / "two");
        CHECK(content_of(folder / "one") == content_of(folder / "two"));
        {
            train::CheckpointWriter writer(folder / "checkpoints", "test");
            writer.save(second);
            writer.finish();
        }
        std::vector<std::string> skipped;
        train::export_weights(*weights::newest_checkpoint(folder / "checkpoints", skipped), folder / "three");
        CHECK(content_of(folder / "one") == content_of(folder / "three"));
        CHECK(families::load_model(folder / "three").kinds == one.model->kinds);
        CHECK(families::load_model(folder / "two").architecture == one.model->architecture);

        train::Trainer third(one, seeded(5));
        write_content(folder / "fused", fused(content_of(folder / "two")));
        CHECK(train::describe(train::load_weights(third, folder / "fused")).empty());
        check_equal(first, third);
        const double loss = first.step(tokens).loss;
        CHECK(second.step(tokens).loss == nearly(loss).epsilon(1e-5));
        CHECK(third.step(tokens).loss == loss);
    }
}

TEST_CASE("BF16 plans keep FP32 masters as the checkpoint has them") {
    const Folder folder;
    train::Trainer first(small_plan("qwen3", 1), seeded(3));
    train::export_weights(first, folder / "hf");
    train::Trainer second(small_plan("qwen3", 2, {{"tp", "2"}, {"precision", "bf16"}}), seeded(4));
    train::load_weights(second, folder / "hf");
    check_equal(first, second);
    train::export_weights(second, folder / "bf16", {program::Dtype::bf16, 1 << 30});
    train::Trainer third(small_plan("qwen3", 1), seeded(5));
    train::load_weights(third, folder / "bf16");
    const std::vector<float> exact = first.read_weight("lm_head.weight"), rounded = third.read_weight("lm_head.weight");
    CHECK(exact != rounded);
    CHECK(relative_distance(rounded, exact) < 0x1p-8); // half a unit of BF16's 8-bit significand
}

TEST_CASE("selection biases stay FP32 in a BF16 export") {
    const Folder folder;
    train::Trainer trainer(small_plan("deepseek3", 1), seeded(3));
    const std::string bias = "model.layers.1.mlp.gate.e_score_correction_bias";
    std::vector<float> values = trainer.read_weight(bias);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = 1.0f + 0.001f * static_cast<float>(i + 1); // no BF16
    trainer.write_weight(bias, values);
    train::export_weights(trainer, folder / "bf16", {program::Dtype::bf16, 20'000});
    const weights::StoredWeights stored(folder / "bf16");
    CHECK(stored.find(bias)->dtype == "F32");
    CHECK(stored.find("lm_head.weight")->dtype == "BF16");
    train::Trainer again(small_plan("deepseek3", 2, {{"ep", "2"}}), seeded(4));
    train::load_weights(again, folder / "bf16");
    CHECK(again.read_weight(bias) == values);
}

TEST_CASE("tensors that are missing, misshapen, of another type or left over are named") {
    const Folder folder;
    train::Trainer trainer(small_plan("qwen3", 2, {{"ep", "2"}}), seeded(3));
    train::export_weights(trainer, folder / "good");
    const Content good = content_of(folder / "good");
    const auto load = [&](const std::function<void(Content&)>& change) {
        Content content = good;
        change(content);
        write_content(folder / "bad", content);
        return message([&] { train::load_weights(trainer, folder / "bad"); });
    };
    const std::string up = "model.layers.2.mlp.experts.5.up_proj.weight";
    const std::vector<float> before = trainer.read_weight("model.embed_tokens.weight");
    CHECK(mentions(load([&](Content& c) { c.erase(up); }), up + " is missing, nor is model.layers.2.mlp.experts"));
    CHECK(mentions(load([&](Content& c) { c.erase("model.norm.weight"); }), "model.norm.weight is missing"));
    CHECK(mentions(load([&](Content& c) {
                       c[up].first = {32, 16};
                       for (float& w : c["model.embed_tokens.weight"].second) w = 9.0f;
                   }),
                   up + " has shape [32, 16], the plan's model needs [16, 32]"));
    CHECK(trainer.read_weight("model.embed_tokens.weight") == before); // nothing was changed
    CHECK(mentions(load([&](Content& c) {
                       c["model.embed_tokens.weight"] = {{62, 32}, std::vector<float>(62 * 32, 0.0f)};
                   }),
                   "needs [61, 32]"));
    for (const float wrong : {NAN, -INFINITY})
        CHECK(mentions(load([&](Content& c) { c[up].second[3] = wrong; }),
                       up + fmt::format(" holds {} at element 3 of the parameter", wrong)));

    Content more = good;
    more["model.layers.4.mlp.gate.weight"] = {{8, 32}, std::vector<float>(256, 0.0f)};
    write_content(folder / "more", more);
    CHECK(train::describe(train::load_weights(trainer, folder / "more")) ==
          "1 tensors of the checkpoint are not used: model.layers.4.mlp.gate.weight");

    const std::string config = read_file(folder / "good/config.json");
    CHECK(mentions(config, R"("model_type":"qwen3_moe")")); // The plan's own has the class alone.
    const auto with = [&](const std::string& from, const std::string& to) {
        std::string text = config;
        REQUIRE(mentions(text, from));
        text.replace(text.find(from), from.size(), to);
        write_file(folder / "more/config.json", text);
        return folder / "more";
    };
    CHECK(mentions(message([&] { train::load_weights(trainer, with("Qwen3MoeForCausalLM", "MixtralForCausalLM")); }),
                   "architectures = MixtralForCausalLM, but the plan's model is Qwen3MoeForCausalLM"));
    const train::LoadReport report =
        train::load_weights(trainer, with("\"norm_topk_prob\":true", "\"norm_topk_prob\":false"));
    CHECK(mentions(train::describe(report), "differs in attention, MLP or router of layer 0"));
    CHECK(mentions(message([&] { train::load_weights(trainer, folder / "nowhere"); }), "holds neither"));
}

TEST_CASE("a type that holds no weights is refused before anything is read") {
    const Folder folder;
    train::Trainer trainer(small_plan("llama", 1), seeded(3));
    train::export_weights(trainer, folder / "hf");
    std::string bytes = read_file(folder / "hf/model.safetensors");
    const std::size_t at = bytes.find("\"F32\"");
    REQUIRE(at != std::string::npos);
    bytes.replace(at, 5, "\"I32\"");
    write_file(folder / "hf/model.safetensors", bytes);
    CHECK(mentions(message([&] { train::load_weights(trainer, folder / "hf"); }), "is stored as I32"));
}

TEST_CASE("indexers: the names of published files, and none in layers that share keys") {
    const Folder folder;
    train::Trainer first(small_plan("glm5", 1, {}), seeded(3)),
        many(small_plan("glm5", 8, {{"tp", "2"}, {"ep", "4"}, {"cp", "2"}}), seeded(4));
    train::export_weights(first, folder / "hf");
    const std::vector<std::string> names = weights::StoredWeights(folder / "hf").names();
    const auto has = [&](const std::string& name) {
        return std::find(names.begin(), names.end(), name) != names.end();
    };
    for (const char* part : {"wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"}) {
        CAPTURE(part);
        CHECK(has(std::string("model.layers.0.self_attn.indexer.") + part));
        CHECK_FALSE(has(std::string("model.layers.1.self_attn.indexer.") + part));
        CHECK(has(std::string("model.layers.2.self_attn.indexer.") + part));
    }
    CHECK(train::describe(train::load_weights(many, folder / "hf")) == "");
    check_equal(first, many);
}

TEST_CASE("a vocabulary grows: new tokens begin as the mean of the others, under every plan") {
    for (const char* kind : {"qwen3", "gptoss", "deepseek3-mtp"}) {
        CAPTURE(kind);
        const Folder folder;
        train::Trainer first(small_plan(kind, 1), seeded(3));
        train::export_weights(first, folder / "hf");
        {
            train::CheckpointWriter writer(folder / "checkpoints", "test");
            writer.save(first);
            writer.finish();
        }
        std::vector<std::string> skipped;
        const auto checkpoint = weights::newest_checkpoint(folder / "checkpoints", skipped);
        const auto larger = small_model(kind, {{"vocab_size", "70"}});
        train::Trainer one(small_plan(larger, 1, {}), seeded(4)),
            many(small_plan(larger, 4, {{"tp", "2"}, {"ep", "2"}, {"pp", "2"}}), seeded(5)),
            resumed(small_plan(larger, 2, {{"tp", "2"}}), seeded(6));
        for (const train::LoadReport& report :
             {train::load_weights(one, folder / "hf"), train::load_weights(many, folder / "hf"),
              train::load_weights(resumed, *checkpoint)}) {
            CHECK(report.loaded == static_cast<std::int64_t>(first.parameters().size()));
            CHECK(train::describe(report) ==
                  "the vocabulary grows from 61 to 70 tokens: rows of new ones are the mean of the others");
        }
        check_equal(one, many);
        check_equal(one, resumed);
        for (const auto& [name, shape] : first.parameters()) {
            CAPTURE(name);
            std::vector<float> want = first.read_weight(name);
            if (train::has_token_rows(name))
                for (int row = 61; row < 70; ++row)
                    for (std::int64_t c = 0; c < shape.cols; ++c) {
                        double sum = 0.0;
                        for (std::int64_t r = 0; r < 61; ++r)
                            sum += static_cast<double>(want[static_cast<std::size_t>(r * shape.cols + c)]);
                        want.push_back(static_cast<float>(sum / 61.0));
                    }
            CHECK(one.read_weight(name) == want);
        }
        train::Trainer smaller(small_plan(small_model(kind, {{"vocab_size", "60"}}), 1, {}), seeded(7));
        CHECK(mentions(message([&] { train::load_weights(smaller, folder / "hf"); }), "needs [60, 32]"));
        CHECK(
            mentions(message([&] { train::load_weights(smaller, *checkpoint); }), "is 61 x 32, the plan's model has"));
    }
}
