// Checkpoints: what is saved comes back under any plan, and what is damaged is named.
#include "engine/base/crc32c.hpp"
#include "engine/train/checkpoint_writer.hpp"
#include "engine/weights/checkpoint.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/samples.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <random>
#include <sstream>

using namespace moe;

namespace fs = std::filesystem;

namespace {

train::TrainOptions options() {
    train::TrainOptions o;
    o.steps = 6;
    o.lr = 1e-3;
    o.eps = 1e-3; // see parity_test.cpp
    o.schedule = train::LearningRate::cosine;
    o.permits = 2;
    return o;
}

std::vector<double> steps(train::Trainer& trainer, int count) {
    std::vector<double> losses;
    const train::SampleSource source = made_up_tokens(trainer.plan().model->vocab);
    for (int i = 0; i < count; ++i) losses.push_back(trainer.step(source).loss);
    return losses;
}

weights::Snapshot state_of(const train::Trainer& trainer) {
    weights::Snapshot snapshot;
    trainer.snapshot(snapshot);
    return snapshot;
}

void save(const train::Trainer& trainer, const std::string& folder) {
    train::CheckpointWriter writer(folder, "-test");
    writer.save(trainer);
    writer.finish();
    CHECK(writer.saved_step() == trainer.steps_done());
}

std::unique_ptr<weights::StoredCheckpoint> newest(const std::string& folder) {
    std::vector<std::string> skipped;
    auto found = weights::newest_checkpoint(folder, skipped);
    CHECK(skipped.empty());
    REQUIRE(found);
    return found;
}

using Fields = std::vector<std::pair<std::string, std::string>>;
struct Choice {
    int ranks;
    Fields fields;
};

std::string text(const Choice& choice) {
    std::ostringstream out;
    out << choice.ranks << " ranks";
    for (const auto& [field, value] : choice.fields) out << " " << field << "=" << value;
    return out.str();
}

const std::vector<Choice>& choices() {
    static const std::vector<Choice> all{
        {1, {}},
        {8, {{"ep", "8"}}},
        {4, {{"tp", "4"}, {"ep", "2"}, {"etp", "2"}}},
        {8, {{"tp", "2"}, {"ep", "4"}}},
        {8, {{"tp", "2"}, {"pp", "2"}, {"ep", "2"}, {"etp", "2"}}},
        {4, {{"pp", "4"}, {"schedule", "zero-bubble"}}},
        {4, {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "2"}}},
        {8, {{"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}, {"tp", "2"}}},
        {2, {{"mbs", "2"}}},
        {4, {{"fsdp", "on"}, {"ep", "2"}}},
        {4, {{"tp", "2"}, {"ep", "4"}, {"offload", "optimizer_step"}}},
        {8, {{"fsdp", "on"}, {"fsdp_replicas", "2"}, {"tp", "2"}}},
        {8, {{"rank_order", "ep-dp-tp-cp-pp"}, {"tp", "2"}, {"ep", "4"}, {"recompute", "full"}}},
    };
    return all;
}

// Damages one byte of a file.
void damage(const std::string& path, double where) {
    std::string bytes = read_file(path);
    char& byte = bytes[static_cast<std::size_t>(where * static_cast<double>(bytes.size() - 1))];
    byte = static_cast<char>(byte ^ 0x10);
    write_file(path, bytes);
}

} // namespace

TEST_CASE("CRC-32C: the check value of the polynomial, and RFC 3720's examples") {
    const std::string digits = "123456789", zeros(32, '\0'), ones(32, '\xff');
    CHECK(engine::crc32c(digits) == 0xe3069283u);
    CHECK(engine::crc32c(zeros) == 0x8a9136aau);
    CHECK(engine::crc32c(ones) == 0x62a8ab43u);
}

TEST_CASE("runs of elements are kept as repetitions") {
    std::vector<weights::Runs> runs;
    for (int row = 0; row < 100; ++row) weights::add_run(runs, row * 64 + 16, 8);
    weights::add_run(runs, 9000, 8);
    weights::add_run(runs, 9008, 4);
    REQUIRE(runs.size() == 3);
    CHECK(runs[0].repeat == 100);
    CHECK(runs[0].stride == 64);
}

TEST_CASE("the same plan goes on bit for bit") {
    const std::vector<Fields> optimizers{{},
                                         {{"optimizer", "adamw+fp8_exp_avg"}},
                                         {{"offload", "optimizer_step"}},
                                         {{"offload", "optimizer_step"}, {"optimizer", "adamw+fp8_exp_avg"}}};
    for (const Fields& optimizer : optimizers)
        for (const std::string precision : {"fp32", "bf16", "nvfp4"}) {
            const std::string model = precision == "fp32" ? "deepseek3" : "qwen3";
            CAPTURE(precision);
            const Folder folder;
            Fields fields{{"tp", "2"}, {"pp", "2"}, {"ep", "2"}, {"precision", precision}, {"input_jitter", "0.1"}};
            fields.insert(fields.end(), optimizer.begin(), optimizer.end());
            const plan::Plan plan = small_plan(model, 8, fields);
            train::Trainer whole(plan, options());
            steps(whole, 3);
            save(whole, folder / "c");
            const std::vector<double> expected = steps(whole, 3);
            train::Trainer resumed(plan, options());
            resumed.restore(*newest(folder / "c"));
            CHECK(resumed.steps_done() == 3);
            CHECK(steps(resumed, 3) == expected);
            const weights::Snapshot a = state_of(whole), b = state_of(resumed);
            for (std::size_t r = 0; r < a.ranks.size(); ++r)
                for (std::size_t i = 0; i < a.ranks[r].slices.size(); ++i)
                    CHECK(a.ranks[r].slices[i].values == b.ranks[r].slices[i].values);
        }
}

TEST_CASE("any plan goes on from any plan's checkpoint") {
    std::mt19937 random(7);
    const std::uint64_t pairs = environment("MOE_PLAN_PAIRS", draws(12)); // more than these: set it
    for (std::uint64_t pair = 0; pair < pairs; ++pair) {
        const Folder folder;
        const char* model = pair % 2 == 0 ? "qwen3" : "deepseek3";
        const Choice &from = choices()[random() % choices().size()], &to = choices()[random() % choices().size()];
        CAPTURE(model);
        CAPTURE(text(from));
        CAPTURE(text(to));
        const auto plan_of = [&](const Choice& choice) {
            Fields fields = choice.fields;
            if (pair % 3 == 0) fields.emplace_back("input_jitter", "0.1"); // noise goes by the step, under any plan
            return small_plan(model, choice.ranks, fields);
        };
        train::Trainer first(plan_of(from), options());
        steps(first, 2);
        save(first, folder / "c");
        const std::vector<double> expected = steps(first, 3);
        train::Trainer second(plan_of(to), options());
        const auto saved = newest(folder / "c");
        second.restore(*saved);
        // Weights as they were saved, to the bit, before any step.
        for (const auto& [name, shape] : first.parameters()) {
            std::vector<float> stored(static_cast<std::size_t>(shape.rows * shape.cols));
            saved->read(name, weights::StateKind::weight, 0, stored);
            CHECK(second.read_weight(name) == stored);
        }
        const std::vector<double> got = steps(second, 3);
        for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::abs(got[i] / expected[i] - 1.0) < 1e-5);
        for (const auto& [name, shape] : first.parameters())
            CHECK(relative_distance(second.read_weight(name), first.read_weight(name)) < 1e-5);
    }
}

TEST_CASE("tied embeddings are saved once, and both stages get them back") {
    const Folder folder;
    const auto tied = small_model("llama", {{"tie_word_embeddings", "true"}});
    train::Trainer first(small_plan(tied, 8, {{"pp", "2"}, {"tp", "2"}}), options());
    steps(first, 2);
    save(first, folder / "c");
    const std::vector<double> expected = steps(first, 2);
    train::Trainer same(small_plan(tied, 8, {{"pp", "2"}, {"tp", "2"}}), options()),
        one(small_plan(tied, 1, {}), options());
    same.restore(*newest(folder / "c"));
    CHECK(steps(same, 2) == expected);
    one.restore(*newest(folder / "c"));
    const std::vector<double> got = steps(one, 2);
    for (std::size_t i = 0; i < got.size(); ++i) CHECK(std::abs(got[i] / expected[i] - 1.0) < 1e-5);
}

TEST_CASE("another batch size goes on with the samples that are next") {
    const Folder folder;
    train::Trainer first(small_plan("llama", 2, {}), options());
    steps(first, 3);
    save(first, folder / "c");
    plan::Plan half = small_plan("llama", 2, {});
    half.gbs = 4;
    train::Trainer second(half, options());
    second.restore(*newest(folder / "c"));
    std::vector<std::int64_t> asked;
    second.step([&](std::int64_t sample, std::span<std::int32_t> tokens) {
        asked.push_back(sample);
        made_up_tokens(61)(sample, tokens);
    });
    CHECK(asked == std::vector<std::int64_t>{24, 25, 26, 27});
}

TEST_CASE("what is damaged is named and skipped") {
    const Folder folder;
    train::Trainer trainer(small_plan("llama", 4, {{"tp", "2"}}), options());
    for (int step = 0; step < 4; ++step) {
        steps(trainer, 1);
        save(trainer, folder / "c");
    }
    CHECK(weights::checkpoint_steps(folder / "c") == std::vector<std::int64_t>{4, 3, 2, 1});
    const auto shard = [&](int step) {
        return folder / ("c/" + weights::checkpoint_name(step) + "/rank-00001.safetensors");
    };
    damage(shard(4), 0.7); // in the data
    fs::resize_file(shard(3), fs::file_size(shard(3)) / 2);
    damage(folder / ("c/" + weights::checkpoint_name(2) + "/index.json"), 0.5);
    fs::create_directories(folder / "c/step-00000009.partial-1"); // of a run that was killed
    std::vector<std::string> skipped;
    const auto found = weights::newest_checkpoint(folder / "c", skipped);
    REQUIRE(found);
    CHECK(found->state().step == 1);
    REQUIRE(skipped.size() == 3);
    CHECK(mentions(skipped[0], "it is damaged"));
    CHECK(mentions(skipped[0], shard(4)));
    CHECK(mentions(skipped[1], shard(3)));
    CHECK(mentions(skipped[2], "index.json"));
    fs::remove(shard(1));
    CHECK(mentions(message([&] { weights::newest_checkpoint(folder / "c", skipped); }),
                   "none of its 4 checkpoints is whole"));
    weights::FolderLock(folder / "c").remove_partial_checkpoints();
    CHECK_FALSE(fs::exists(folder / "c/step-00000009.partial-1"));
    skipped.clear();
    CHECK(weights::newest_checkpoint(folder / "nothing", skipped) == nullptr);
}

TEST_CASE("every byte of a checkpoint counts") {
    const Folder folder;
    train::Trainer trainer(small_plan("llama", 2, {{"tp", "2"}}), options());
    steps(trainer, 1);
    save(trainer, folder / "c");
    const std::string path = folder / ("c/" + weights::checkpoint_name(1));
    std::mt19937 random(11);
    for (int i = 0; i < 40; ++i) {
        const std::string copy = folder / "copy";
        fs::remove_all(copy);
        fs::copy(path, copy);
        const char* file = i % 2 == 0 ? "rank-00000.safetensors" : "index.json";
        const double where = std::uniform_real_distribution<>(0.0, 1.0)(random);
        // Padding of the header and the line's end say nothing.
        const std::string bytes = read_file(copy + "/" + file);
        const char was = bytes[static_cast<std::size_t>(where * static_cast<double>(bytes.size() - 1))];
        if (was == ' ' || was == '\n') continue;
        damage(copy + "/" + file, where);
        CAPTURE(file);
        CAPTURE(where);
        CHECK_THROWS_AS(weights::StoredCheckpoint{copy}, Error);
    }
}

TEST_CASE("checkpoints of other models are refused") {
    const Folder folder;
    train::Trainer trainer(small_plan("llama", 1, {}), options());
    save(trainer, folder / "c");
    const auto stored = newest(folder / "c");
    train::Trainer other(small_plan("qwen3", 1, {}), options());
    CHECK(mentions(message([&] { other.restore(*stored); }), "holds no parameter"));
}

TEST_CASE("a checkpoint that cannot be written fails the run, not silently") {
    const Folder folder;
    train::Trainer trainer(small_plan("llama", 1, {}), options());
    write_file(folder / "file", "x");
    CHECK_THROWS_AS(train::CheckpointWriter(folder / "file", ""), Error);
    train::CheckpointWriter writer(folder / "c", "");
    fs::remove_all(folder / "c");
    write_file(folder / "c", "in the way");
    writer.save(trainer);
    CHECK_THROWS_AS(writer.finish(), Error);
    CHECK(writer.saved_step() == -1);
}
