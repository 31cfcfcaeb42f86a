// Low-rank adapters: held to the merged model and its gradients, the same training under any plan, frozen weights to
// the bit, memory, checkpoints and exports.
#include "engine/train/checkpoint_writer.hpp"
#include "engine/train/huggingface.hpp"
#include "engine/train/initial_weights.hpp"
#include "engine/train/merge_adapters.hpp"
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/model.hpp"
#include "planner/program/program.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

using namespace moe;

namespace {

using Weights = std::map<std::string, std::vector<float>>;

Fields with_lora(const std::string& lora, Fields fields = {}) {
    fields.emplace_back("lora", lora);
    return fields;
}

train::TrainOptions options_of(int steps) {
    train::TrainOptions options;
    options.steps = steps;
    options.lr = 1e-3;
    options.permits = 2;
    options.eps = 1e-3; // as in parity.cpp
    return options;
}

Weights weights_of(const train::Trainer& trainer) {
    Weights all;
    for (const auto& [name, shape] : trainer.parameters()) all[name] = trainer.read_weight(name);
    return all;
}

// B is no longer zero, so that A has a gradient.
void fill_b(train::Trainer& trainer) {
    for (const auto& [name, shape] : trainer.parameters()) {
        if (!name.ends_with(".lora_B.weight")) continue;
        std::vector<float> values(static_cast<std::size_t>(shape.rows * shape.cols));
        for (std::size_t i = 0; i < values.size(); ++i)
            values[i] = 0.05f * std::sin(1.7f * static_cast<float>(i) + static_cast<float>(name.size()));
        trainer.write_weight(name, values);
    }
}

// A trainer without adapters whose weights are those of `from`, merged.
std::unique_ptr<train::Trainer> merged(const train::Trainer& from, const std::string& model) {
    auto plain = std::make_unique<train::Trainer>(small_plan(model, 1), options_of(1));
    std::map<std::string, train::Trainer::Shape> shapes = from.parameters();
    const train::WeightReader read = train::with_adapters_merged(
        from.plan().lora, shapes, [&](const std::string& name) { return from.read_weight(name); });
    REQUIRE(shapes.size() == plain->parameters().size());
    for (const auto& [name, shape] : shapes) plain->write_weight(name, read(name));
    return plain;
}

// scale * x [m, k] y [k, n], either turned first.
std::vector<float> product(const std::vector<float>& x, bool turn_x, const std::vector<float>& y, bool turn_y,
                           std::size_t m, std::size_t k, std::size_t n, double scale) {
    std::vector<float> out(m * n);
    for (std::size_t i = 0; i < m; ++i)
        for (std::size_t j = 0; j < n; ++j) {
            double sum = 0.0;
            for (std::size_t l = 0; l < k; ++l)
                sum += static_cast<double>(x[turn_x ? l * m + i : i * k + l]) *
                       static_cast<double>(y[turn_y ? j * k + l : l * n + j]);
            out[i * n + j] = static_cast<float>(scale * sum);
        }
    return out;
}

// The weights that an A stands beside: one, or those of the product whose name it bears.
std::vector<std::string> adapted_by(const std::string& a, const train::Trainer& trainer) {
    const std::string stem = a.substr(0, a.size() - std::string(".lora_A.weight").size());
    const std::size_t dot = stem.rfind('.') + 1;
    const std::string folder = stem.substr(0, dot), module = stem.substr(dot);
    std::vector<std::string> list;
    const std::vector<std::string> of_product =
        module == "linear_qkv"   ? std::vector<std::string>{"q_proj", "k_proj", "v_proj", "g_proj"}
        : module == "linear_fc1" ? std::vector<std::string>{"gate_proj", "up_proj", "w1", "w3"}
                                 : std::vector<std::string>{module};
    for (const std::string& one : of_product)
        if (trainer.parameters().count(folder + one + ".lora_B.weight") > 0) list.push_back(folder + one);
    return list;
}

} // namespace

TEST_CASE("lora: loss and gradients are those of the merged model, by the chain rule") {
    const std::vector<std::tuple<const char*, const char*, int, Fields>> cases{
        {"qwen3", "4:6", 1, {}},
        {"qwen3", "4:6", 8, {{"tp", "2"}, {"ep", "2"}, {"etp", "2"}}},
        {"deepseek3", "3:3", 4, {{"tp", "2"}, {"pp", "2"}}},
        {"deepseek2", "2:8", 2, {{"tp", "2"}, {"memory_efficient_permutation", "off"}}},
        {"gptoss", "4:2", 2, {{"ep", "2"}}},
        {"mixtral", "4:4", 2, {{"cp", "2"}}},
        {"llama", "5:5", 4, {{"tp", "4"}}},
    };
    for (const auto& [model, lora, ranks, fields] : cases) {
        const std::string held = fmt::format("{} {} on {}", model, lora, ranks);
        CAPTURE(held);
        const plan::Plan plan = small_plan(model, ranks, with_lora(lora, fields));
        train::Trainer trainer(plan, options_of(1));
        fill_b(trainer);
        const std::unique_ptr<train::Trainer> plain = merged(trainer, model);
        const Weights before = weights_of(trainer);
        const train::SampleSource source = made_up_samples(plan);
        const double want = plain->step(source).loss;
        CHECK(trainer.step(source).loss == doctest::Approx(want).epsilon(1e-6));
        int adapters = 0;
        for (const auto& [name, shape] : trainer.parameters()) {
            if (!name.ends_with(".lora_A.weight")) continue;
            const auto rank = static_cast<std::size_t>(plan.lora.rank), cols = static_cast<std::size_t>(shape.cols);
            std::vector<float> da(rank * cols, 0.0f);
            for (const std::string& weight : adapted_by(name, trainer)) {
                ++adapters;
                const std::vector<float> dw = plain->read_gradient(weight + ".weight");
                const std::size_t rows = dw.size() / cols;
                const std::vector<float> db =
                    product(dw, false, before.at(name), true, rows, cols, rank, plan.lora.scale());
                const std::string held_name = weight;
                CAPTURE(held_name);
                CHECK(relative_distance(trainer.read_gradient(weight + ".lora_B.weight"), db) <= 2e-5);
                const std::vector<float> share =
                    product(before.at(weight + ".lora_B.weight"), true, dw, false, rank, rows, cols, plan.lora.scale());
                std::transform(da.begin(), da.end(), share.begin(), da.begin(), std::plus<>());
            }
            const std::string held_name = name;
            CAPTURE(held_name);
            CHECK(relative_distance(trainer.read_gradient(name), da) <= 2e-5);
        }
        CHECK(adapters >= 4 * 4); // layers, and products of each
    }
}

TEST_CASE("lora: plans train adapters as one rank does, and everything else keeps every bit") {
    const std::vector<std::tuple<const char*, const char*, int, Fields>> cases{
        {"qwen3", "4", 4, {{"tp", "2"}, {"ep", "4"}}},
        {"qwen3", "4", 8, {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "4"}, {"cp", "2"}}},
        {"qwen2", "3:6:attention", 4, {{"pp", "2"}, {"schedule", "zero-bubble"}, {"tp", "2"}}},
        {"deepseek3-mtp", "2:2:dense+experts", 4, {{"pp", "2"}, {"ep", "2"}, {"recompute", "full"}}},
        {"deepseek3",
         "4:8",
         4,
         {{"pp", "2"}, {"schedule", "dualpipe-v"}, {"ep", "2"}, {"ep_overlap", "on"}, {"vpp", "2"}}},
        {"llama",
         "8:8:attention+dense",
         4,
         {{"cp", "2"}, {"cp_comm", "alltoall"}, {"offload", "optimizer+qkv_linear"}}},
        {"gptoss", "4:4", 4, {{"ep", "2"}, {"etp", "2"}, {"delay_wgrad", "on"}}},
    };
    for (const auto& [model, lora, ranks, fields] : cases) {
        const std::string held = fmt::format("{} {} on {}", model, lora, ranks);
        CAPTURE(held);
        const plan::Plan one = small_plan(model, 1, with_lora(lora));
        const Trained want = train_three(one);
        const Trained got = train_three(small_plan(model, ranks, with_lora(lora, fields)));
        CHECK(disagreement(got, want, parity_tolerance, parity_tolerance) == "");
        const Weights drawn = weights_of(train::Trainer(one, options_of(1)));
        std::size_t trained = 0;
        for (const auto& [name, values] : got.weights) {
            const std::string held_name = name; // no structured binding can be captured
            CAPTURE(held_name);
            CHECK((values == drawn.at(name)) == !train::is_adapter(name));
            trained += train::is_adapter(name) ? 1 : 0;
        }
        CHECK(trained == want.gradients.size());
    }
}

TEST_CASE("lora: without a change of B the model is the one that it was, with another draw for no weight") {
    const train::Trainer plain(small_plan("qwen3", 1), options_of(1)),
        adapted(small_plan("qwen3", 2, with_lora("4", {{"tp", "2"}})), options_of(1));
    for (const auto& [name, shape] : plain.parameters()) CHECK(plain.read_weight(name) == adapted.read_weight(name));
    for (const auto& [name, shape] : adapted.parameters()) {
        if (!train::is_adapter(name)) continue;
        const std::vector<float> values = adapted.read_weight(name);
        const bool zero = std::all_of(values.begin(), values.end(), [](float v) { return v == 0.0f; });
        CHECK(zero == name.ends_with(".lora_B.weight"));
    }
}

TEST_CASE("lora: frozen weights have neither gradients nor moments in the plan of memory") {
    for (const char* precision : {"fp32", "bf16"}) {
        const Fields fields{{"ep", "2"}, {"precision", precision}};
        const program::Program whole = lower::lower(small_plan("qwen3", 2, fields), 0),
                               adapted = lower::lower(small_plan("qwen3", 2, with_lora("2:2:attention", fields)), 0);
        std::int64_t trained = 0, frozen = 0;
        for (const program::Bucket& b : adapted.buckets) {
            (b.frozen ? frozen : trained) += b.elements;
            CHECK((b.gradients == program::no_tensor) == b.frozen);
            CHECK((b.exp_avg == program::no_tensor) == b.frozen);
        }
        CHECK(frozen > 10 * trained);
        const auto bytes = [](const program::Program& program, memory::MemoryClass of) {
            return memory::plan_memory(program).class_bytes[static_cast<std::size_t>(of)];
        };
        CHECK(bytes(adapted, memory::MemoryClass::gradients) * 10 < bytes(whole, memory::MemoryClass::gradients));
        CHECK(bytes(adapted, memory::MemoryClass::optimizer) * 10 < bytes(whole, memory::MemoryClass::optimizer));
        for (const program::Template& tmpl : adapted.templates) // a gradient of a frozen matrix is no product
            for (const program::Op& op : tmpl.ops)
                for (const program::TensorId id : op.out)
                    if (id != program::no_tensor &&
                        adapted.tensors[static_cast<std::size_t>(id)].storage == program::Storage::gradient)
                        CHECK(adapted.tensors[static_cast<std::size_t>(id)].elements() <= trained);
    }
    const Trained low = train_three(small_plan("qwen3", 2, with_lora("4", {{"tp", "2"}, {"precision", "bf16"}})));
    const Trained full = train_three(small_plan("qwen3", 1, with_lora("4")));
    for (std::size_t i = 0; i < full.losses.size(); ++i)
        CHECK(low.losses[i] == doctest::Approx(full.losses[i]).epsilon(2e-2));
}

TEST_CASE("lora: a checkpoint holds adapters with moments and frozen weights without, and goes on under another plan") {
    const Folder folder;
    const train::TrainOptions options = options_of(3);
    const plan::Plan plan = small_plan("qwen3", 2, with_lora("4:8", {{"ep", "2"}}));
    const train::SampleSource source = made_up_samples(plan);
    train::Trainer whole(plan, options);
    whole.step(source);
    train::CheckpointWriter writer(folder / "run", "test");
    writer.save(whole);
    writer.finish();
    whole.step(source);
    std::vector<std::string> skipped;
    const auto stored = weights::newest_checkpoint(folder / "run", skipped);
    REQUIRE(stored != nullptr);
    CHECK(stored->state().lora == "4:8:attention+dense+experts");
    for (const auto& [name, shape] : stored->shapes()) CHECK(shape.moments == (train::is_adapter(name) ? 2 : 0));
    std::vector<float> moment(4);
    CHECK(mentions(message([&] { stored->read("lm_head.weight", weights::StateKind::exp_avg, 0, moment); }),
                   "holds no moments of lm_head.weight"));
    train::Trainer other(small_plan("qwen3", 4, with_lora("4:8", {{"tp", "2"}, {"pp", "2"}})), options);
    other.restore(*stored);
    other.step(source);
    for (const auto& [name, weight] : weights_of(whole)) {
        const std::string held_name = name; // no structured binding can be captured
        CAPTURE(held_name);
        CHECK(relative_distance(other.read_weight(name), weight) <= parity_tolerance);
    }
    // A run without adapters does not take them for weights.
    train::Trainer plain(small_plan("qwen3", 1), options);
    CHECK(mentions(message([&] { train::load_weights(plain, *stored); }), "holds adapters of lora = 4:8"));
    train::Trainer larger(small_plan("qwen3", 1, with_lora("6:8")), options);
    CHECK(mentions(message([&] { larger.restore(*stored); }), "lora_A.weight is 4 x "));
}

TEST_CASE("lora: exports are merged, from ranks and from checkpoints, and adapters begin on imported weights") {
    const Folder folder;
    const plan::Plan plan = small_plan("deepseek3", 4, with_lora("4:8", {{"tp", "2"}, {"pp", "2"}}));
    train::Trainer trainer(plan, options_of(2));
    fill_b(trainer);
    const train::SampleSource source = made_up_samples(plan);
    trainer.step(source);
    train::export_weights(trainer, folder / "merged");
    {
        train::CheckpointWriter writer(folder / "run", "test");
        writer.save(trainer);
        writer.finish();
    }
    std::vector<std::string> skipped;
    train::export_weights(*weights::newest_checkpoint(folder / "run", skipped), folder / "again");
    train::Trainer plain(small_plan("deepseek3", 1), options_of(2)), again(small_plan("deepseek3", 1), options_of(2));
    CHECK(train::describe(train::load_weights(plain, folder / "merged")).empty());
    CHECK(train::describe(train::load_weights(again, folder / "again")).empty());
    CHECK(weights_of(plain) == weights_of(again));
    CHECK(weights_of(plain) == weights_of(*merged(trainer, "deepseek3")));
    CHECK(weights_of(plain).at("model.layers.1.self_attn.o_proj.weight") !=
          trainer.read_weight("model.layers.1.self_attn.o_proj.weight"));
    // The next step of the merged model has the loss of that of the adapters.
    train::Trainer next(small_plan("deepseek3", 2, with_lora("2", {{"ep", "2"}})), options_of(2));
    CHECK(train::load_weights(next, folder / "merged").loaded == static_cast<std::int64_t>(plain.parameters().size()));
    CHECK(next.step(source).loss == doctest::Approx(plain.step(source).loss).epsilon(1e-6));
}

TEST_CASE("lora: what it does not go with is refused by name") {
    const auto refused = [](const std::string& model, const std::string& lora, Fields fields, const char* why) {
        const std::string said = message([&] { small_plan(model, 2, with_lora(lora, std::move(fields))); });
        CAPTURE(said);
        CHECK(mentions(said, why));
    };
    refused("qwen3", "4", {{"optimizer", "muon"}}, "adapters are AdamW's");
    refused("qwen3", "4", {{"tp", "2"}, {"tp_overlap", "on"}}, "use tp_overlap = off");
    refused("deepseek3", "4", {{"bias_update", "0.1"}}, "the selection bias is frozen");
    refused("qwen3", "4:4:dense", {}, "has nothing to adapt there: use attention+experts");
    refused("llama", "4:4:experts", {}, "has nothing to adapt there: use attention+dense");
    refused("qwen3next", "4", {}, "has attention other than grouped queries and MLA");
    refused("qwen3", "0", {}, "lora=0: the rank must be a whole number from 1");
    refused("qwen3", "4:0", {}, "lora=4:0: alpha must be a number above 0");
    refused("qwen3", "4:1:mlp", {}, "lora target 'mlp' is unknown");
    refused("qwen3", "big", {}, "lora=big: must be none or RANK[:ALPHA[:TARGETS]]");
    train::TrainOptions options = options_of(1);
    options.ema = 0.9;
    CHECK(mentions(message([&] { train::Trainer(small_plan("qwen3", 1, with_lora("4")), options); }), "--ema 0.9"));
}
