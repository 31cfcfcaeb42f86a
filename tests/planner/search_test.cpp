// Search against brute force on small spaces with an analytic estimator: the best plans, every count, every refusal.
#include "planner/error.hpp"
#include "planner/schedule.hpp"
#include "planner/search.hpp"
#include "tests/planner/fault_of.hpp"
#include "tests/planner/sample_plans.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>
#include <set>
#include <tuple>

namespace {

using namespace moe;

constexpr double gib = 1024.0 * 1024.0 * 1024.0;

std::shared_ptr<Model> small_model() {
    std::shared_ptr<Model> model = small_moe_model(7);
    model->mtp = {0};
    return model;
}

std::shared_ptr<Hardware> small_hardware(double memory = 1.0 * gib) {
    auto hardware = std::make_shared<Hardware>();
    hardware->name = "box";
    hardware->peak_flops[static_cast<std::size_t>(Precision::fp32)] = 1e12;
    hardware->peak_flops[static_cast<std::size_t>(Precision::bf16)] = 2e12;
    hardware->memory_bytes = memory;
    return hardware;
}

Stack small_stack() {
    Stack stack;
    stack.name = "test";
    stack.precisions = {Precision::fp32, Precision::bf16};
    stack.dispatchers = {Dispatcher::alltoall};
    stack.cuda_graphs = {CudaGraph::none};
    stack.executable = true; // only what is named here
    stack.recompute_modules = recompute::full | recompute::layernorm | recompute::moe_act | recompute::core_attn;
    for (const unsigned norm : {0U, recompute::layernorm})
        for (const unsigned act : {0U, recompute::moe_act})
            for (const unsigned attn : {0U, recompute::core_attn}) stack.recompute_sets.push_back(norm | act | attn);
    stack.recompute_sets.push_back(recompute::full);
    stack.bf16_moments = true;
    return stack;
}

SearchRequest small_request(int gpus = 8, std::int64_t gbs = 32) {
    SearchRequest request;
    request.base.model = small_model();
    request.base.hardware = small_hardware();
    request.base.stack = "test";
    request.base.gpus = gpus;
    request.base.gbs = gbs;
    request.base.seq = 1024;
    request.threads = 1;
    return request;
}

// Additive costs with every tendency of the real ones: parallelism costs communication, small micro-batches waste the
// device, recompute trades time for memory, stages wait for the heaviest one.
class Analytic : public Estimator {
public:
    double memory_bytes(const Plan& plan) override {
        const std::vector<Stage> all = stages(plan);
        std::vector<double> bytes(static_cast<std::size_t>(plan.pp), 0.0);
        const double flight = plan.pp == 1 ? 1.0 : 1.0 + (plan.vpp > 1 ? (plan.pp - 1.0) / (plan.pp * plan.vpp) : 0.0);
        const double per_parameter = 6.0 + (plan.optimizer.bf16_moments ? 8.0 : 12.0) / (plan.dp * plan.cp);
        const double tokens = static_cast<double>(plan.tokens_local());
        for (std::size_t k = 0; k < all.size(); ++k) {
            const double layers = all[k].layers + all[k].mtp;
            const double weights = layers * (2e6 / plan.tp + 24e6 / (plan.ep * plan.etp)) + (all[k].loss ? 1e6 : 0.0);
            double saved = layers * tokens * 4e3 * flight * std::min(plan.pp, plan.micro_batches());
            if (plan.recompute == recompute::full)
                saved *= 0.1;
            else if (plan.recompute != 0)
                saved *= 0.6;
            bytes[k % bytes.size()] += weights * per_parameter + saved;
        }
        return *std::max_element(bytes.begin(), bytes.end());
    }

    Estimate estimate(const Plan& plan) override {
        ++calls;
        const std::vector<Stage> all = stages(plan);
        const std::vector<std::int64_t> weights = stage_weights(*plan.model, plan.seq, all);
        std::vector<double> ranks(static_cast<std::size_t>(plan.pp), 0.0);
        for (std::size_t k = 0; k < all.size(); ++k)
            ranks[k % ranks.size()] += static_cast<double>(weights[k]) / 1000.0;
        const double tokens = static_cast<double>(plan.tokens_local());
        const double m = plan.micro_batches();
        const double heaviest = *std::max_element(ranks.begin(), ranks.end());
        Estimate e;
        Breakdown& b = e.breakdown;
        b.compute = m * heaviest * (tokens * 1e-6 / (plan.precision == Precision::bf16 ? 2.0 : 1.0) + 1e-4 * plan.etp);
        b.tensor = m * heaviest * tokens * 1e-7 * (plan.tp - 1);
        b.context = m * heaviest * tokens * 3e-7 * (plan.cp - 1);
        b.expert = m * heaviest * tokens * 2e-7 * (1.0 - 1.0 / (plan.ep * plan.etp));
        const double share = plan.recompute == recompute::full ? 0.33 : plan.recompute != 0 ? 0.05 : 0.0;
        b.recompute = b.compute * share;
        b.bubble = (b.compute + b.tensor + b.context + b.expert + b.recompute) * (plan.pp - 1) / (m * plan.vpp);
        b.pipeline = 1e-5 * m * plan.vpp * (plan.pp - 1);
        b.data = 1e-3 * (1.0 - 1.0 / plan.dp);
        b.optimizer = (plan.optimizer.bf16_moments ? 1e-3 : 2e-3) / plan.dp;
        e.step_seconds =
            b.compute + b.tensor + b.context + b.expert + b.recompute + b.bubble + b.pipeline + b.data + b.optimizer;
        e.memory_bytes = memory_bytes(plan);
        return e;
    }

    std::atomic<int> calls{0};
};

bool divides(int part, int whole) { return whole % part == 0; }

std::vector<std::int64_t> micro_batches(const Plan& plan) {
    if (plan.gbs % plan.dp != 0) return {1};
    std::vector<std::int64_t> result;
    for (const std::int64_t mbs : {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128})
        if (plan.gbs / plan.dp % mbs == 0) result.push_back(mbs);
    return result;
}

// Calls visit(plan) for every point of the space, sound or not, by plain loops.
template <class Visit>
void every_plan(const SearchRequest& request, const Stack& stack, const Visit& visit) {
    const int n = request.base.gpus;
    const int layers = static_cast<int>(request.base.model->layers.size());
    Plan p = request.base;
    p.precision = Precision::bf16;
    for (p.pp = 1; p.pp <= n; ++p.pp)
        for (p.tp = 1; p.tp <= n; ++p.tp)
            for (p.cp = 1; p.cp <= n; ++p.cp)
                for (p.etp = 1; p.etp <= n; ++p.etp)
                    for (p.ep = 1; p.ep <= n; ++p.ep) {
                        if (!divides(p.pp * p.tp * p.cp, n) || !divides(p.pp * p.etp * p.ep, n)) continue;
                        p.dp = n / (p.pp * p.tp * p.cp);
                        p.edp = n / (p.pp * p.etp * p.ep);
                        const auto largest = [&](int vpp) { return (layers + p.pp * vpp - 1) / (p.pp * vpp); };
                        for (p.vpp = 1; p.vpp <= std::max(1, p.pp == 1 ? 1 : layers / p.pp); ++p.vpp) {
                            if (p.vpp > 1 && largest(p.vpp) == largest(p.vpp - 1)) continue; // the fewest chunks
                            for (const std::int64_t mbs : micro_batches(p)) {
                                p.mbs = mbs;
                                p.schedule = p.vpp > 1 ? ScheduleKind::interleaved : ScheduleKind::one_f_one_b;
                                std::vector<std::string> layouts{""};
                                const int units = layers + static_cast<int>(p.model->mtp.size()) + 1;
                                if (p.pp * p.vpp > 1 && p.pp * p.vpp <= units) {
                                    Plan even = p;
                                    even.layout.clear();
                                    const std::string text =
                                        layout_to_string(balanced_stages(*p.model, p.seq, p.pp * p.vpp));
                                    if (p.pp * p.vpp > layers || text != layout_to_string(stages(even)))
                                        layouts.push_back(text);
                                }
                                for (const std::string& layout : layouts)
                                    for (const unsigned set : stack.recompute_sets)
                                        for (const bool bf16 : {true, false}) {
                                            p.layout = layout;
                                            p.recompute = set;
                                            p.optimizer.bf16_moments = bf16;
                                            visit(p);
                                        }
                            }
                        }
                    }
}

std::string text_of(const Plan& p) {
    return fmt::format("pp{} vpp{} tp{} cp{} dp{} etp{} ep{} edp{} mbs{} rec{} {} {}", p.pp, p.vpp, p.tp, p.cp, p.dp,
                       p.etp, p.ep, p.edp, p.mbs, recompute::to_string(p.recompute), p.optimizer.bf16_moments,
                       p.layout);
}

struct Priced {
    Plan plan;
    double seconds;
};

// All plans that fit, fastest first; `total` counts all candidates.
std::vector<Priced> brute_force(const SearchRequest& request, const Stack& stack, std::int64_t& total) {
    Analytic estimator;
    std::vector<Priced> result;
    total = 0;
    every_plan(request, stack, [&](const Plan& plan) {
        ++total;
        if (check_plan(plan) || check_stack(plan, stack)) return;
        if (estimator.memory_bytes(plan) > plan.hardware->memory_bytes) return;
        result.push_back({plan, estimator.estimate(plan).step_seconds});
    });
    std::sort(result.begin(), result.end(), [](const Priced& a, const Priced& b) { return a.seconds < b.seconds; });
    return result;
}

// The best of each mapping.
std::vector<Priced> one_per_mapping(const std::vector<Priced>& all) {
    std::set<std::array<int, 6>> seen;
    std::vector<Priced> result;
    for (const Priced& p : all) {
        const Plan& m = p.plan;
        if (seen.insert({m.tp, m.cp, m.dp, m.pp, m.ep, m.etp}).second) result.push_back(p);
    }
    return result;
}

std::int64_t sum(const std::map<std::string, std::int64_t>& pruned) {
    std::int64_t total = 0;
    for (const auto& [reason, count] : pruned) {
        CAPTURE(reason);
        CHECK(count > 0);
        total += count;
    }
    return total;
}

void check_same(const SearchResult& result, const std::vector<Priced>& expected, std::size_t top) {
    REQUIRE(result.plans.size() == std::min(top, expected.size()));
    for (std::size_t i = 0; i < result.plans.size(); ++i) {
        CHECK(result.plans[i].second.step_seconds == doctest::Approx(expected[i].seconds).epsilon(1e-12));
        // Where two plans cost exactly the same, either may stand here.
        const bool tied = (i > 0 && expected[i - 1].seconds == expected[i].seconds) ||
                          (i + 1 < expected.size() && expected[i + 1].seconds == expected[i].seconds);
        if (!tied) CHECK(text_of(result.plans[i].first) == text_of(expected[i].plan));
    }
}

// Plans of one mapping that cost the same are many.
void check_same_times(const SearchResult& result, const std::vector<Priced>& expected, std::size_t top) {
    REQUIRE(result.plans.size() == std::min(top, expected.size()));
    for (std::size_t i = 0; i < result.plans.size(); ++i)
        CHECK(result.plans[i].second.step_seconds == doctest::Approx(expected[i].seconds).epsilon(1e-12));
}

std::vector<std::string> texts(const SearchResult& result) {
    std::vector<std::string> list;
    for (const auto& [plan, estimate] : result.plans)
        list.push_back(fmt::format("{} {:.17g}", text_of(plan), estimate.step_seconds));
    return list;
}

} // namespace

TEST_CASE("search: the exhaustive list equals brute force, and every candidate is counted once") {
    for (const auto& [gpus, gbs, memory] :
         {std::tuple(8, 32, 1.0), {8, 32, 0.45}, {6, 24, 0.6}, {12, 12, 1.0}, {1, 6, 4.0}}) {
        CAPTURE(gpus);
        CAPTURE(memory);
        SearchRequest request = small_request(gpus, gbs);
        request.base.hardware = small_hardware(memory * gib);
        request.exhaustive = request.similar = true;
        request.top = 20;
        const Stack stack = small_stack();
        std::int64_t total = 0;
        const std::vector<Priced> expected = brute_force(request, stack, total);
        REQUIRE(!expected.empty());
        Analytic estimator;
        const SearchResult result = search(request, stack, estimator);
        check_same(result, expected, 20);
        CHECK(result.evaluated == static_cast<std::int64_t>(expected.size()));
        CHECK(result.evaluated == estimator.calls);
        CHECK(result.evaluated + sum(result.pruned) == total);
    }
}

TEST_CASE("search: bounds and dominance lose no plan of the list and leave most candidates unpriced") {
    for (const auto& [gpus, gbs, memory] :
         {std::tuple(8, 32, 1.0), {8, 32, 0.45}, {8, 96, 0.6}, {6, 24, 0.6}, {16, 64, 0.3}}) {
        CAPTURE(gpus);
        CAPTURE(memory);
        SearchRequest request = small_request(gpus, gbs);
        request.base.hardware = small_hardware(memory * gib);
        request.top = 5;
        const Stack stack = small_stack();
        std::int64_t total = 0;
        const std::vector<Priced> all = brute_force(request, stack, total);
        REQUIRE(!all.empty());
        Analytic estimator;
        const SearchResult result = search(request, stack, estimator);
        check_same_times(result, one_per_mapping(all), 5);
        CHECK(result.evaluated + sum(result.pruned) == total);
        CHECK(result.evaluated < static_cast<std::int64_t>(all.size()) / 2);
        CHECK(result.priced < static_cast<std::int64_t>(all.size()) / 10);
        CHECK(result.pruned.count("dominated") == 1);
    }
}

TEST_CASE("search: the result does not depend on the number of threads") {
    SearchRequest request = small_request(16, 96);
    request.base.hardware = small_hardware(0.4 * gib);
    request.top = 7;
    Analytic estimator;
    const SearchResult one = search(request, small_stack(), estimator);
    for (const int threads : {2, 5, 0}) {
        request.threads = threads;
        const SearchResult several = search(request, small_stack(), estimator);
        CHECK(texts(several) == texts(one));
        CHECK(several.evaluated == one.evaluated);
        CHECK(several.pruned == one.pruned);
    }
}

TEST_CASE("search: pinned fields hold in every plan and shrink the space") {
    const std::vector<std::pair<std::string, std::string>> pins{
        {"tp", "2"},           {"pp", "2"},          {"vpp", "2"},
        {"ep", "4"},           {"etp", "1"},         {"cp", "1"},
        {"mbs", "2"},          {"schedule", "1f1b"}, {"recompute", "core_attn"},
        {"precision", "fp32"}, {"dp", "4"},          {"layout", "Ett|ttt|ttmL|"},
        {"optimizer", "adamw"}};
    Analytic estimator;
    SearchRequest free = small_request();
    const SearchResult open = search(free, small_stack(), estimator);
    const std::int64_t whole = open.evaluated + sum(open.pruned);
    for (const auto& [field, value] : pins) {
        if (field == "layout") continue; // below: the string must fit
        CAPTURE(field);
        SearchRequest request = small_request();
        request.fixed = {{field, value}};
        const SearchResult result = search(request, small_stack(), estimator);
        REQUIRE(!result.plans.empty());
        for (const auto& [plan, estimate] : result.plans) {
            Plan same = plan;
            set_field(same, field, value);
            CHECK(text_of(same) == text_of(plan));
            CHECK(same.precision == plan.precision);
            CHECK(same.schedule == plan.schedule);
        }
        // Cuts that are no use unless asked for are not in the open space.
        if (field != "precision" && field != "vpp") CHECK(result.evaluated + sum(result.pruned) < whole);
    }
    SearchRequest request = small_request();
    request.fixed = {{"layout", "Ett|tt|tt|tmL"}};
    const SearchResult result = search(request, small_stack(), estimator);
    for (const auto& [plan, estimate] : result.plans) {
        CHECK(plan.pp * plan.vpp == 4);
        CHECK(plan.layout == "Ett|tt|tt|tmL");
    }
}

TEST_CASE("search: several precisions are all explored") {
    SearchRequest request = small_request();
    request.precisions = {Precision::fp32, Precision::bf16};
    request.exhaustive = request.similar = true;
    request.top = 100000;
    Analytic estimator;
    std::set<Precision> seen;
    const SearchResult result = search(request, small_stack(), estimator);
    for (const auto& [plan, estimate] : result.plans) seen.insert(plan.precision);
    CHECK(seen.size() == 2);
    CHECK(result.plans.front().first.precision == Precision::bf16);
}

TEST_CASE("search: progress is reported from counts that never fall") {
    SearchRequest request = small_request(16, 96);
    request.exhaustive = true;
    std::int64_t last = 0;
    int calls = 0;
    request.progress = [&](std::int64_t evaluated, std::int64_t pruned) {
        CHECK(evaluated + pruned >= last);
        last = evaluated + pruned;
        ++calls;
    };
    Analytic estimator;
    const SearchResult result = search(request, small_stack(), estimator);
    CHECK(last <= result.evaluated + sum(result.pruned));
    CHECK(calls <= 1 + static_cast<int>(result.seconds * 10.0));
}

namespace {

// Has no price for context parallelism, and fails outright when told to.
class Partial : public Analytic {
public:
    bool broken = false;
    Estimate estimate(const Plan& plan) override {
        if (broken) fail("the disk is full");
        if (plan.cp > 1) refuse("cp {}: cannot be priced", plan.cp);
        return Analytic::estimate(plan);
    }
};

} // namespace

TEST_CASE("search: what the estimator refuses is counted, what it fails at is passed on") {
    SearchRequest request = small_request();
    request.exhaustive = true;
    Partial estimator;
    const SearchResult result = search(request, small_stack(), estimator);
    CHECK(result.pruned.at("not priced") > 0);
    for (const auto& [plan, estimate] : result.plans) CHECK(plan.cp == 1);
    estimator.broken = true;
    for (const int threads : {1, 3}) {
        request.threads = threads;
        CHECK(fault_of([&] { search(request, small_stack(), estimator); }) == "1: the disk is full");
    }
}

TEST_CASE("search: requests without a plan are refused in one line that names reason, numbers and remedy") {
    const auto refusal = [](const SearchRequest& request) {
        Analytic estimator;
        const std::string line = fault_of([&] { search(request, small_stack(), estimator); });
        CHECK(line.substr(0, 3) == "2: ");
        CHECK(line.find('\n') == std::string::npos);
        CHECK(line.size() < 600);
        return line;
    };
    const auto holds = [](const std::string& line, const std::string& words) {
        CAPTURE(line);
        CHECK(line.find(words) != std::string::npos);
    };
    SearchRequest request = small_request();
    request.base.hardware = small_hardware(0.12 * gib);
    const std::string memory = refusal(request);
    holds(memory, "no plan for 8 GPUs fits");
    holds(memory, "fail 'memory' (best needs ");
    holds(memory, "GiB of 0.1: tp ");
    holds(memory, "use ");
    holds(memory, " GPUs, or shorten --seq");

    // 11 ranks: TP, EP and CP cannot take a factor of 11, PP has more stages than layers, DP does not divide the batch.
    const std::string prime = refusal(small_request(11, 32));
    holds(prime, "no plan for 11 GPUs");
    holds(prime, "10 GPUs would do");

    request = small_request();
    request.fixed = {{"tp", "3"}};
    holds(refusal(request), "tp = 3 is fixed, which does not divide 8");
    request.fixed = {{"tp", "4"}, {"cp", "4"}};
    holds(refusal(request), "the fixed degrees (cp, tp) cannot all be part of");
    request.fixed = {{"tp", "8"}};
    holds(refusal(request), "num_key_value_heads = 4 is not divisible by tp = 8");
    // 12 GPUs: tp 3 fails more candidates, but the fixed ep is what nothing can get around.
    request = small_request(12, 48);
    request.fixed = {{"ep", "12"}};
    holds(refusal(request), "experts % ep");
    request = small_request();
    request.fixed = {{"layout", "Ett|L"}};
    holds(refusal(request), "holds 2 decoder layers (t), the model has 7");
    request.fixed = {{"layout", "Ett|q"}};
    holds(refusal(request), "unknown symbol 'q'");
    request.fixed = {{"tq", "8"}};
    holds(refusal(request), "unknown plan field 'tq'");
    request.fixed = {{"precision", "mxfp8"}};
    holds(refusal(request), "mxfp8: box cannot run it");
    request = small_request();
    request.top = 0;
    holds(refusal(request), "top 0");
    request = small_request();
    request.base.gbs = 0;
    holds(refusal(request), "gbs 0");
}
