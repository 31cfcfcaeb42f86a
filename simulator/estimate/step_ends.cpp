// The first and the last ops of a rank's step, one behind the other on their streams.
#include "simulator/estimate/step_ends.hpp"

#include "planner/lower/passes/first_gradients.hpp"
#include "simulator/estimate/step_parts.hpp"

#include <algorithm>

namespace moe::estimate {

void begin_step(const plan::Plan& plan, const StepModel& model, RankState& rank) {
    double gathered = 0.0, computed = 0.0;
    const auto run = [&](double& stream, double seconds) {
        stream = std::max(stream, rank.clocks.host) + seconds;
        rank.clocks.host += model.step_launch;
    };
    const auto travel = [&](double& stream, double seconds) {
        run(stream, seconds);
        rank.collectives.emplace_back(stream - seconds, stream);
    };
    rank.gathered.resize(rank.buckets.size());
    rank.zeroed.resize(rank.buckets.size());
    const bool sets = passes::sets_first_gradients(plan);
    const auto early_zero = [&](std::size_t i) { return sets && rank.buckets[i]->staged; };
    passes::each_begin_op(rank.buckets.size(), early_zero, [&](std::size_t i, passes::StepWork work) {
        const BucketTime& bucket = *rank.buckets[i];
        const bool zeroes = work == passes::StepWork::zero, quantizes = work == passes::StepWork::quantize;
        const bool computes = (zeroes && !bucket.staged) || (quantizes && bucket.in_line);
        double& stream = computes ? computed : gathered;
        if (bucket[work] > 0.0)
            work == passes::StepWork::gather ? travel(stream, bucket[work]) : run(stream, bucket[work]);
        if (quantizes && bucket[work] > 0.0) rank.quantized = stream;
        if (!zeroes || early_zero(i)) rank.gathered[i] = gathered;
        if (zeroes) rank.zeroed[i] = bucket.staged ? gathered : 0.0;
        if (computes) rank.play.data += bucket[work];
    });
    rank.data_free = gathered;
    rank.clocks.device = rank.clocks.ring = computed;
}

double slow_down(const StepModel& model, RankState& rank, double seconds, double computes) {
    if (model.lost == 0.0) return 0.0;
    const double start = rank.clocks.device - seconds;
    while (!rank.collectives.empty() && rank.collectives.front().second <= start) rank.collectives.pop_front();
    const double longer = replay::slowed(rank.collectives, model.lost * computes, start, seconds);
    rank.clocks.device += longer;
    rank.clocks.ring += longer;
    return longer;
}

namespace {

// An op of the optimizer that needs something that is there at `ready`.
void optimize(const StepModel& model, RankState& rank, double ready, double seconds) {
    const double start = std::max(rank.clocks.device, ready), late = std::max(0.0, rank.clocks.host - start);
    rank.play.host += late;
    rank.play.optimizer += start + seconds - rank.clocks.device;
    rank.clocks.device = start + late + seconds;
    rank.clocks.host += model.step_launch;
}
// Offloaded states come from the host bucket by bucket, and go back behind their update.
void update(const StepModel& model, RankState& rank) {
    double copied = rank.clocks.device;
    const auto copy = [&](double ready, double seconds) {
        copied = std::max({copied, ready, rank.clocks.host}) + seconds;
        rank.clocks.host += model.step_launch;
    };
    std::vector<double> there(rank.buckets.size());
    double spread = rank.clocks.device;
    const auto is_muon = [&](std::size_t i) { return rank.buckets[i]->muon; };
    // What computes is slowed by updates on their way beside it.
    const auto compute = [&](double ready, double seconds) {
        optimize(model, rank, ready, seconds);
        rank.play.optimizer += slow_down(model, rank, seconds, 1.0);
    };
    passes::each_op_behind_norm(rank.buckets.size(), is_muon, [&](std::size_t i, passes::StepWork work) {
        const double seconds = (*rank.buckets[i])[work];
        if (work == passes::StepWork::update) return compute(there[i], seconds);
        if (seconds == 0.0) {
            if (work == passes::StepWork::fetch) there[i] = copied;
            return;
        }
        if (work == passes::StepWork::join) return optimize(model, rank, there[i], seconds);
        if (work == passes::StepWork::collect || work == passes::StepWork::orthogonalize)
            return compute(there[i], seconds);
        if (work == passes::StepWork::spread) {
            spread = there[i] = std::max({spread, rank.clocks.device, rank.clocks.host}) + seconds;
            rank.clocks.host += model.step_launch;
            rank.collectives.emplace_back(spread - seconds, spread);
            return;
        }
        copy(work == passes::StepWork::fetch ? copied : rank.clocks.device, seconds);
        if (work == passes::StepWork::fetch) there[i] = copied;
    });
    rank.play.optimizer += std::max(0.0, copied - rank.clocks.device);
    rank.clocks.device = std::max(rank.clocks.device, copied);
}

} // namespace

std::vector<RankPlay> finish_step(const plan::Plan& plan, const StepModel& model, std::vector<RankState>& ranks) {
    double meet = 0.0;
    std::vector<double> last;
    std::vector<double> ready;
    std::vector<double*> hosts;
    for (RankState& rank : ranks) {
        rank.play.issued = rank.clocks.host;
        ready.push_back(std::max(rank.clocks.device, rank.data_free));
        hosts.push_back(&rank.clocks.host);
    }
    const std::vector<double> tables = tables_added(model, ready, hosts);
    for (std::size_t r = 0; r < ranks.size(); ++r) {
        RankState& rank = ranks[r];
        last.push_back(rank.clocks.device);
        const double added = std::max(0.0, tables[r] - std::max(rank.clocks.device, rank.data_free));
        const bool loss = r + 1 == ranks.size();
        if (loss && plan.dp * plan.cp > 1) rank.clocks.host += model.step_launch;
        rank.play.data += std::max(0.0, rank.data_free - rank.clocks.device) + added;
        rank.clocks.device = std::max(rank.clocks.device, rank.data_free) + added;
        passes::each_op_before_norm(rank.buckets.size(), [&](std::size_t i, passes::StepWork work) {
            optimize(model, rank, 0.0, (*rank.buckets[i])[work]);
        });
        rank.play.optimizer += model.norm;
        meet = std::max({meet, rank.clocks.device, rank.clocks.host});
    }
    std::vector<RankPlay> plays;
    for (std::size_t r = 0; r < ranks.size(); ++r) {
        RankState& rank = ranks[r];
        rank.clocks.device = meet + model.norm;
        if (plan.gpus > 1) rank.clocks.host += model.step_launch;
        update(model, rank);
        rank.play.end = rank.clocks.device;
        rank.play.closing = rank.play.end - last[r];
        plays.push_back(rank.play);
    }
    return plays;
}

} // namespace moe::estimate
