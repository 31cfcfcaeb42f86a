// Checkpoints that Megatron-Core wrote have the losses that it computed with them; damaged and other ones are named.
#include "engine/train/megatron_weights.hpp"
#include "engine/weights/pickle.hpp"
#include "engine/weights/torch_dist.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/samples.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>
#include <vector>

using namespace moe;

namespace {

namespace fs = std::filesystem;

fs::path made() { return fs::path(profiles_folder()).parent_path() / "tests/engine/train/megatron/made"; }

// A folder of megatron/make.py, and what it says of the model in it.
struct Made {
    std::string folder;
    nlohmann::json described;
    std::shared_ptr<const model::Model> model() const {
        Fields changed;
        for (const auto& [field, value] : described.at("changed").items()) changed.emplace_back(field, value.dump());
        return small_model(described.at("model").get<std::string>(), changed);
    }
};

Made made(const std::string& name) {
    const fs::path folder = made() / name;
    return {folder.string(), nlohmann::json::parse(read_file((folder / "case.json").string()))};
}

// The committed ones, or those of the folder that MOE_PLAN_MEGATRON_MADE names.
std::vector<Made> all_made() {
    const char* other = std::getenv("MOE_PLAN_MEGATRON_MADE");
    std::set<fs::path> folders;
    for (const auto& entry : fs::directory_iterator(other != nullptr ? fs::path(other) : made()))
        folders.insert(entry.path());
    std::vector<Made> found;
    for (const fs::path& folder : folders)
        found.push_back({folder.string(), nlohmann::json::parse(read_file((folder / "case.json").string()))});
    return found;
}

// Element `index` of a weight by its name in transformers: that of values() in megatron/weights.py.
float value_of(const std::string& name, std::int64_t index) {
    std::uint64_t x = 14695981039346656037u;
    for (const char byte : name) x = (x ^ static_cast<unsigned char>(byte)) * 1099511628211u;
    x += static_cast<std::uint64_t>(index) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 31)) * 0xBF58476D1CE4E5B9u;
    const int step = static_cast<int>(x >> 56) - 128;
    return name.find("norm") != std::string::npos ? 1.0f + static_cast<float>(step >> 2) / 128.0f
                                                  : static_cast<float>(step) / 512.0f;
}

// The whole parameter. Of eh_proj ours are two halves of the columns.
std::vector<float> values_of(const std::string& name, const train::Trainer::Shape& shape) {
    const std::size_t half = name.find(".weight.");
    const std::int64_t first = name.ends_with(".hidden") ? shape.cols : 0,
                       stride = half == std::string::npos ? shape.cols : 2 * shape.cols;
    const std::string theirs = half == std::string::npos ? name : name.substr(0, half + 7);
    std::vector<float> values;
    for (std::int64_t row = 0; row < shape.rows; ++row)
        for (std::int64_t col = 0; col < shape.cols; ++col)
            values.push_back(value_of(theirs, row * stride + first + col));
    return values;
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

std::string copied(const Folder& folder, const std::string& name) {
    std::string copy = folder / name;
    fs::remove_all(copy);
    fs::copy(made() / name, copy);
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

TEST_CASE("megatron checkpoints: every weight to the bit, and the losses that Megatron-Core computed, under any plan") {
    std::size_t shards = 0;
    for (const Made& one : all_made()) {
        CAPTURE(one.folder);
        for (const auto& entry : fs::directory_iterator(one.folder)) shards += entry.path().extension() == ".distcp";
        std::vector<Fields> splits = {{}, {{"tp", "2"}, {"ep", "2"}}, {{"pp", "2"}}};
        if (!one.model()->mtp.empty()) splits.pop_back(); // three layers
        for (const Fields& split : splits) {
            const int ranks = split.empty() ? 1 : split.front().first == "tp" ? 4 : 2;
            CAPTURE(ranks);
            train::Trainer trainer(small_plan(one.model(), ranks, split), evaluating());
            const train::LoadReport report = train::load_megatron_weights(trainer, one.folder);
            CHECK(report.loaded == static_cast<std::int64_t>(trainer.parameters().size()));
            for (const auto& [name, shape] : trainer.parameters()) {
                const std::string held_name = name; // no structured binding can be captured
                CAPTURE(held_name);
                CHECK(trainer.read_weight(name) == values_of(name, shape));
            }
            if (!one.described.contains("loss")) continue; // of products that ask for a GPU
            const auto expected = one.described.at("loss").get<double>();
            CHECK(trainer.evaluate(tokens_of_make(), 8).loss == nearly(expected).epsilon(1e-5));
            const train::StepResult step = trainer.step(tokens_of_make());
            CHECK(step.loss == nearly(expected).epsilon(1e-5));
            if (one.described.contains("mtp_loss"))
                CHECK(step.mtp_loss == nearly(one.described.at("mtp_loss").get<double>()).epsilon(1e-5));
        }
    }
    if (std::getenv("MOE_PLAN_MEGATRON_MADE") == nullptr) CHECK(shards >= 10); // several ranks wrote the most of them
}

TEST_CASE("megatron checkpoints: what is missing, damaged or of another model is named, and nothing is changed") {
    const Folder folder;
    train::Trainer trainer(small_plan(made("qwen3").model(), 1, {}), evaluating());
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
        return message([&] { train::load_megatron_weights(others, made("qwen3").folder); });
    };
    CHECK(mentions(other("llama", {}), "the plan's model needs") + mentions(other("llama", {}), "is missing") > 0);
    CHECK(mentions(
        other("mixtral",
              {{"head_dim", "8"}, {"intermediate_size", "16"}, {"num_hidden_layers", "2"}, {"num_local_experts", "4"}}),
        "_layernorm.weight belongs to no parameter"));
    CHECK(mentions(other("deepseek3", {{"num_hidden_layers", "2"}}), "is missing, which model.layers.0."));
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

TEST_CASE("megatron checkpoints: a rank's file that is missing is named, and nothing is changed") {
    const Folder folder;
    train::Trainer trainer(small_plan(made("v3").model(), 1, {}), evaluating());
    const std::string last = "model.norm.weight", bias = "model.layers.1.mlp.gate.e_score_correction_bias";
    const std::vector<float> norm = trainer.read_weight(last), biases = trainer.read_weight(bias);
    int files = 0;
    for (const auto& entry : fs::directory_iterator(made() / "v3")) {
        if (entry.path().extension() != ".distcp") continue;
        const std::string copy = copied(folder, "v3"), gone = (fs::path(copy) / entry.path().filename()).string();
        fs::remove(gone);
        ++files;
        CHECK(mentions(message([&] { train::load_megatron_weights(trainer, copy); }), gone));
        CHECK(trainer.read_weight(last) == norm);
        CHECK(trainer.read_weight(bias) == biases);
    }
    CHECK(files == 8); // two of each rank
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
