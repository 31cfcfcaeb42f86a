// FSDP and HSDP: sharded weights train what one rank trains, in the memory that was planned, through checkpoints.
#include "engine/train/checkpoint_writer.hpp"
#include "engine/weights/checkpoint.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan_choices.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>

using namespace moe;

namespace {

struct Case {
    const char* model;
    int ranks;
    Fields fields;
};

std::string text(const Case& c) {
    std::string words = fmt::format("{} on {} ranks", c.model, c.ranks);
    for (const auto& [field, value] : c.fields) words.append(" ").append(field).append("=").append(value);
    return words;
}

plan::Plan sharded(const Case& c) {
    Fields fields{{"fsdp", "on"}};
    fields.insert(fields.end(), c.fields.begin(), c.fields.end());
    return small_plan(c.model, c.ranks, fields);
}

// The fields of what is trained.
plan::Plan one_rank(const Case& c) {
    constexpr std::array trained{"documents", "bias_update", "aux_loss", "load_balancing", "optimizer"};
    Fields fields;
    for (const auto& field : c.fields)
        if (std::find(trained.begin(), trained.end(), field.first) != trained.end()) fields.push_back(field);
    return small_plan(c.model, 1, fields);
}

std::int64_t class_bytes(const plan::Plan& plan, memory::MemoryClass of) {
    return memory::plan_memory(lower::lower(plan, 0)).class_bytes[static_cast<std::size_t>(of)];
}

void hold(const std::vector<Case>& cases) {
    for (const Case& c : cases) {
        CAPTURE(text(c));
        CHECK(disagreement(train_three(sharded(c)), train_three(one_rank(c)), parity_tolerance, parity_tolerance) ==
              "");
    }
}

double all_apart(const std::map<std::string, std::vector<float>>& got,
                 const std::map<std::string, std::vector<float>>& want) {
    std::vector<float> a, b;
    for (const auto& [name, values] : want) {
        a.insert(a.end(), got.at(name).begin(), got.at(name).end());
        b.insert(b.end(), values.begin(), values.end());
    }
    return relative_distance(a, b);
}

train::TrainOptions options() {
    train::TrainOptions o;
    o.steps = 4;
    o.eps = 1e-3; // see parity.cpp
    o.permits = 2;
    o.ema = 0.5;
    o.rules.freeze = {"embed*", "layers.1"};
    return o;
}

std::vector<double> losses(train::Trainer& trainer, int steps) {
    std::vector<double> list;
    const train::SampleSource source = made_up_samples(trainer.plan());
    for (int i = 0; i < steps; ++i) list.push_back(trainer.step(source).loss);
    return list;
}

} // namespace

TEST_CASE("FSDP trains dense and expert weights as one rank does, with and without expert parallelism") {
    hold({{"llama", 2, {}},
          {"llama", 4, {{"mbs", "2"}, {"recompute", "full"}}},
          {"llama", 4, {{"tp", "2"}}},
          {"llama", 4, {{"cp", "2"}}},
          {"qwen3", 4, {}},
          {"qwen3", 4, {{"ep", "2"}}},
          {"qwen3", 4, {{"ep", "4"}, {"dispatcher", "hybridep"}, {"delay_wgrad", "on"}}},
          {"mixtral", 4, {{"ep", "2"}, {"etp", "2"}, {"tp", "2"}}},
          {"gptoss", 4, {{"ep", "2"}, {"offload", "optimizer"}}},
          {"deepseek3", 4, {{"ep", "2"}, {"bias_update", "0.01"}}},
          {"deepseek3-mtp", 2, {{"documents", "mask"}}},
          {"qwen2", 2, {{"capacity", "1"}}}});
}

TEST_CASE("HSDP sums its copies' gradients and counts them once") {
    hold({{"llama", 4, {{"fsdp_replicas", "2"}}},
          {"llama", 4, {{"fsdp_replicas", "4"}}},
          {"llama", 8, {{"fsdp_replicas", "2"}, {"tp", "2"}, {"mbs", "2"}}},
          {"qwen3", 4, {{"fsdp_replicas", "2"}}},
          {"qwen3", 4, {{"fsdp_replicas", "2"}, {"ep", "2"}}},
          {"qwen3", 4, {{"fsdp_replicas", "2"}, {"ep", "4"}}},
          {"qwen3", 8, {{"fsdp_replicas", "2"}, {"ep", "2"}, {"rank_order", "dp-tp-cp-ep-pp"}}},
          {"deepseek3", 8, {{"fsdp_replicas", "2"}, {"ep", "2"}, {"cp", "2"}, {"bias_update", "0.01"}}}});
}

TEST_CASE("in a pipeline FSDP is the distributed optimizer, to the bit") {
    const plan::Plan plain = small_plan("qwen3", 4, {{"pp", "2"}});
    check_bits(train_three(sharded({"qwen3", 4, {{"pp", "2"}}})), train_three(plain));
}

TEST_CASE("a rank keeps its shards of the weights, in an arena of the planned size") {
    for (const Case& c : {Case{"llama", 4, {}}, Case{"qwen3", 4, {{"ep", "2"}}}}) {
        CAPTURE(text(c));
        const plan::Plan plan = sharded(c);
        plan::Plan whole = plan;
        whole.fsdp = false;
        const double share = static_cast<double>(class_bytes(plan, memory::MemoryClass::weights)) /
                             static_cast<double>(class_bytes(whole, memory::MemoryClass::weights));
        CHECK(share > 0.24); // experts of two ranks: half of theirs
        CHECK(share < (plan.ep > 1 ? 0.5 : 0.28));
        train::TrainOptions o;
        o.permits = 2;
        train::Trainer trainer(plan, o);
        losses(trainer, 1);
        CHECK(trainer.arena_gib() * (1 << 30) ==
              doctest::Approx(static_cast<double>(memory::plan_memory(lower::lower(plan, 0)).arena_bytes)));
        plan::Plan copies = plan;
        copies.fsdp_replicas = 2;
        CHECK(class_bytes(copies, memory::MemoryClass::weights) > class_bytes(plan, memory::MemoryClass::weights));
    }
}

TEST_CASE("a checkpoint of shards goes on under any plan, with frozen weights and an average, and back") {
    const std::vector<plan::Plan> plans{small_plan("qwen3", 1), sharded({"qwen3", 4, {{"ep", "2"}}}),
                                        sharded({"qwen3", 4, {{"fsdp_replicas", "2"}, {"ep", "2"}}}),
                                        small_plan("qwen3", 4, {{"pp", "2"}, {"ep", "2"}})};
    train::Trainer reference(plans.front(), options());
    const std::vector<double> want = losses(reference, 4);
    for (const plan::Plan& before : plans)
        for (const plan::Plan& after : plans) {
            CAPTURE(plan::plan_to_json(before).substr(0, 600));
            CAPTURE(plan::plan_to_json(after).substr(0, 600));
            const Folder folder;
            {
                train::Trainer trainer(before, options());
                losses(trainer, 2);
                train::CheckpointWriter writer(folder.path.string(), "-test");
                writer.save(trainer);
                writer.finish();
            }
            std::vector<std::string> skipped;
            const auto stored = weights::newest_checkpoint(folder.path.string(), skipped);
            REQUIRE(stored);
            train::Trainer trainer(after, options());
            trainer.restore(*stored);
            for (const double loss : {want[2], want[3]})
                CHECK(losses(trainer, 1).front() == doctest::Approx(loss).epsilon(1e-5));
            for (const auto& parameter : reference.parameters()) {
                const std::string& name = parameter.first;
                CAPTURE(name);
                CHECK(relative_distance(trainer.read_weight(name), reference.read_weight(name)) < 1e-5);
                CHECK(relative_distance(trainer.read_average(name), reference.read_average(name)) < 1e-5);
            }
        }
}

TEST_CASE("gradients of BF16 are summed in FP32 and lose what their reduction rounds") {
    for (const Case& c : {Case{"qwen3", 4, {{"ep", "2"}}}, Case{"llama", 4, {{"fsdp_replicas", "2"}}}})
        for (const bool fsdp : {false, true}) {
            CAPTURE(text(c));
            CAPTURE(fsdp);
            plan::Plan plan = sharded(c);
            plan.fsdp = fsdp;
            if (!plan.fsdp) plan.fsdp_replicas = 1;
            const Trained exact = train_three(plan);
            plan.gradients = machine::Precision::bf16;
            const Trained rounded = train_three(plan);
            const double apart = all_apart(rounded.gradients, exact.gradients);
            CHECK(apart > 1e-5);
            CHECK(apart < 1e-2); // of one rounding of 2^-9 and the sums'
            CHECK(rounded.losses.back() == doctest::Approx(exact.losses.back()).epsilon(1e-3));
        }
    // Nothing is reduced over one rank.
    plan::Plan alone = small_plan("qwen3", 1);
    const Trained exact = train_three(alone);
    alone.gradients = machine::Precision::bf16;
    check_bits(train_three(alone), exact);
}

TEST_CASE("what sharded weights exclude is refused by its field") {
    const auto refusal = [](const plan::Plan& plan) { return message([&] { train::Trainer trainer(plan, {}); }); };
    plan::Plan published = sharded({"llama", 2, {}});
    published.stack = "torchtitan";
    CHECK(mentions(refusal(published), "fsdp = on of stack \"torchtitan\" is not supported"));
    published.fsdp = false;
    published.gradients = machine::Precision::bf16;
    CHECK(mentions(refusal(published), "gradients = bf16 is not supported"));
    const plan::Plan fp8 = small_plan(wide_model("qwen3"), 2, {{"fsdp", "on"}, {"precision", "fp8-blockwise"}});
    CHECK(mentions(plan::check_executable(fp8).message, "fsdp = on is not supported with fp8-blockwise"));
    plan::Plan muon = sharded({"llama", 2, {}});
    muon.optimizer.muon = true;
    CHECK(mentions(refusal(muon), "optimizer = muon"));
    const auto copies = [](const Case& c, int replicas) {
        plan::Plan plan = sharded(c);
        plan.fsdp_replicas = replicas;
        return plan::check_plan(plan).message;
    };
    CHECK(mentions(copies({"llama", 4, {}}, 3), "fsdp_replicas = 3: dp = 4 is not divisible by it"));
    CHECK(mentions(copies({"qwen3", 8, {{"ep", "4"}}}, 4), "fsdp_replicas = 4: edp = 2 is neither 1"));
    CHECK(mentions(copies({"llama", 4, {{"pp", "2"}}}, 2), "needs fsdp = on without a pipeline, but pp = 2"));
    CHECK(mentions(copies({"llama", 4, {{"fsdp", "off"}}}, 2), "but fsdp = off"));
}
