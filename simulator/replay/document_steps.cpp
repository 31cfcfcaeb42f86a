// Draws samples of documents, and steps of samples.
#include "simulator/replay/document_steps.hpp"

#include "planner/model/document_lengths.hpp"
#include "planner/model/model.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>

namespace moe::replay {
namespace {

constexpr std::size_t pool_size = 4096; // samples that steps are made of
constexpr std::int64_t most_draws = 4'000'000;
constexpr int fewest_steps = 100, most_steps = 1000;

class Dice {
public:
    double uniform() { return static_cast<double>(random_() >> 11) * 0x1p-53; }
    std::size_t below(std::size_t n) { return static_cast<std::size_t>(uniform() * static_cast<double>(n)); }

private:
    std::mt19937_64 random_{1};
};

// Picks bins by weights.
class Picker {
public:
    explicit Picker(const std::vector<double>& weights) {
        double sum = 0.0;
        for (const double weight : weights) sums_.push_back(sum += weight);
    }
    std::size_t operator()(Dice& dice) const {
        const double at = dice.uniform() * sums_.back();
        const auto found = std::upper_bound(sums_.begin(), sums_.end() - 1, at);
        return static_cast<std::size_t>(found - sums_.begin());
    }

private:
    std::vector<double> sums_;
};

// Pairs of a document of l tokens of which each sees at most `window` (0: all before it).
double pairs_of(double l, double window) {
    if (window <= 0.0 || window >= l) return l * l / 2.0;
    return window * window / 2.0 + (l - window) * window;
}

// Shares of a sample's attention by window, 0 where there is none.
std::map<std::int64_t, double> window_shares(const plan::Plan& plan, const model::DocumentLengths& lengths) {
    std::map<std::int64_t, double> shares;
    double sum = 0.0;
    const auto add = [&](int kind) {
        const model::Attention& a = plan.model->kinds[static_cast<std::size_t>(kind)].attention;
        if (a.kind != model::AttentionKind::gqa && a.kind != model::AttentionKind::mla) return;
        const double cost = a.heads * static_cast<double>(a.qk_dim + a.v_dim) * keys_seen(a, plan.seq, &lengths);
        shares[a.window] += cost;
        sum += cost;
    };
    for (const int kind : plan.model->layers) add(kind);
    for (const int kind : plan.model->mtp) add(kind);
    for (auto& [window, share] : shares) share /= sum;
    return shares;
}

// The attention of samples over its mean: the first document is met at a place of its own, as a cut through all tokens
// meets it.
std::vector<double> drawn_samples(const plan::Plan& plan, const model::DocumentLengths& lengths, Dice& dice) {
    std::vector<double> documents, tokens;
    for (const model::DocumentLengths::Bin& bin : lengths.bins) {
        documents.push_back(bin.documents);
        tokens.push_back(bin.documents * static_cast<double>(bin.length));
    }
    const Picker of_documents(documents), of_tokens(tokens);
    const std::map<std::int64_t, double> shares = window_shares(plan, lengths);
    std::map<std::int64_t, std::vector<double>> pairs;
    const auto seq = static_cast<double>(plan.seq);
    for (std::size_t i = 0; i < pool_size; ++i) {
        for (const auto& [window, share] : shares) pairs[window].push_back(0.0);
        double rest = std::ceil(dice.uniform() * static_cast<double>(lengths.bins[of_tokens(dice)].length));
        for (double at = 0.0; at < seq;) {
            const double here = std::min(rest, seq - at);
            for (const auto& [window, share] : shares)
                pairs[window].back() += pairs_of(here, static_cast<double>(window));
            at += std::max(here, 1.0);
            rest = static_cast<double>(lengths.bins[of_documents(dice)].length);
        }
    }
    std::vector<double> samples(pool_size, 0.0);
    for (const auto& [window, all] : pairs) {
        double sum = 0.0;
        for (const double value : all) sum += value;
        for (std::size_t i = 0; i < pool_size; ++i)
            samples[i] += shares.at(window) * all[i] / sum * static_cast<double>(pool_size);
    }
    return samples;
}

} // namespace

std::optional<DocumentSteps> document_steps(const plan::Plan& plan, double core_seconds, double step_seconds) {
    const model::DocumentLengths lengths = plan.masked_lengths();
    if (lengths.bins.empty()) return std::nullopt;
    DocumentSteps result;
    result.mean_length = lengths.mean();
    result.pairs = lengths.keys_seen(plan.seq, 0) / (static_cast<double>(plan.seq) / 2.0);
    result.steps = static_cast<int>(std::clamp<std::int64_t>(most_draws / plan.gbs, fewest_steps, most_steps));
    Dice dice;
    const std::vector<double> samples = drawn_samples(plan, lengths, dice);
    const int together =
        std::clamp(plan.ep * plan.etp / (plan.tp * plan.cp), 1, plan.dp); // replicas that share experts
    std::vector<double> steps;
    for (int step = 0; step < result.steps; ++step) {
        double slowest = 0.0;
        for (int group = 0; group < plan.dp / together; ++group) {
            double sum = 0.0;
            for (int j = 0; j < plan.micro_batches(); ++j) {
                double most = 0.0;
                for (int replica = 0; replica < together; ++replica) {
                    double work = 0.0;
                    for (std::int64_t s = 0; s < plan.mbs; ++s) work += samples[dice.below(samples.size())];
                    most = std::max(most, work / static_cast<double>(plan.mbs));
                }
                sum += most - 1.0;
            }
            slowest = group == 0 ? sum : std::max(slowest, sum);
        }
        steps.push_back(step_seconds + core_seconds * slowest);
    }
    std::sort(steps.begin(), steps.end());
    const auto value = [&](double share) {
        return steps[static_cast<std::size_t>(share * static_cast<double>(steps.size() - 1))];
    };
    double sum = 0.0;
    for (const double seconds : steps) sum += seconds;
    result.step_seconds = {sum / static_cast<double>(steps.size()), value(0.5), value(0.99)};
    return result;
}

} // namespace moe::replay
