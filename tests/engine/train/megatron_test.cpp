// Checkpoints that Megatron-Core wrote have the losses that it computed with them; damaged and other ones are named.
#include "engine/train/megatron_weights.hpp"
#include "engine/weights/pickle.hpp"
#include "engine/weights/torch_dist.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/samples.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <set>
#include <vector>

using namespace moe;

namespace {

namespace fs = std::filesystem;

// Of megatron/make.py.
std::string made(const std::string& name) {
    return (fs::path(profiles_folder()).parent_path() / "tests/engine/train/megatron/made" / name).string();
}

train::SampleSource tokens_of_make() {
    return {[](std::int64_t sample, std::span<std::int32_t> out) {
                for (std::size_t t = 0; t < out.size(); ++t) {
                    const auto at = static_cast<std::int64_t>(t);
                    out[t] = static_cast<std::int32_t>((7 * sample * at + 3 * at + sample) % 61);
                }
            },
            {}};
}

train::TrainOptions evaluating() {
    train::TrainOptions options;
    options.seed = 5;
    options.evaluates = true;
    return options;
}

struct Loaded {
    const char* model;
    int ranks;
    Fields split;
};

std::string copied(const Folder& folder, const std::string& name) {
    std::string copy = folder / name;
    fs::remove_all(copy);
    fs::copy(made(name), copy);
    return copy;
}

std::string first_part(const std::string& folder) {
    std::set<std::string> parts;
    for (const auto& entry : fs::directory_iterator(folder))
        if (entry.path().extension() == ".distcp" && fs::file_size(entry.path()) > 0)
            parts.insert(entry.path().string());
    REQUIRE(!parts.empty());
    return *parts.begin();
}

} // namespace

TEST_CASE("megatron checkpoints: the loss is the one that Megatron-Core computed, under any plan") {
    const std::vector<Loaded> cases = {
        {"qwen3", 1, {}}, {"qwen3", 4, {{"tp", "2"}, {"ep", "2"}}}, {"qwen3", 2, {{"pp", "2"}}}};
    for (const Loaded& c : cases) {
        CAPTURE(c.model);
        CAPTURE(c.ranks);
        train::Trainer trainer(small_plan(c.model, c.ranks, c.split), evaluating());
        const train::LoadReport report = train::load_megatron_weights(trainer, made(c.model));
        CHECK(report.loaded == static_cast<std::int64_t>(trainer.parameters().size()));
        const double expected = nlohmann::json::parse(read_file(made(c.model) + "/loss.json")).at("loss").get<double>();
        CHECK(trainer.evaluate(tokens_of_make(), 8).loss == nearly(expected).epsilon(1e-5));
    }
}

TEST_CASE("megatron checkpoints: every tensor to the bit") {
    train::Trainer trainer(small_plan("qwen3", 1), evaluating());
    train::load_megatron_weights(trainer, made("qwen3"));
    weights::TorchDist checkpoint(made("qwen3"));
    const auto same = [&](const std::string& ours, const std::string& theirs, std::int64_t first) {
        CAPTURE(ours);
        checkpoint.open(theirs);
        const std::vector<float> values = trainer.read_weight(ours);
        std::vector<float> stored(values.size());
        checkpoint.read_floats(theirs, first, stored);
        CHECK(values == stored);
    };
    const std::string ours = "model.layers.2.", theirs = "decoder.layers.";
    same("model.norm.weight", "decoder.final_layernorm.weight", 0);
    same("model.embed_tokens.weight", "embedding.word_embeddings.weight", 0);
    same(ours + "self_attn.o_proj.weight", theirs + "self_attention.linear_proj.weight", 2 * 32 * 64);
    same(ours + "mlp.gate.weight", theirs + "mlp.router.weight", 2 * 8 * 32);
    same(ours + "mlp.experts.5.gate_proj.weight", theirs + "mlp.experts.experts.linear_fc1.weight",
         (2 * 8 + 5) * 2 * 16 * 32);
    same(ours + "mlp.experts.5.up_proj.weight", theirs + "mlp.experts.experts.linear_fc1.weight",
         ((2 * 8 + 5) * 2 + 1) * 16 * 32);
    same(ours + "mlp.experts.7.down_proj.weight", theirs + "mlp.experts.experts.linear_fc2.weight",
         (2 * 8 + 7) * 16 * 32);
}

TEST_CASE("megatron checkpoints: what is missing, damaged or of another model is named, and nothing is changed") {
    const Folder folder;
    train::Trainer trainer(small_plan("qwen3", 1), evaluating());
    const std::vector<float> before = trainer.read_weight("model.embed_tokens.weight");
    const auto refusal = [&](const std::string& from) {
        std::string text = message([&] { train::load_megatron_weights(trainer, from); });
        CHECK(trainer.read_weight("model.embed_tokens.weight") == before);
        CHECK(text.find('\n') == std::string::npos);
        return text;
    };
    CHECK(mentions(refusal(folder / "none"), "holds no .metadata"));
    const auto other = [&](const char* model, const Fields& changed) {
        train::Trainer others(small_plan(small_model(model, changed), 1, {}), evaluating());
        return message([&] { train::load_megatron_weights(others, made("qwen3")); });
    };
    CHECK(mentions(other("llama", {}), "the plan's model needs") + mentions(other("llama", {}), "is missing") > 0);
    CHECK(mentions(other("mixtral", {{"head_dim", "8"}, {"intermediate_size", "16"}}),
                   "_layernorm.weight belongs to no parameter"));
    CHECK(mentions(other("deepseek3", {}), "is missing, which model.layers.0."));
    std::string copy = copied(folder, "qwen3");
    const std::string part = first_part(copy);
    const std::string bytes = read_file(part);
    fs::remove(part);
    CHECK(mentions(refusal(copy), part));
    write_file(part, bytes.substr(0, bytes.size() / 2));
    CHECK(mentions(refusal(copy), part));
    write_file(part, std::string(bytes.size(), 'x'));
    CHECK(mentions(refusal(copy), "is no archive of torch.save"));
    copy = copied(folder, "qwen3");
    std::string metadata = read_file(copy + "/.metadata");
    write_file(copy + "/.metadata", metadata.substr(0, metadata.size() - 40));
    CHECK(mentions(refusal(copy), ".metadata: byte"));
    const std::size_t name = metadata.find("_StorageInfo");
    REQUIRE(name != std::string::npos);
    metadata.replace(name, 12, "_StorageEvil");
    write_file(copy + "/.metadata", metadata);
    CHECK(mentions(refusal(copy), "_StorageEvil, which is no part of such a file"));
    write_file(copy + "/metadata.json", std::string(R"({"sharded_backend": "zarr"})"));
    CHECK(mentions(refusal(copy), "only torch_dist is read"));
}

TEST_CASE("pickles: calls are values, and what is not allowed is named") {
    const auto read = [](const std::string& bytes, const std::set<std::string>& allowed) {
        return message([&] { weights::Pickle(bytes, "file", allowed); });
    };
    // os.system("true"), as an attack has it.
    const std::string attack = "\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.";
    CHECK(mentions(read(attack, {"torch.Size"}), "file: names os.system, which is no part of such a file"));
    CHECK(read(attack, {"os.system"}) == "no error");
    const weights::Pickle pickle(attack, "file", {"os.system"});
    CHECK(weights::is_object(pickle.root(), "os.system"));
    CHECK(pickle.root().items.at(0)->text == "true");
    for (std::size_t size = 0; size < attack.size(); ++size)
        CHECK(read(attack.substr(0, size), {"os.system"}) != "no error");
    CHECK(mentions(read("\x80\x04i.", {}), "opcode 105 is not read"));
    CHECK(mentions(read("\x80\x01N.", {}), "protocol 1"));
    const weights::Pickle numbers(
        std::string("\x80\x02(J\xff\xff\xff\xff\x8a\x02\x00\x01\x88N}X\x01\x00\x00\x00kK\x07st.", 26), "file", {});
    REQUIRE(numbers.root().items.size() == 5);
    CHECK(numbers.root().items[0]->integer == -1);
    CHECK(numbers.root().items[1]->integer == 256);
    CHECK(weights::field_of(*numbers.root().items[4], "k")->integer == 7);
}
