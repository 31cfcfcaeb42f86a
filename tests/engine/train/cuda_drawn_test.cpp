// Drawn plans over this machine's GPUs against the CPU back end: as many as MOE_PLAN_PLANS and MOE_PLAN_SECONDS allow,
// in turn over two GPUs and over 4, 8.. up to MOE_PLAN_GPUS.
#include "tests/engine/train/cuda_parity.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/engine/train/random_cases.hpp"
#include "tests/support/draws.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <cstdio>

using namespace moe;

namespace {

// Single tensors in BF16 may cancel to their rounding: all of them as one.
double apart_as_one(const std::map<std::string, std::vector<float>>& got,
                    const std::map<std::string, std::vector<float>>& expected) {
    double difference = 0.0, norm = 0.0;
    for (const auto& [name, values] : expected)
        for (std::size_t i = 0; i < values.size(); ++i) {
            const double want = values[i], d = got.at(name).at(i) - want;
            difference += d * d;
            norm += want * want;
        }
    return std::sqrt(difference / norm);
}

double margin(const plan::Plan& plan, const CudaResult& got, const CudaResult& expected) {
    if (plan.precision != machine::Precision::fp32) {
        // What BF16 rounds otherwise falls to the next value of an emulated format, a sixteenth or a fourth apart.
        const double gradients = plan.rounds_stochastically() ? 0.3 : plan.emulates(plan.precision) ? 0.1 : 2e-2;
        return std::max(apart_as_one(got.gradients, expected.gradients) / gradients,
                        apart_as_one(got.weights, expected.weights) / 2e-2);
    }
    // A single expert whose weight is normalized to 1 leaves its router a gradient of rounding errors, so that tensors
    // below a thousandth of the norm are held to that, as on the CPU.
    const Farthest worst = farthest(got, expected, 1e-3);
    return worst.distance / std::max(weight_tolerance(plan), 1e-4);
}

// The seconds of a run by where they went.
struct Seconds {
    double cpu = 0.0, gpus = 0.0;
};

// The distance of a plan's three steps from the CPU's, over the tolerance. seed: of the weights.
double judged(const RandomCase& c, bool replayed, std::uint64_t seed, Seconds& seconds) {
    plan::Plan plan = plan_of(c);
    const CudaResult expected = train_on(plan, "cpu", 3, seed);
    plan.cuda_graph = replayed ? plan::CudaGraph::full : plan::CudaGraph::none;
    const CudaResult got = train_on(plan, "cuda", 3, seed);
    seconds.cpu += expected.seconds;
    seconds.gpus += got.seconds;
    return margin(plan, got, expected);
}

// Cases in turn over every power of two of GPUs up to `most`.
std::vector<RandomCase> drawn_cases(std::uint64_t seed, std::size_t plans, int most) {
    std::vector<std::vector<RandomCase>> by_ranks;
    for (int ranks = 2; ranks <= most; ranks *= 2)
        by_ranks.push_back(random_cases(seed + by_ranks.size(), plans, 1, ranks));
    std::vector<RandomCase> out;
    for (std::size_t i = 0; i < plans; ++i) out.push_back(by_ranks[i % by_ranks.size()][i / by_ranks.size()]);
    return out;
}

} // namespace

TEST_CASE("cuda ranks: drawn plans train as on the CPU") {
    int ranks = 1;
    while (2 * ranks <= gpus_here()) ranks *= 2;
    ranks = static_cast<int>(environment("MOE_PLAN_GPUS", static_cast<std::uint64_t>(ranks)));
    if (ranks < 2 || !has_gpus(ranks)) return;
    const std::size_t plans = environment("MOE_PLAN_PLANS", 12);
    const double seconds = static_cast<double>(environment("MOE_PLAN_SECONDS", 600));
    const auto start = std::chrono::steady_clock::now();
    std::size_t done = 0, near_ties = 0;
    double worst = 0.0;
    Seconds spent;
    for (const RandomCase& c : drawn_cases(environment("MOE_PLAN_SEED", 1), plans, ranks)) {
        if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds) break;
        const bool replayed = done / 2 % 2 == 1;
        double apart = judged(c, replayed, 1, spent);
        // A copy that falls to another expert where two scores are equal up to rounding trains something else. With
        // other weights it does not happen again, while a wrong plan is wrong again.
        if (!(apart < 1.0)) {
            ++near_ties;
            INFO(c.text());
            CHECK((apart = judged(c, replayed, 2, spent)) < 1.0);
        }
        worst = std::max(worst, apart);
        ++done;
    }
    CHECK(near_ties <= 1 + done / 20);
    std::printf(
        "%zu drawn plans over %d GPUs, eager and as graphs in turn: farthest at %.3f of its tolerance, %zu near "
        "ties; %.1f s on the CPU, %.1f on GPUs\n",
        done, ranks, worst, near_ties, spent.cpu, spent.gpus);
}
