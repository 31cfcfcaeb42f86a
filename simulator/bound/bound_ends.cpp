// What gathers and reductions add to quotes: a step begins with the weights of each rank's first chunk, and ends with
// their gradients.
//
// The floor. What segments up to one need is gathered before that one's first forward ends; their gradients are reduced
// behind the backward of that one, since it precedes those of the segments before. A pipeline's chunk has one bucket
// for each group, whole before its first segment is through. Without a pipeline there are several, of unknown length:
// each segment counts as one, and takes its share of the time of all in one.
//
// Where they are hidden they slow down what computes (Beside). Of R seconds of reductions, all but those beside the N
// seconds of a backward that do not compute and the X behind it do so, and the backward and X become longer by
// lost * (R - N - X) + X, which is lost * (R - N) at least.
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "simulator/bound/bound_model.hpp"
#include "simulator/estimate/bucket_costs.hpp"
#include "simulator/estimate/step_parts.hpp"

#include <algorithm>
#include <tuple>

namespace moe {
namespace {

// Buckets of one group, and how many elements each segment of a part has in them.
struct Gathered {
    BucketSize all;
    std::vector<std::pair<int, std::int64_t>> parts;
};

} // namespace

std::vector<FastQuoter::Moved> FastQuoter::moved_of(const Plan& plan, const CostModel& costs, const StageShape& shape) {
    // What layers share with others counts nowhere.
    const bool shares = !plan.model->mtp.empty() || plan.model->tied_embeddings;
    std::vector<Gathered> gathered;
    for (std::size_t p = 0; p < shape.segments.size(); ++p) {
        const auto& [id, count] = shape.segments[p];
        if (is_mtp(id.kind) || (shares && id.kind != SegmentKind::layer)) continue;
        for (const BucketSize& b : sources_.segments.buckets(plan, id)) {
            auto it = std::find_if(gathered.begin(), gathered.end(), [&b](const Gathered& g) {
                return std::tie(g.all.group, g.all.weight_dtype) == std::tie(b.group, b.weight_dtype);
            });
            if (it == gathered.end()) {
                it = gathered.insert(it, {b, {}});
                it->all.elements = it->all.matrices = 0;
                it->all.group_size = group_size(plan, b.group);
            }
            it->all.elements += count * b.elements;
            it->parts.emplace_back(static_cast<int>(p), b.elements);
        }
    }
    std::vector<Moved> result;
    for (const Gathered& g : gathered) {
        const double quantize = seconds_of(costs, g.all, StepWork::quantize),
                     gather = seconds_of(costs, g.all, StepWork::gather) + quantize,
                     reduce = seconds_of(costs, g.all, StepWork::reduce);
        if (gather == 0.0) continue;
        if (plan.pp > 1) {
            result.push_back({g.parts.front().first, 1, gather, reduce, quantize});
            continue;
        }
        for (const auto& [part, elements] : g.parts) {
            const double share = static_cast<double>(elements) / static_cast<double>(g.all.elements);
            const int count = shape.segments[static_cast<std::size_t>(part)].second;
            const auto add = [&](int segments, double times) {
                result.push_back({part, segments, times * gather, times * reduce, times * quantize});
            };
            add(1, share);
            add(count, (count - 1) * share);
        }
    }
    std::sort(result.begin(), result.end(), [](const Moved& a, const Moved& b) {
        return std::tie(a.part, a.segments) < std::tie(b.part, b.segments);
    });
    return result;
}

void FastQuoter::add_ends(const Layers& layers, const Stages& stages, std::size_t stage, Chunk& chunk) {
    const std::vector<std::pair<int, int>>& parts = stages.parts[stage];
    constexpr auto compute = static_cast<std::size_t>(Stream::compute);
    const bool split = splits_backward(stages.plan.schedule);
    for (std::size_t s = 0; s < (split ? stream_count : compute + 1); ++s) {
        // As long as split_quote() and slots() take a segment's sides for.
        const auto seconds = [&](std::size_t part, std::size_t side) {
            const SideTerms& terms = layers.terms[static_cast<std::size_t>(parts[part].first)]->sides[side];
            const bool whole = !split || (s == compute && side == 0 && !layers.plan.ep_overlap);
            return whole ? terms.device : terms.busy[s];
        };
        double forward = 0.0, backward = 0.0; // seconds of the parts before
        double gathered = 0.0, reduced = 0.0, quantized = 0.0;
        double &opening = chunk.opening[s], &behind = chunk.behind[s];
        std::size_t part = 0;
        for (const Moved& moved : stages.moved[stage]) {
            for (; part < static_cast<std::size_t>(moved.part); ++part) {
                forward += parts[part].second * seconds(part, 0);
                backward += parts[part].second * seconds(part, 1);
            }
            gathered += moved.gather;
            reduced += moved.reduce;
            quantized += moved.quantize;
            opening = std::max(opening, gathered - forward - moved.segments * seconds(part, 0));
            behind = std::max(behind, reduced - backward - moved.segments * seconds(part, 1));
        }
        if (s != compute || stages.lost == 0.0) continue;
        double idle[2] = {0.0, 0.0};
        for (std::size_t p = 0; p < parts.size(); ++p)
            for (std::size_t side = 0; side < 2; ++side) {
                const Terms& terms = *layers.terms[static_cast<std::size_t>(parts[p].first)];
                idle[side] += parts[p].second * (seconds(p, side) - terms.sides[side].busy[compute]);
            }
        opening = std::max(opening, stages.lost * (gathered - quantized - idle[0]));
        behind = std::max(behind, stages.lost * (reduced - idle[1]));
    }
}

} // namespace moe
