// Muon: what one step does by its formula, the same training under any plan, its memory, its checkpoints.
#include "engine/train/checkpoint_writer.hpp"
#include "planner/base/error.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

using namespace moe;

namespace {

using Matrix = std::vector<double>;

Fields with_muon(Fields fields) {
    fields.emplace_back("optimizer", "muon");
    return fields;
}

Fields with(Fields fields, const Fields& more) {
    fields.insert(fields.end(), more.begin(), more.end());
    return fields;
}

train::TrainOptions options_of(int steps) {
    train::TrainOptions options;
    options.steps = steps;
    options.permits = 2;
    options.eps = 1e-3; // as in parity.cpp
    return options;
}

// Five iterations in double of X -> a X + b (X X^T) X + c (X X^T)^2 X on x over its norm.
Matrix orthogonalized(Matrix x, std::size_t rows, std::size_t cols, double eps) {
    double square = 0.0;
    for (const double v : x) square += v * v;
    for (double& v : x) v /= std::max(std::sqrt(square), eps);
    const auto times = [](const Matrix& a, const Matrix& b, std::size_t m, std::size_t k, std::size_t n) {
        Matrix c(m * n, 0.0);
        for (std::size_t i = 0; i < m; ++i)
            for (std::size_t l = 0; l < k; ++l)
                for (std::size_t j = 0; j < n; ++j) c[i * n + j] += a[i * k + l] * b[l * n + j];
        return c;
    };
    for (int step = 0; step < 5; ++step) {
        Matrix turned(x.size());
        for (std::size_t i = 0; i < rows; ++i)
            for (std::size_t j = 0; j < cols; ++j) turned[j * rows + i] = x[i * cols + j];
        const Matrix gram = times(x, turned, rows, cols, rows), first = times(gram, x, rows, rows, cols),
                     second = times(gram, first, rows, rows, cols);
        for (std::size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] - 4.7750 * first[i] + 2.0315 * second[i];
    }
    return x;
}

bool is_matrix(const std::string& name, std::int64_t rows, std::int64_t cols) {
    return rows > 1 && cols > 1 && name.find("embed") == std::string::npos && name.find("lm_head") == std::string::npos;
}

} // namespace

TEST_CASE("muon: a step is its formula for every matrix of layers, and AdamW's for all else") {
    for (const char* model : {"qwen3", "deepseek3"}) {
        train::TrainOptions options = options_of(2);
        options.clip = 0.0;
        train::Trainer muon(small_plan(model, 1, {{"optimizer", "muon"}}), options),
            adam(small_plan(model, 1), options);
        const train::SampleSource source = made_up_samples(muon.plan());
        std::map<std::string, std::vector<float>> before;
        for (const auto& [name, shape] : muon.parameters()) before[name] = muon.read_weight(name);
        muon.step(source);
        adam.step(source);
        const double lr = train::learning_rate(options, 0);
        int matrices = 0;
        for (const auto& [name, shape] : muon.parameters()) {
            const std::string held_name = name; // no structured binding can be captured
            CAPTURE(held_name);
            const std::vector<float> after = muon.read_weight(name), gradient = adam.read_gradient(name);
            if (!is_matrix(name, shape.rows, shape.cols)) {
                CHECK(after == adam.read_weight(name));
                continue;
            }
            ++matrices;
            Matrix update(gradient.begin(), gradient.end());
            for (double& v : update) v *= 1.95; // the gradient, and the momentum of Nesterov
            const Matrix o = orthogonalized(update, static_cast<std::size_t>(shape.rows),
                                            static_cast<std::size_t>(shape.cols), options.eps);
            const double scale = 0.2 * std::sqrt(static_cast<double>(std::max(shape.rows, shape.cols)));
            std::vector<float> want;
            for (std::size_t i = 0; i < o.size(); ++i) {
                const double w = before[name][i];
                want.push_back(static_cast<float>(w - lr * (scale * o[i] + options.weight_decay * w)));
            }
            CHECK(relative_distance(after, want) < 1e-5);
            CHECK(relative_distance(before[name], want) > 1e-3);
        }
        CHECK(matrices > 20);
    }
}

TEST_CASE("muon: any plan trains what one rank trains") {
    struct Case {
        const char* model;
        int ranks;
        Fields fields;
    };
    std::map<std::string, Trained> one;
    for (const Case& c : {Case{"qwen3", 4, {{"ep", "2"}}},
                          {"qwen3", 4, {{"tp", "2"}, {"ep", "2"}, {"etp", "2"}}},
                          {"qwen3", 8, {{"tp", "4"}, {"cp", "2"}, {"ep", "4"}}},
                          {"deepseek3", 8, {{"tp", "2"}, {"pp", "2"}, {"ep", "2"}}},
                          {"gptoss", 4, {{"tp", "2"}, {"etp", "2"}, {"offload", "optimizer"}}},
                          {"llama", 4, {{"pp", "2"}, {"schedule", "zb-v"}, {"vpp", "2"}}}}) {
        CAPTURE(c.model);
        CAPTURE(c.ranks);
        Trained& want = one[c.model];
        if (want.losses.empty()) want = train_three(small_plan(c.model, 1, {{"optimizer", "muon"}}));
        CHECK(disagreement(train_three(small_plan(c.model, c.ranks, with_muon(c.fields))), want, parity_tolerance,
                           parity_tolerance) == "");
    }
}

TEST_CASE("muon: blocks of FP8 are made of the masters that it moves, over shards and slices too") {
    const Fields fields{{"precision", "fp8-blockwise"}};
    const Trained one = train_three(small_plan(wide_model("qwen3"), 1, with_muon(fields))),
                  got = train_three(
                      small_plan(wide_model("qwen3"), 4, with_muon(with(fields, {{"tp", "2"}, {"ep", "2"}}))));
    for (std::size_t i = 0; i < one.losses.size(); ++i)
        CHECK(got.losses[i] == doctest::Approx(one.losses[i]).epsilon(1e-2));
    CHECK(one.losses.back() < one.losses.front());
}

TEST_CASE("muon: its matrices have one moment, and the place that Newton-Schulz works in is planned") {
    const Fields fields{{"tp", "2"}, {"ep", "2"}};
    const program::Program adam = lower::lower(small_plan("qwen3", 8, fields), 0),
                           muon = lower::lower(small_plan("qwen3", 8, with_muon(fields)), 0);
    std::int64_t matrices = 0, all = 0;
    for (const program::Bucket& b : muon.buckets) {
        CHECK((b.exp_avg_sq == program::no_tensor) == b.is_muon());
        (b.is_muon() ? matrices : all) += b.elements / b.group_size;
    }
    CHECK(matrices > all);
    const auto of = [](const program::Program& program, memory::MemoryClass memory_class) {
        return memory::plan_memory(program).class_bytes[static_cast<std::size_t>(memory_class)];
    };
    const std::int64_t less = of(adam, memory::MemoryClass::optimizer) - of(muon, memory::MemoryClass::optimizer);
    CHECK(less > 3 * matrices); // 4 bytes of each, but for what buckets are padded by
    CHECK(less < 5 * matrices);
    for (const program::Bucket& b : muon.buckets) {
        if (!b.is_muon()) continue;
        std::int64_t largest = 0;
        for (const program::Bucket::Muon::Matrix& m : b.muon.matrices) {
            largest = std::max(largest, m.rows * m.cols);
            CHECK(m.offset + (m.copies - 1) * m.stride + m.rows * m.cols <= b.elements);
        }
        CHECK(b.muon.halo == largest);
        CHECK(program::Tensor(muon.tensors[static_cast<std::size_t>(b.muon.work)]).elements() >=
              2 * b.muon.parts * largest);
    }
}

TEST_CASE("muon: a run that goes on from a checkpoint, under another plan too, is the run without a pause") {
    const Folder folder;
    const train::TrainOptions options = options_of(3);
    const plan::Plan plan = small_plan("qwen3", 2, with_muon({{"ep", "2"}}));
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
    CHECK(stored->state().muon);
    for (const auto& [name, shape] : stored->shapes())
        CHECK(shape.moments == (is_matrix(name, shape.rows, shape.cols) ? 1 : 2));
    std::vector<float> moment(4);
    CHECK(mentions(message([&] {
                       stored->read("model.layers.0.self_attn.q_proj.weight", weights::StateKind::exp_avg_sq, 0,
                                    moment);
                   }),
                   "holds one moment of "));
    train::Trainer other(small_plan("qwen3", 4, with_muon({{"tp", "2"}, {"ep", "2"}})), options);
    other.restore(*stored);
    other.step(source);
    for (const auto& [name, shape] : whole.parameters()) {
        const std::string held_name = name; // no structured binding can be captured
        CAPTURE(held_name);
        CHECK(relative_distance(other.read_weight(name), whole.read_weight(name)) <= parity_tolerance);
    }
    // AdamW takes the weights over, and begins the moments of matrices again.
    train::Trainer adam(small_plan("qwen3", 1), options);
    adam.restore(*stored);
    CHECK(std::isfinite(adam.step(source).loss));
}

TEST_CASE("muon: frozen matrices keep every bit, groups move by their rate") {
    train::TrainOptions options = options_of(2);
    options.rules.freeze = {"q_proj", "experts.0"};
    options.rules.groups = {train::rate_group("o_proj=0,decay=0")};
    train::Trainer trainer(small_plan("qwen3", 4, with_muon({{"tp", "2"}, {"ep", "2"}})), options);
    const train::SampleSource source = made_up_samples(trainer.plan());
    std::map<std::string, std::vector<float>> before;
    for (const auto& [name, shape] : trainer.parameters()) before[name] = trainer.read_weight(name);
    trainer.step(source);
    trainer.step(source);
    for (const auto& [name, values] : before) {
        const std::string held_name = name; // no structured binding can be captured
        CAPTURE(held_name);
        const bool still = options.rules.of(name).frozen || name.find("o_proj") != std::string::npos;
        CHECK((trainer.read_weight(name) == values) == still);
    }
}

TEST_CASE("muon is refused where it cannot be, by the field") {
    plan::Plan plan = small_plan("qwen3", 1);
    plan.optimizer = {plan::Moments::bf16, true};
    CHECK(mentions(plan::check_plan(plan).message, "optimizer = muon+bf16_moments"));
    CHECK_THROWS_WITH_AS(plan::set_field(plan, "optimizer", "muon+bf16_moments"), doctest::Contains("optimizer"),
                         Error);
}
