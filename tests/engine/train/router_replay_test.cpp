// Router replay: what routers chose under one plan is chosen again under any other, whatever they would choose now.
#include "engine/weights/safetensors.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/engine/train/random_cases.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>

using namespace moe;

namespace {

bool ends_with(const std::string& text, const std::string& end) {
    return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Routers that prefer the experts which they liked least.
void turn_routers(train::Trainer& trainer) {
    int turned = 0;
    for (const auto& [name, shape] : trainer.parameters()) {
        const bool gate = ends_with(name, ".gate.weight") || ends_with(name, ".router.weight");
        if (!gate) continue;
        std::vector<float> weight = trainer.read_weight(name);
        for (float& w : weight) w = -w;
        trainer.write_weight(name, weight);
        ++turned;
    }
    REQUIRE(turned > 0);
}

train::TrainOptions replay_options(const std::string& record, const std::string& replay) {
    train::TrainOptions options = three_steps();
    options.record_routing = record;
    options.replay_routing = replay;
    return options;
}

bool routes(const RandomCase& c) {
    for (const auto& [field, value] : c.plan)
        if (field == "balance") return false;
    const plan::Plan plan = plan_of(c);
    const auto expert = [&](int kind) { return plan.model->kinds[static_cast<std::size_t>(kind)].moe.has_value(); };
    return std::any_of(plan.model->layers.begin(), plan.model->layers.end(), expert);
}

std::string text_of(const Fields& fields) {
    std::string text;
    for (const auto& [field, value] : fields) text.append(field).append("=").append(value).append(" ");
    return text;
}

// A single expert whose weight is divided by itself weighs 1, whatever the router says of it.
bool weighs_by_logits(const plan::Plan& plan) {
    return std::any_of(plan.model->layers.begin(), plan.model->layers.end(), [&](int kind) {
        const std::optional<model::Moe>& moe = plan.model->kinds[static_cast<std::size_t>(kind)].moe;
        return moe && (moe->top_k > 1 || !(moe->router.normalize || moe->router.softmax_after_top_k));
    });
}

// What one rank recorded, and what it trains from there with the same routers and with turned ones.
struct Reference {
    Folder folder;
    std::string model;
    Trained recorded, turned;
};

void check_replay(Reference& reference, const plan::Plan& one, const plan::Plan& plan, const std::string& name) {
    const std::string original = reference.folder / "one";
    if (reference.model != name) {
        std::filesystem::remove_all(original);
        reference.model = name;
        reference.recorded = train_three(one, replay_options(original, ""));
        reference.turned = train_three(one, replay_options("", original), turn_routers);
        CHECK(reference.turned.routed == reference.recorded.routed);
        if (weighs_by_logits(one)) CHECK(reference.turned.losses != reference.recorded.losses);
        // The test would not notice that nothing is replayed, if turned routers chose as before.
        CHECK(train_three(one, three_steps(), turn_routers).routed != reference.recorded.routed);
    }
    const double of_weights = weight_tolerance(plan), underflow = moment_underflow(plan);
    const Trained same = train_three(plan, replay_options("", original));
    CHECK(disagreement(same, reference.recorded, parity_tolerance, of_weights, underflow) == "");
    CHECK(same.routed == reference.recorded.routed);
    const std::string again = reference.folder / "again";
    const Trained turned = train_three(plan, replay_options(again, original), turn_routers);
    CHECK(disagreement(turned, reference.turned, parity_tolerance, of_weights, underflow) == "");
    CHECK(turned.routed == reference.recorded.routed);
    for (int step = 1; step <= 3; ++step)
        CHECK(read_file(train::routing_file(again, step)) == read_file(train::routing_file(original, step)));
    std::filesystem::remove_all(again);
}

} // namespace

TEST_CASE("router replay: random plans train what one rank recorded, with its routers and with others") {
    const std::uint64_t seed = environment("MOE_PLAN_SEED", 5), plans = environment("MOE_PLAN_PLANS", draws(24));
    MESSAGE("seed ", seed, " (MOE_PLAN_SEED)");
    Reference reference;
    std::size_t replayed = 0;
    for (const RandomCase& c : random_cases(seed, 6 * plans, std::min<std::size_t>(4, plans))) {
        if (replayed == plans) break;
        if (!routes(c)) continue;
        INFO(c.text());
        const RandomCase one = one_rank_of(c);
        check_replay(reference, plan_of(one), plan_of(c), one.text());
        ++replayed;
    }
    CHECK(replayed == plans);
}

TEST_CASE("router replay: recomputed routers, steps that overflow, MTP, stages and every split of tokens") {
    Reference reference;
    const std::pair<const char*, std::vector<Fields>> models[] = {
        {"qwen3",
         {{{"recompute", "moe"}, {"ep", "4"}},
          {{"recompute", "full"}, {"tp", "2"}, {"cp", "2"}, {"mbs", "2"}},
          {{"capacity", "1"}, {"ep", "8"}},
          {{"capacity", "1"}, {"ep", "2"}, {"recompute", "moe"}},
          {{"pp", "4"}, {"schedule", "zero-bubble"}},
          {{"ep_overlap", "on"}, {"ep", "4"}, {"delay_wgrad", "on"}},
          {{"cp", "2"}, {"cp_comm", "alltoall"}, {"tp", "2"}, {"etp", "2"}, {"ep", "2"}}}},
        {"deepseek3-mtp", {{{"pp", "2"}, {"ep", "2"}, {"recompute", "full"}}, {{"tp", "4"}, {"ep", "8"}}}}};
    for (const auto& one : models)
        for (const Fields& fields : one.second) {
            const std::string model = one.first;
            INFO(model, " ", text_of(fields));
            check_replay(reference, small_plan(model, 1), small_plan(model, 8, fields), model);
        }
}

TEST_CASE("router replay: evaluations between steps route by themselves, and change no bit") {
    const Folder folder;
    const std::string original = folder / "one";
    const plan::Plan plan = small_plan("qwen3", 4, {{"tp", "2"}, {"ep", "2"}, {"capacity", "1"}});
    train_three(plan, replay_options(original, ""));
    const Trained alone = train_three(plan, replay_options("", original), turn_routers);
    train::TrainOptions options = replay_options("", original);
    options.evaluates = true;
    train::Trainer trainer(plan, options);
    turn_routers(trainer);
    train::Trainer natural(plan, [] {
        train::TrainOptions evaluates = three_steps();
        evaluates.evaluates = true;
        return evaluates;
    }());
    turn_routers(natural);
    const train::SampleSource source = made_up_samples(plan);
    CHECK(trainer.evaluate(source, 11).loss == natural.evaluate(source, 11).loss);
    for (const double loss : alone.losses) {
        CHECK(trainer.step(source).loss == loss);
        trainer.evaluate(source, 11);
    }
    for (const auto& [name, weight] : alone.weights) CHECK(trainer.read_weight(name) == weight);
}

TEST_CASE("router replay: a batch that grows") {
    const Folder folder;
    const std::string original = folder / "one", again = folder / "again";
    const auto run = [&](const Fields& fields, int ranks, const std::string& record, const std::string& replay) {
        train::TrainOptions options = replay_options(record, replay);
        options.steps = 5;
        options.ramp = train::batch_ramp("4,2,12");
        train::Trainer trainer(small_plan("qwen3", ranks, fields), options);
        turn_routers(trainer);
        std::vector<double> losses;
        for (int step = 0; step < 5; ++step) losses.push_back(trainer.step(made_up_tokens(61)).loss);
        return losses;
    };
    const std::vector<double> want = run({}, 1, original, ""), got = run({{"tp", "2"}}, 4, again, original);
    for (std::size_t i = 0; i < want.size(); ++i) CHECK(std::abs(got[i] / want[i] - 1.0) < parity_tolerance);
    for (int step = 1; step <= 5; ++step)
        CHECK(read_file(train::routing_file(again, step)) == read_file(train::routing_file(original, step)));
}

TEST_CASE("router replay: an arena holds the choices that are kept, and no more") {
    const Folder folder;
    const Fields fields{{"mbs", "2"}, {"ep", "2"}, {"capacity", "1"}};
    const train::Trainer plain(small_plan("qwen3", 2, fields), three_steps()),
        records(small_plan("qwen3", 2, fields), replay_options(folder / "one", ""));
    // 4 layers and 2 micro-batches of 64 tokens with 2 experts each.
    const double kept = 4.0 * 4 * 2 * 64 * 2 / (1 << 30);
    CHECK(records.arena_gib() > plain.arena_gib());
    CHECK(records.arena_gib() <= plain.arena_gib() + kept + 1e-12);
}

namespace {

// The refusal of a replay of three steps, which must come before anything has moved.
std::string refused(const plan::Plan& plan, const std::string& folder, std::uint64_t tokens = 7) {
    train::TrainOptions options = replay_options("", folder);
    try {
        train::Trainer trainer(plan, options);
        const train::Trainer untrained(plan, three_steps());
        try {
            trainer.step(made_up_tokens(61, tokens));
        } catch (const Error& error) {
            CHECK(error.fault() == Fault::bad_input);
            CHECK(trainer.steps_done() == 0);
            for (const auto& [name, shape] : trainer.parameters())
                CHECK(trainer.read_weight(name) == untrained.read_weight(name));
            return error.what();
        }
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "nothing";
}

void check_refused(const std::string& got, const std::string& words) {
    INFO(got);
    CHECK(got.find(words) != std::string::npos);
    CHECK(got.find('\n') == std::string::npos);
}

} // namespace

TEST_CASE("router replay: what does not fit is refused by file and field before a step is taken") {
    const Folder folder;
    const std::string original = folder / "one";
    const plan::Plan plan = small_plan("qwen3", 2, {{"ep", "2"}});
    train_three(plan, replay_options(original, ""));
    const auto model = [](const char* field, const char* value) {
        return small_plan(small_model("qwen3", {{field, value}}), 1, {});
    };
    const std::string first = "one/step-00000001.safetensors: ";
    check_refused(refused(model("num_hidden_layers", "5"), original),
                  first + "layers.4.routed_experts: is missing: the model has that layer");
    check_refused(refused(model("num_hidden_layers", "3"), original),
                  first + "layers.3.routed_experts: the model has no such layer of experts");
    check_refused(refused(model("num_experts", "16"), original), first + "layers.0.experts: 8 where this run has 16");
    check_refused(refused(model("num_experts_per_tok", "3"), original),
                  first + "layers.0.routed_experts: top-k 2 where this run has 3");
    check_refused(refused(small_plan(small_model("qwen3"), 1, {}, {16, 8}), original),
                  first + "layers.0.routed_experts: tokens of a sequence 32 where this run has 16");
    check_refused(refused(small_plan(small_model("qwen3"), 1, {}, {32, 4}), original),
                  first + "layers.0.routed_experts: samples 8 where this run has 4");
    check_refused(refused(plan, original, 8), first + "tokens_crc32c: ");
    check_refused(refused(plan, folder / "none"), "none/step-00000001.safetensors: is missing");
    check_refused(refused(small_plan("llama", 1), original), "has no routed experts");
    check_refused(refused(small_plan("qwen3", 1, {{"balance", "forced"}}), original),
                  "balance = forced chooses the experts itself");

    // A file that was changed by hand.
    const std::string file = train::routing_file(original, 2), third = train::routing_file(original, 3);
    const std::string whole = read_file(file);
    const auto change = [&](const std::string& from, const std::string& to) {
        std::string text = whole;
        const auto at = text.find(from);
        REQUIRE(at != std::string::npos);
        write_file(file, text.replace(at, from.size(), to));
    };
    change("\"step\":\"2\"", "\"step\":\"7\"");
    check_refused(refused(plan, original), "step-00000002.safetensors: step: 7 where this run has 2");
    change("\"I32\"", "\"F32\"");
    check_refused(refused(plan, original), "layers.0.routed_experts: dtype F32: must be I32");
    change("\"layers.0.experts\"", "\"layers.0.expertz\"");
    check_refused(refused(plan, original), "layers.0.experts: is missing: not a file of --record-routing");
    write_file(file, whole.substr(0, whole.size() - 8));
    check_refused(refused(plan, original), "step-00000002.safetensors: ");
    write_file(file, whole);
    std::filesystem::remove(third);
    check_refused(refused(plan, original), "step-00000003.safetensors: is missing");

    // Experts that there are not, and the same one twice, are found where the step is read.
    write_file(third, whole);
    for (const std::int32_t expert : {-1, 8}) {
        std::string text = read_file(train::routing_file(original, 1));
        std::int32_t other = 0;
        std::copy_n(text.end() - sizeof other, sizeof other, reinterpret_cast<char*>(&other));
        const std::int32_t wrong = expert < 0 ? other : expert;
        const std::string before = text;
        std::copy_n(reinterpret_cast<const char*>(&wrong), sizeof wrong,
                    text.end() - static_cast<std::ptrdiff_t>(2 * sizeof wrong));
        write_file(train::routing_file(original, 1), text);
        train::RoutedStep step{1, 8, 32, 0, {}};
        const weights::Safetensors stored(train::routing_file(original, 1));
        step.tokens_crc32c = static_cast<std::uint32_t>(std::stoul(stored.metadata().at("tokens_crc32c")));
        for (int layer = 0; layer < 4; ++layer) step.layers[layer] = {8, 2, {}};
        try {
            train::read_routing(original, step);
            FAIL_CHECK("read");
        } catch (const Error& error) {
            check_refused(error.what(), "layers.3.routed_experts: sample 7, token 31: expert ");
        }
        write_file(train::routing_file(original, 1), before);
    }
}
