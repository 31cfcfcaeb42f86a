// Plays Programs on GPUs: every op starts when its host has issued it, its stream is free and its tensors are ready.
#include "simulator/replay/contention.hpp"
#include "simulator/replay/op_steps.hpp"
#include "simulator/replay/ranks.hpp"

#include "planner/base/error.hpp"
#include "planner/stack/stack.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <unordered_map>

namespace moe::replay {

namespace {

constexpr double unknown = -1.0;

// Messages between stages and meetings of all stages, by what both sides know.
struct Exchange {
    std::unordered_map<std::int64_t, double> sent; // seconds of arrival by (stage, tag, micro-batch)
    struct Meeting {
        int arrived = 0;
        double ready = 0.0;
    };
    std::vector<Meeting> meetings; // collectives over the pipeline, in Program order
    int ranks = 1;

    static std::int64_t key(const program::PeerAttr& peer, int micro_batch) {
        return (static_cast<std::int64_t>(peer.stage) * 64 + peer.tag) << 32 | static_cast<std::int64_t>(micro_batch);
    }
};

class Device {
public:
    Device(const stack::Stack& stack, RankRun& run, std::vector<Unit> units, Exchange& exchange,
           const StreamClocks& start = {})
        : stack_(stack),
          run_(run),
          program_(*run.program),
          units_(std::move(units)),
          exchange_(exchange),
          contention_(run.contention),
          shared_steps_(run.steps ? run.steps : std::make_shared<const OpSteps>(*run.program, *run.costs)),
          steps_(*shared_steps_),
          host_(start.host) {
        written_.assign(steps_.size(), 0.0);
        read_.assign(steps_.size(), 0.0);
        std::fill(std::begin(stream_free_), std::end(stream_free_), start.device);
        for (const program::Stream s : {program::Stream::tensor, program::Stream::host})
            stream_free_[static_cast<std::size_t>(s)] = start.ring;
        for (std::size_t id = 0; id < program_.tensors.size(); ++id)
            if (is_buffer(program_.tensors[id]) && program_.tensors[id].base == program::no_tensor)
                read_[steps_.first_clock(id)] = start.ring;
        look_ahead();
        begin_unit();
        std::size_t rows = 0;
        for (const program::Slot& slot : program_.slots)
            rows += program_.templates[static_cast<std::size_t>(slot.index)].ops.size();
        run_.rows.reserve(rows);
        run_.host_bound.reserve(rows);
    }

    // Nothing reads or overwrites `tensor`, which is no view, before `when`.
    void delay(program::TensorId tensor, double when) {
        const auto id = static_cast<std::size_t>(tensor);
        std::fill_n(written_.begin() + static_cast<std::ptrdiff_t>(steps_.first_clock(id)), steps_.instances(id), when);
    }

    bool done() const { return unit_ == units_.size(); }

    // Goes on until the end (true) or until a message is missing. `guess`: go past a missing message in one lane with
    // the other lane's next op (once), which is what a device does that has not heard of the message yet.
    bool advance(bool guess) {
        bool moved = false;
        while (!done()) {
            const Unit& unit = units_[unit_];
            Candidate best;
            bool missing = false;
            const auto passed = static_cast<std::size_t>(position_[0].passed + position_[1].passed);
            for (int lane = 0; lane < 2; ++lane) {
                const bool turn = passed >= unit.second.size() || unit.second[passed] == (lane == 1);
                if (!turn || position_[lane].slot >= unit.lanes[lane].size()) continue;
                const Candidate c = candidate(lane);
                if (c.start == unknown)
                    missing = true;
                else if (!best.step || c.start < best.start || (c.start == best.start && preferred(lane)))
                    best = c;
            }
            if (missing && !(guess && best.step)) return moved;
            if (missing) guess = false;
            if (!best.step) {
                ++unit_;
                begin_unit();
                continue;
            }
            execute(best);
            moved = true;
        }
        return moved;
    }

    std::string waiting_for() const {
        for (int lane = 0; lane < 2; ++lane) {
            if (done() || position_[lane].slot >= units_[unit_].lanes[lane].size()) continue;
            const program::Slot& slot = program_.slots[slot_index(lane)];
            const program::Template& t = program_.templates[static_cast<std::size_t>(slot.index)];
            return fmt::format("rank {}: {} of chunk {} micro-batch {}, op {} ({})", run_.rank, plan::to_string(t.kind),
                               t.chunk, slot.micro_batch, position_[lane].op,
                               program::to_string(t.ops[position_[lane].op].kind));
        }
        return {};
    }

private:
    struct Position {
        std::size_t slot = 0, op = 0;
        double passed = 0.0, ops = 0.0, layers = 0.0; // passed: ops done; ops, layers: those of the whole lane
        std::vector<double> ended;                    // seconds at which ops of the slot ended, where memory is reused
        const program::Slot* in = nullptr;            // the slot that it is in, and its template
        std::size_t t = 0;
        const std::vector<OpSteps::Step>* steps = nullptr;
        std::vector<std::uint32_t> turns; // the slot's micro-batch modulo each of steps_.cycles()
    };
    struct Candidate {
        const OpSteps::Step* step = nullptr;
        int lane = 0;
        double start = 0.0, issue = 0.0, arrival = 0.0;
    };

    // Computing between an op and the next communication of its template, and the number of layers in a template.
    void look_ahead() {
        until_.resize(program_.templates.size());
        silent_from_.assign(program_.templates.size(), 0);
        layers_.assign(program_.templates.size(), 0);
        for (std::size_t t = 0; t < program_.templates.size(); ++t) {
            const std::vector<program::Op>& ops = program_.templates[t].ops;
            until_[t].assign(ops.size(), 0.0);
            double seconds = 0.0;
            for (std::size_t i = ops.size(); i-- > 0;) {
                seconds = program::is_communication(ops[i].kind) ? 0.0 : seconds + (*run_.costs)[t][i].device;
                until_[t][i] = seconds;
                if (program::is_communication(ops[i].kind) && silent_from_[t] == 0) silent_from_[t] = i + 1;
                if (i + 1 == ops.size() || ops[i].layer != ops[i + 1].layer) ++layers_[t];
            }
        }
    }
    static std::size_t index(const OpSteps::Clock& clock, const Position& position) {
        return static_cast<std::size_t>(clock.first) + position.turns[clock.cycle];
    }
    // Looks up what the ops of the slot that the lane has come to have in common.
    void enter_slot(int lane) {
        Position& position = position_[lane];
        position.op = 0;
        position.ended.clear();
        if (done() || position.slot >= units_[unit_].lanes[lane].size()) return;
        position.in = &program_.slots[slot_index(lane)];
        position.t = static_cast<std::size_t>(position.in->index);
        position.steps = &steps_.steps(position.t);
        const std::vector<int>& cycles = steps_.cycles();
        position.turns.resize(cycles.size());
        for (std::size_t i = 0; i < cycles.size(); ++i)
            position.turns[i] = static_cast<std::uint32_t>(position.in->micro_batch % cycles[i]);
    }
    const program::Op& op_at(const Position& position) const { return program_.templates[position.t].ops[position.op]; }
    std::int64_t message_of(const Position& position) const {
        return Exchange::key(std::get<program::PeerAttr>(op_at(position).attr), position.in->micro_batch);
    }
    std::size_t slot_index(int lane) const {
        return static_cast<std::size_t>(units_[unit_].lanes[lane][position_[lane].slot]);
    }

    Candidate candidate(int lane) {
        Position& position = position_[lane];
        if (position.steps->empty()) return next_slot(lane);
        const OpSteps::Step& step = (*position.steps)[position.op];
        Candidate c{&step, lane, 0.0, host_, 0.0};
        double inputs = 0.0;
        for (const OpSteps::Clock& clock : steps_.reads(step))
            inputs = std::max(inputs, written_[index(clock, position)]);
        if (step.cost.waits_for_counts) c.issue = std::max(host_, inputs) + stack_.costs.sync_seconds;
        double ready = std::max(inputs, stream_free_[static_cast<std::size_t>(step.row.stream)]);
        for (const OpSteps::Clock& clock : steps_.writes(step)) {
            const std::size_t i = index(clock, position);
            ready = std::max({ready, written_[i], read_[i]});
        }
        if (run_.reuses != nullptr)
            for (const int other : (*run_.reuses)[position.t][position.op])
                ready = std::max(ready, position.ended[static_cast<std::size_t>(other)]);
        c.start = std::max(ready, c.issue);
        if (step.receives) {
            const auto message = exchange_.sent.find(message_of(position));
            if (message == exchange_.sent.end()) return {&step, lane, unknown, 0.0, 0.0};
            c.arrival = message->second;
        } else if (step.meets) {
            if (!meet(c)) return {&step, lane, unknown, 0.0, 0.0};
        }
        return c;
    }
    // Both lanes could go on: the one that reaches its next communication sooner does, so that the links are busy as
    // early as possible, unless it is a layer ahead already: both should end together and hide each other to the end
    // (the merged schedule of arXiv 2603.07685 section 4.2.3 pairs layer by layer).
    bool preferred(int lane) const {
        const double ahead = progress(lane) - progress(1 - lane);
        if (std::abs(ahead) * std::max(1.0, position_[lane].layers) > 1.0) return ahead < 0.0;
        return until_communication(lane) < until_communication(1 - lane);
    }
    double until_communication(int lane) const {
        const std::vector<int>& slots = units_[unit_].lanes[lane];
        if (position_[lane].slot >= slots.size()) return std::numeric_limits<double>::infinity();
        double seconds = 0.0;
        std::size_t op = position_[lane].op;
        for (std::size_t i = position_[lane].slot; i < slots.size(); ++i, op = 0) {
            const std::size_t t = template_of(slots[i]);
            if (op < until_[t].size()) seconds += until_[t][op];
            if (op < silent_from_[t]) break;
        }
        return seconds;
    }
    std::size_t template_of(int slot) const {
        return static_cast<std::size_t>(program_.slots[static_cast<std::size_t>(slot)].index);
    }
    void begin_unit() {
        for (int lane = 0; lane < 2; ++lane) {
            Position& position = position_[lane];
            position.slot = 0;
            position.passed = position.ops = position.layers = 0.0;
            enter_slot(lane);
            if (done()) continue;
            bool outside = false; // of layers, at the end of the slots so far
            for (const int slot : units_[unit_].lanes[lane]) {
                const std::vector<program::Op>& ops = program_.templates[template_of(slot)].ops;
                position_[lane].ops += static_cast<double>(ops.size());
                position_[lane].layers += layers_[template_of(slot)];
                if (ops.empty()) continue;
                if (outside && ops.front().layer < 0) position_[lane].layers -= 1.0;
                outside = ops.back().layer < 0;
            }
        }
    }
    double progress(int lane) const {
        const Position& p = position_[lane];
        return p.slot >= units_[unit_].lanes[lane].size() ? 1.0 : p.passed / p.ops;
    }
    Candidate next_slot(int lane) {
        ++position_[lane].slot;
        enter_slot(lane);
        return position_[lane].slot < units_[unit_].lanes[lane].size() ? candidate(lane) : Candidate{};
    }

    // Collectives over all stages begin when the last stage has come.
    bool meet(Candidate& c) {
        if (exchange_.ranks == 1) return true;
        if (exchange_.meetings.size() <= meeting_) exchange_.meetings.resize(meeting_ + 1);
        Exchange::Meeting& meeting = exchange_.meetings[meeting_];
        if (!arrived_) {
            ++meeting.arrived;
            meeting.ready = std::max(meeting.ready, c.start);
            arrived_ = true;
        }
        if (meeting.arrived < exchange_.ranks) return false;
        c.arrival = meeting.ready;
        return true;
    }

    // Tokens on their way and a collective of tensor parallelism beside them share the links: each gets half while both
    // last. An op that has begun is not put off any more.
    double shared_seconds(const program::TimelineRow& op, double start, double seconds) const {
        const bool tokens = op.stream == program::Stream::expert;
        if (!program::is_communication(op.kind) || (!tokens && op.stream != program::Stream::tensor)) return 0.0;
        const double other =
            stream_free_[static_cast<std::size_t>(tokens ? program::Stream::tensor : program::Stream::expert)];
        return std::clamp(other - start, 0.0, seconds);
    }

    void execute(const Candidate& c) {
        Position& position = position_[c.lane];
        const OpSteps::Step& step = *c.step;
        const cost::OpCost& cost = step.cost;
        const bool merged = units_[unit_].merged();
        double busy = merged ? cost.merged : cost.device;
        if (run_.reuses != nullptr) busy += shared_seconds(step.row, c.start, busy);
        if (!run_.contention.none())
            busy += contention_.longer(program_, op_at(position), std::max(c.start, c.arrival), busy, merged);
        const double end = std::max(c.start, c.arrival) + busy;
        host_ = c.issue + cost.host;
        run_.host_seconds = host_;
        stream_free_[static_cast<std::size_t>(step.row.stream)] = end;
        for (const OpSteps::Clock& clock : steps_.reads(step)) {
            double& last = read_[index(clock, position)];
            last = std::max(last, end);
        }
        for (const OpSteps::Clock& clock : steps_.writes(step)) written_[index(clock, position)] = end;
        if (step.sends)
            exchange_.sent[message_of(position)] = end;
        else if (step.receives)
            exchange_.sent.erase(message_of(position));
        else if (step.meets)
            ++meeting_, arrived_ = false;
        record(c, end, busy);
        if (run_.reuses != nullptr) position.ended.push_back(end);
        position.passed += 1.0;
        if (++position.op == position.steps->size()) {
            ++position.slot;
            enter_slot(c.lane);
        }
    }

    void record(const Candidate& c, double end, double busy) {
        program::TimelineRow& row = run_.rows.emplace_back(c.step->row);
        row.rank = run_.rank;
        row.slot = static_cast<std::int32_t>(slot_index(c.lane));
        row.micro_batch = position_[c.lane].in->micro_batch;
        row.start = c.start;
        row.end = end;
        row.busy = busy;
        run_.host_bound.push_back(c.start == c.issue ? 1 : 0);
    }

    const stack::Stack& stack_;
    RankRun& run_;
    const program::Program& program_;
    std::vector<Unit> units_;
    Exchange& exchange_;
    Contention contention_;
    std::shared_ptr<const OpSteps> shared_steps_;
    const OpSteps& steps_;
    std::vector<double> written_, read_;
    std::vector<std::vector<double>> until_;
    std::vector<std::size_t> silent_from_; // first op that no communication follows, by template
    std::vector<int> layers_;
    double stream_free_[program::stream_count] = {};
    double host_;
    std::size_t unit_ = 0, meeting_ = 0;
    Position position_[2];
    bool arrived_ = false;
};

void play(std::vector<Device>& devices) {
    for (;;) {
        bool moved = false, all_done = true;
        for (Device& device : devices) {
            moved = device.advance(false) || moved;
            all_done = all_done && device.done();
        }
        if (all_done) return;
        if (moved) continue;
        for (Device& device : devices)
            if (!device.done() && (moved = device.advance(true))) break;
        if (moved) continue;
        std::string waits;
        for (const Device& device : devices)
            if (!device.done()) waits += (waits.empty() ? "" : "; ") + device.waiting_for();
        fail("the schedule deadlocks: {}", waits);
    }
}

} // namespace

void play_devices(const stack::Stack& stack, std::vector<RankRun>& runs) {
    Exchange exchange;
    exchange.ranks = static_cast<int>(runs.size());
    std::vector<Device> devices;
    devices.reserve(runs.size());
    for (RankRun& run : runs) devices.emplace_back(stack, run, units_of(*run.program, run.reuses != nullptr), exchange);
    play(devices);
}

void play_segment(const stack::Stack& stack, RankRun& run, const std::vector<Unit>& units, const StreamClocks& start,
                  program::TensorId late, double when) {
    Exchange exchange;
    std::vector<Device> devices;
    devices.emplace_back(stack, run, units, exchange, start);
    if (late != program::no_tensor) devices.front().delay(late, when);
    play(devices);
}

} // namespace moe::replay
