// Strings the segments of two chunks together as lanes of one unit and plays a few units behind each other.
#include "simulator/estimate/merged_slots.hpp"

#include "planner/lower/passes/merge.hpp"
#include "planner/model/model.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/replay/ranks.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <map>

namespace moe::estimate {
namespace {

constexpr int pairs = 3; // number of pairs behind each other; the last shows the steady state

// Neighbours have tensors of their own, so that the next layer's communication can begin under this one's computing.
// Only rings of context parallelism send what was there before; offloaded layers share their buffers.
int copies_of(const plan::Plan& plan) { return plan.cp > 1 && plan.offload == 0 ? 4 : 1; }

// Templates of a Program made of segments; layers of a kind take turns with a few pairs of templates.
class Lanes {
public:
    explicit Lanes(const cost::CostModel& model) : model_(model), copies_(copies_of(model.plan())) {
        program_.in_flight = {2 * pairs};
        for (program::TensorId& edge : edges_) edge = add_edge();
        for (int lane = 0; lane < 2; ++lane) {
            // A message is there when the lane begins; as communication it counts as the lane's first or last layer.
            arrivals_[lane] = add_message(lane, program::Stream::pipeline_in, {}, {edges_[lane]});
            departures_[lane] = add_message(lane, program::Stream::pipeline_out, {edges_[lane]}, {});
        }
    }

    std::vector<int> forward(const Segments& segments) {
        std::vector<int> lane;
        if (receives(segments)) lane.push_back(arrivals_[0]);
        for (const auto& [id, count] : as_they_run(segments))
            for (int i = 0; i < count; ++i) lane.push_back(add(id, i % copies_));
        if (sends(segments)) lane.push_back(departures_[0]);
        return lane;
    }
    std::vector<int> backward(const Segments& segments) {
        std::vector<int> lane;
        if (sends(segments)) lane.push_back(arrivals_[1]);
        const Segments order = as_they_run(segments);
        for (auto it = order.rbegin(); it != order.rend(); ++it)
            for (int i = it->second; i-- > 0;) lane.push_back(add(it->first, i % copies_) + 1);
        if (receives(segments)) lane.push_back(departures_[1]);
        return lane;
    }
    program::Program& program() { return program_; }
    const cost::ProgramCosts& costs() const { return costs_; }
    // A run of the slots in the Program, which the caller keeps alive. The host begins `lead` seconds before the
    // device.
    replay::RankRun play(const std::vector<replay::Unit>& units, double lead) const {
        replay::RankRun run;
        run.program = std::shared_ptr<const program::Program>(std::shared_ptr<const program::Program>(), &program_);
        run.costs = std::shared_ptr<const cost::ProgramCosts>(std::shared_ptr<const cost::ProgramCosts>(), &costs_);
        run.reuses = replay::reuses_in(model_.plan(), program_);
        run.contention = model_.contention_price();
        replay::play_segment(model_.stack(), run, units, {-lead, 0.0, 0.0});
        return run;
    }

private:
    // MTP follows the model's loss.
    static Segments as_they_run(Segments segments) {
        std::stable_partition(segments.begin(), segments.end(),
                              [](const auto& s) { return s.first.kind != lower::SegmentKind::mtp; });
        return segments;
    }
    static bool receives(const Segments& s) {
        return s.empty() || s.front().first.kind != lower::SegmentKind::embedding;
    }
    static bool sends(const Segments& s) { return s.empty() || !lower::is_head(s.back().first.kind); }

    // Adds the tensor that flows from segment to segment in one direction.
    program::TensorId add_edge() {
        program::Tensor tensor;
        tensor.chunk = 0;
        program_.tensors.push_back(std::move(tensor));
        return static_cast<program::TensorId>(program_.tensors.size() - 1);
    }
    int add_message(int lane, program::Stream stream, program::Operands in, program::Operands out) {
        program::Op op;
        op.kind = program::OpKind::send;
        op.stream = stream;
        op.layer = -1;
        op.in = std::move(in);
        op.out = std::move(out);
        op.attr = program::PeerAttr{};
        program_.templates.push_back(
            {lane == 0 ? plan::SlotKind::forward : plan::SlotKind::backward, 0, {std::move(op)}});
        costs_.push_back({cost::OpCost{}});
        return static_cast<int>(program_.templates.size()) - 1;
    }

    // Index of the segment's forward template; its backward follows.
    int add(SegmentId id, int copy) {
        const auto known = templates_.find({id, copy});
        if (known != templates_.end()) return known->second;
        program::Program segment = lower::lower_segment(model_.plan(), id.kind, id.layer_kind);
        cost::ProgramCosts costs = cost::price(model_, segment);
        const auto shift = static_cast<program::TensorId>(program_.tensors.size());
        const auto move = [shift](program::TensorId& tensor) {
            if (tensor != program::no_tensor) tensor += shift;
        };
        for (program::Tensor& tensor : segment.tensors) {
            move(tensor.base);
            move(tensor.again_of);
        }
        join_edges(segment, id.kind, shift);
        const int index = static_cast<int>(program_.templates.size());
        for (program::Template& tmpl : segment.templates)
            for (program::Op& op : tmpl.ops) {
                for (program::TensorId& tensor : op.in) move(tensor);
                for (program::TensorId& tensor : op.out) move(tensor);
            }
        std::move(segment.tensors.begin(), segment.tensors.end(), std::back_inserter(program_.tensors));
        std::move(segment.templates.begin(), segment.templates.end(), std::back_inserter(program_.templates));
        std::move(costs.begin(), costs.end(), std::back_inserter(costs_));
        return templates_[{id, copy}] = index;
    }

    // Makes a segment's input and output views of the edges. Bases are those of the whole Program already.
    void join_edges(program::Program& segment, lower::SegmentKind kind, program::TensorId shift) const {
        for (std::size_t lane = 0; lane < 2; ++lane) {
            join(segment, segment.io.segment_message(static_cast<int>(lane)), shift, edges_[lane]);
            // The loss ends the forward, the embedding's gradient the backward.
            const bool ends = lane == 0 ? lower::is_head(kind) || kind == lower::SegmentKind::mtp
                                        : kind == lower::SegmentKind::embedding;
            if (!ends) join(segment, last_hidden(segment, lane), shift, edges_[lane]);
        }
    }
    program::TensorId last_hidden(const program::Program& segment, std::size_t lane) const {
        const plan::Plan& plan = model_.plan();
        const std::vector<program::Op>& ops = segment.templates[lane].ops;
        for (auto op = ops.rbegin(); op != ops.rend(); ++op) {
            if (op->out.empty() || op->out.front() == program::no_tensor) continue;
            const program::Tensor& tensor = segment.tensors[static_cast<std::size_t>(op->out.front())];
            if (tensor.storage == program::Storage::activation && tensor.rows == plan.tokens_local() &&
                tensor.cols == plan.model->hidden)
                return op->out.front();
        }
        return program::no_tensor;
    }
    static void join(program::Program& segment, program::TensorId id, program::TensorId shift, program::TensorId edge) {
        if (id == program::no_tensor) return;
        const program::TensorId base = segment.tensors[static_cast<std::size_t>(id)].base;
        const program::TensorId root = base == program::no_tensor ? id + shift : base;
        if (root < shift) return; // The tensor is an edge already.
        for (program::Tensor& tensor : segment.tensors)
            if (tensor.base == root) tensor.base = edge;
        segment.tensors[static_cast<std::size_t>(root - shift)].base = edge;
    }

    const cost::CostModel& model_;
    int copies_;
    program::Program program_;
    cost::ProgramCosts costs_;
    std::map<std::pair<SegmentId, int>, int> templates_;
    program::TensorId edges_[2];
    int arrivals_[2], departures_[2];
};

// A lane's ops; every segment but the model's ends is a layer.
std::vector<passes::LayerOp> ops_of(const program::Program& program, const std::vector<int>& lane) {
    std::vector<passes::LayerOp> ops;
    int layer = 0;
    for (const int index : lane) {
        ++layer;
        for (const program::Op& op : program.templates[static_cast<std::size_t>(index)].ops)
            ops.push_back({&op, op.layer < 0 ? -1 : layer});
    }
    return ops;
}

// Pairs behind each other as slots of the Program, each of its own two micro-batches.
std::vector<replay::Unit> units_of_pairs(program::Program& program, const std::vector<int> (&lanes)[2], bool in_order) {
    std::vector<replay::Unit> units;
    std::vector<bool> second;
    if (in_order) second = passes::merged_order(program, ops_of(program, lanes[0]), ops_of(program, lanes[1]));
    program.slots.clear();
    for (int i = 0; i < pairs; ++i) {
        replay::Unit unit;
        for (int lane = 0; lane < 2; ++lane)
            for (const int index : lanes[lane]) {
                unit.lanes[lane].push_back(static_cast<int>(program.slots.size()));
                program.slots.push_back({index, 2 * i + lane});
            }
        unit.second = second;
        units.push_back(std::move(unit));
    }
    return units;
}

// The ends of both lanes of every pair.
struct Ends {
    double lanes[pairs][2] = {};
    double forward = std::numeric_limits<double>::infinity(); // begin of computing in the last pair, seconds
    double of(int pair) const { return std::max(lanes[pair][0], lanes[pair][1]); }
};

Ends ends_of(const replay::RankRun& run) {
    Ends ends;
    for (const program::TimelineRow& row : run.rows) {
        double& end = ends.lanes[row.micro_batch / 2][row.micro_batch % 2];
        end = std::max(end, row.end);
        if (row.micro_batch == 2 * (pairs - 1) && row.stream == program::Stream::compute)
            ends.forward = std::min(ends.forward, row.start);
    }
    return ends;
}

} // namespace

struct MergedPlayer::State {
    explicit State(const cost::CostModel& model) : lanes(model) {}
    Lanes lanes;
};

MergedPlayer::MergedPlayer(const cost::CostModel& model) : model_(model) {}
MergedPlayer::~MergedPlayer() = default;

MergedTime MergedPlayer::play(const Segments& forward, const Segments& backward) {
    if (!state_) state_ = std::make_unique<State>(model_);
    Lanes& lanes = state_->lanes;
    const std::vector<int> slots[2] = {lanes.forward(forward), lanes.backward(backward)};
    const std::vector<replay::Unit> units =
        units_of_pairs(lanes.program(), slots, replay::runs_in_arena(model_.plan()));
    const replay::RankRun ahead = lanes.play(units, replay::far_ahead);
    const Ends ends = ends_of(ahead);
    const double steady = (ends.of(pairs - 1) - ends.of(0)) / (pairs - 1);
    MergedTime time;
    for (int lane = 0; lane < 2; ++lane)
        for (const int t : slots[lane])
            for (const cost::OpCost& cost : lanes.costs()[static_cast<std::size_t>(t)]) {
                time.waits = time.waits || cost.waits_for_counts;
                time.issue += cost.host + (cost.waits_for_counts ? model_.stack().costs.sync_seconds : 0.0);
            }
    time.lead_after = ends.of(pairs - 1) - ahead.host_seconds;
    time.ahead = steady;
    time.together = steady;
    // A host that issues a pair in half of its time is never late.
    const double host = (ahead.host_seconds + replay::far_ahead) / pairs;
    if (time.waits || host > 0.5 * steady) {
        const double together = ends_of(lanes.play({units.front()}, 0.0)).of(0);
        time.together = together - std::max(0.0, ends.of(0) - steady);
        // A host that waits on the way has the lead of the pair before: only the first of these was far ahead.
        if (time.waits && together - std::max(0.0, time.lead_after) >= steady)
            time.ahead = std::min(steady, ends.of(0));
    }
    time.forward_end = ends.lanes[pairs - 1][0] - (pairs - 1) * steady;
    time.backward_end = ends.lanes[pairs - 1][1] - (pairs - 1) * steady;
    time.forward_start = std::max(0.0, ends.forward - (pairs - 1) * steady);
    return time;
}

} // namespace moe::estimate
