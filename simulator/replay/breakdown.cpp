// Splits a rank's step into computing, exposed communication by axis, waiting for other stages, and waiting for the
// host.
#include "planner/program/program.hpp"
#include "simulator/replay/ranks.hpp"

#include <algorithm>
#include <array>

namespace moe::replay {
namespace {

// Exposed time goes to the first of these that is under way.
enum class Exposed { tensor, context, expert, data, optimizer, pipeline, none };

Exposed category(const program::Op& op) {
    if (op.module == program::Module::optimizer) return Exposed::optimizer;
    if (op.kind == program::OpKind::send || op.kind == program::OpKind::recv) return Exposed::pipeline;
    if (op.group.axes & plan::axis::any_data) return Exposed::data;
    if (op.group.domain == plan::Domain::expert) return Exposed::expert;
    if (op.group.axes & plan::axis::any_context) return Exposed::context;
    if (op.group.axes & plan::axis::any_tensor) return Exposed::tensor;
    return op.module == program::Module::data_parallel ? Exposed::data : Exposed::none;
}

struct Span {
    double start, end;
    Exposed what;
};

double& part(search::Breakdown& b, Exposed what) {
    switch (what) {
    case Exposed::tensor:
        return b.tensor;
    case Exposed::context:
        return b.context;
    case Exposed::expert:
        return b.expert;
    case Exposed::data:
        return b.data;
    case Exposed::optimizer:
        return b.optimizer;
    case Exposed::pipeline:
        return b.pipeline;
    case Exposed::none:
        break;
    }
    return b.bubble;
}

class Splitter {
public:
    Splitter(const RankRun& run) {
        for (std::size_t i = 0; i < run.rows.size(); ++i) {
            const program::TimelineRow& row = run.rows[i];
            const program::Op& op =
                run.program
                    ->templates[static_cast<std::size_t>(run.program->slots[static_cast<std::size_t>(row.slot)].index)]
                    .ops[static_cast<std::size_t>(row.op)];
            if (row.stream == program::Stream::compute && !program::is_communication(row.kind)) {
                computing_.push_back(i);
                continue;
            }
            // Waiting for a peer is not communication: only the time at work counts, at the end of the row.
            const double start = std::max(row.start, row.end - row.busy);
            if (row.end > start) spans_[static_cast<std::size_t>(row.stream)].push_back({start, row.end, category(op)});
        }
    }

    search::Breakdown split(const RankRun& run, double step_seconds) {
        search::Breakdown result;
        double now = 0.0;
        for (const std::size_t i : computing_) {
            const program::TimelineRow& row = run.rows[i];
            if (row.start > now) gap(result, now, row.start, run.host_bound[i] != 0);
            const double spent = row.end - std::max(row.start, now);
            if (row.module == program::Module::optimizer)
                result.optimizer += spent;
            else if (row.phase == program::Phase::recompute)
                result.recompute += spent;
            else if (row.module == program::Module::data_parallel)
                result.data += spent;
            else
                result.compute += spent;
            now = std::max(now, row.end);
        }
        if (step_seconds > now) gap(result, now, step_seconds, false);
        return result;
    }

private:
    // Nothing computes in [from, to): what else is under way?
    void gap(search::Breakdown& result, double from, double to, bool host) {
        inside_.clear();
        cuts_.assign({from, to});
        for (std::size_t s = 0; s < spans_.size(); ++s) {
            std::size_t& i = next_[s];
            while (i < spans_[s].size() && spans_[s][i].end <= from) ++i;
            for (std::size_t k = i; k < spans_[s].size() && spans_[s][k].start < to; ++k) {
                const Span span{std::max(from, spans_[s][k].start), std::min(to, spans_[s][k].end), spans_[s][k].what};
                inside_.push_back(span);
                cuts_.insert(cuts_.end(), {span.start, span.end});
            }
        }
        std::sort(cuts_.begin(), cuts_.end());
        for (std::size_t i = 0; i + 1 < cuts_.size(); ++i) {
            const double middle = 0.5 * (cuts_[i] + cuts_[i + 1]), length = cuts_[i + 1] - cuts_[i];
            Exposed what = Exposed::none;
            for (const Span& span : inside_)
                if (span.start <= middle && middle < span.end) what = std::min(what, span.what);
            if (what == Exposed::none && host)
                result.host += length;
            else
                part(result, what) += length;
        }
    }

    std::vector<std::size_t> computing_;
    std::array<std::vector<Span>, program::stream_count> spans_;
    std::array<std::size_t, program::stream_count> next_{};
    std::vector<Span> inside_; // scratch of gap(), as are its cuts
    std::vector<double> cuts_;
};

} // namespace

search::Breakdown breakdown_of(const plan::Plan&, const RankRun& run, double step_seconds) {
    return Splitter(run).split(run, step_seconds);
}

} // namespace moe::replay
