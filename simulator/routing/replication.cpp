// Bisects the load that ranks may have, and places copies for it greedily.
#include "simulator/routing/replication.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

namespace moe::routing {
namespace {

constexpr double tolerance = 0.01; // of the mean load: nearer to it is not worth more copies

// Tokens of one expert that a rank computes.
struct Instance {
    int expert = 0, rank = 0;
    double tokens = 0.0;
};

// Moves tokens until no rank has more than `limit`, or gives up.
class Placer {
public:
    Placer(const std::vector<double>& share, int ranks, int slots, int near)
        : near_(static_cast<std::size_t>(near)),
          local_(share.size() / static_cast<std::size_t>(ranks)),
          loads_(static_cast<std::size_t>(ranks), 0.0),
          free_(static_cast<std::size_t>(ranks), slots),
          sent_(static_cast<std::size_t>(ranks), 0),
          left_(share) {
        for (std::size_t e = 0; e < share.size(); ++e) loads_[e / local_] += share[e];
    }

    bool place(double limit) {
        std::vector<std::size_t> hot(loads_.size());
        std::iota(hot.begin(), hot.end(), std::size_t{0});
        std::stable_sort(hot.begin(), hot.end(),
                         [this](std::size_t a, std::size_t b) { return loads_[a] > loads_[b]; });
        for (const std::size_t rank : hot)
            if (loads_[rank] > limit && !relieve(rank, limit)) return false;
        return true;
    }

    Replicated result() const {
        Replicated r;
        r.loads = loads_;
        r.copies = static_cast<int>(copies_.size());
        r.most_sent = *std::max_element(sent_.begin(), sent_.end());
        r.spread = spread(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
        return r;
    }

private:
    bool relieve(std::size_t rank, double limit) {
        std::vector<std::size_t> experts(local_);
        std::iota(experts.begin(), experts.end(), rank * local_);
        std::stable_sort(experts.begin(), experts.end(),
                         [this](std::size_t a, std::size_t b) { return left_[a] > left_[b]; });
        for (const std::size_t expert : experts)
            while (loads_[rank] > limit && left_[expert] > 0.0) {
                const std::optional<std::size_t> to = roomiest(rank, expert, limit);
                if (!to) break; // another expert may still go where this one is
                const double tokens = std::min({loads_[rank] - limit, left_[expert], limit - loads_[*to]});
                copies_.push_back({static_cast<int>(expert), static_cast<int>(*to), tokens});
                loads_[rank] -= tokens;
                loads_[*to] += tokens;
                left_[expert] -= tokens;
                --free_[*to];
                ++sent_[rank];
            }
        return loads_[rank] <= limit * (1.0 + 1e-12);
    }

    // The least loaded rank near `rank` with a free slot and no copy of the expert yet.
    std::optional<std::size_t> roomiest(std::size_t rank, std::size_t expert, double limit) const {
        std::optional<std::size_t> best;
        const std::size_t first = rank / near_ * near_, last = std::min(first + near_, loads_.size());
        for (std::size_t r = first; r < last; ++r) {
            if (r == rank || free_[r] == 0 || loads_[r] >= limit || (best && loads_[r] >= loads_[*best])) continue;
            if (!holds(r, expert)) best = r;
        }
        return best;
    }

    bool holds(std::size_t rank, std::size_t expert) const {
        return std::any_of(copies_.begin(), copies_.end(), [&](const Instance& copy) {
            return copy.rank == static_cast<int>(rank) && copy.expert == static_cast<int>(expert);
        });
    }

    double spread(std::ptrdiff_t rank) const {
        std::vector<double> tokens(left_.begin() + rank * static_cast<std::ptrdiff_t>(local_),
                                   left_.begin() + (rank + 1) * static_cast<std::ptrdiff_t>(local_));
        for (const Instance& copy : copies_)
            if (copy.rank == rank) tokens.push_back(copy.tokens);
        const double mean = std::accumulate(tokens.begin(), tokens.end(), 0.0) / static_cast<double>(tokens.size());
        double squares = 0.0;
        for (const double t : tokens) squares += (t - mean) * (t - mean);
        return mean > 0.0 ? std::sqrt(squares / static_cast<double>(tokens.size())) / mean : 0.0;
    }

    std::size_t near_, local_;
    std::vector<double> loads_;
    std::vector<int> free_, sent_; // by rank: spare slots, copies that left it
    std::vector<double> left_;     // by expert: tokens that stay with it
    std::vector<Instance> copies_;
};

// The mean load of the run of ranks that has most: no copies bring its ranks below that.
double least_load(const std::vector<double>& loads, int near) {
    double least = 0.0;
    for (std::size_t first = 0; first < loads.size(); first += static_cast<std::size_t>(near)) {
        const auto begin = loads.begin() + static_cast<std::ptrdiff_t>(first);
        const auto end = begin + std::min<std::ptrdiff_t>(near, loads.end() - begin);
        least = std::max(least, std::accumulate(begin, end, 0.0) / static_cast<double>(end - begin));
    }
    return least;
}

} // namespace

Replicated replicate(const std::vector<double>& share, int ranks, int slots, int near) {
    const Placer plain(share, ranks, slots, near);
    Replicated best = plain.result();
    const double mean = std::accumulate(share.begin(), share.end(), 0.0) / ranks;
    const auto attempt = [&](double limit) {
        Placer placer = plain;
        if (!placer.place(limit)) return false;
        best = placer.result();
        return true;
    };
    double low = least_load(best.loads, near) + tolerance * mean;
    double high = *std::max_element(best.loads.begin(), best.loads.end());
    if (low >= high || attempt(low)) return best;
    while (high - low > tolerance * mean) {
        const double limit = 0.5 * (low + high);
        (attempt(limit) ? high : low) = limit;
    }
    return best;
}

ReplicatedLoads draw_replicated_loads(const plan::Routing& routing, int experts, int top_k, int ranks,
                                      const std::vector<std::vector<double>>& counts, int slots, int near) {
    ReplicatedLoads result;
    result.loads.ranks = ranks;
    double spread = 0.0;
    for (int draw = 0; draw < layer_draws; ++draw) {
        const Replicated layer = replicate(draw_shares(routing, experts, top_k, draw, counts), ranks, slots, near);
        const double scale = static_cast<double>(ranks) / top_k;
        for (const double load : layer.loads) result.loads.loads.push_back(static_cast<float>(load * scale));
        result.loads.hottest.push_back(
            static_cast<float>(*std::max_element(layer.loads.begin(), layer.loads.end()) * scale));
        spread += layer.spread / layer_draws;
        result.copies += static_cast<double>(layer.copies) / layer_draws;
        result.most_sent += static_cast<double>(layer.most_sent) / layer_draws;
    }
    result.loads.spread = spread;
    return result;
}

} // namespace moe::routing
