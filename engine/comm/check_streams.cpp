// Lets every stream of every pipeline rank go as far as it can, again and again, until all are through or none can go
// on.
#include "engine/comm/check_streams.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/program.hpp"

#include <deque>
#include <map>
#include <tuple>

namespace moe::comm {

namespace {

// Addresses without memory behind them.
class Nowhere : public device::Device {
public:
    std::string name() const override { return "nowhere"; }
    char* allocate(std::size_t bytes) override {
        char* memory = reinterpret_cast<char*>(next_); // NOLINT(performance-no-int-to-ptr): nothing lies there
        next_ += (static_cast<std::uintptr_t>(bytes) / 4096 + 1) * 4096;
        return memory;
    }
    void release(char*) noexcept override {}
    void fill(void*, int, std::size_t) override {}
    void write(void*, const void*, std::size_t) override {}
    void read(void*, const void*, std::size_t) override {}
    std::unique_ptr<device::Device> open_offload() const override {
        return std::make_unique<Nowhere>(next_ + (1ULL << 50));
    }

    explicit Nowhere(std::uintptr_t first) : next_(first) {}

private:
    std::uintptr_t next_;
};

// One pipeline rank's work.
struct Script {
    std::vector<const program::Op*> ops;
    std::vector<int> micro_batch;
    std::vector<std::size_t> slot;
    device::StreamOrder order;
    std::vector<std::deque<int>> streams; // work that is to come, by stream
    std::vector<bool> arrived, ended;     // flags by number of the work
};

Script script_of(const program::Program& program, const memory::MemoryPlan& memory, const plan::Mesh& mesh, int rank) {
    const std::unique_ptr<device::Device> nowhere = open_nowhere();
    const device::Arena arena(program, memory, mesh, rank, *nowhere);
    Script s{{},
             {},
             {},
             device::StreamOrder(program, arena, mesh.group_size({plan::Domain::dense, plan::axis::pipeline})),
             std::vector<std::deque<int>>(device::queue_streams),
             {},
             {}};
    for (program::OpWalk walk(program); !walk.done(); walk.next()) {
        s.ops.push_back(&walk.op());
        s.micro_batch.push_back(walk.slot().micro_batch);
        s.slot.push_back(walk.slot_number());
    }
    for (std::size_t work = 0; work < s.order.size(); ++work)
        s.streams[static_cast<std::size_t>(s.order[work].stream)].push_back(static_cast<int>(work));
    s.arrived.resize(s.order.size());
    s.ended.resize(s.order.size());
    return s;
}

class StreamPlay {
public:
    StreamPlay(const std::vector<program::Program>& programs, const std::vector<memory::MemoryPlan>& memory,
               const plan::Mesh& mesh)
        : stages_(static_cast<int>(programs.size())) {
        const std::vector<int> ranks = mesh.members({plan::Domain::dense, plan::axis::pipeline}, 0);
        for (std::size_t stage = 0; stage < programs.size(); ++stage)
            scripts_.push_back(script_of(programs[stage], memory[stage], mesh, ranks[stage]));
    }

    // Plays to the end and tells who waits for what there; empty where all are through.
    std::string run() {
        for (bool progress = true; progress;) {
            progress = false;
            for (int stage = 0; stage < stages_; ++stage)
                for (std::deque<int>& stream : at(stage).streams)
                    while (advance(stage, stream)) progress = true;
        }
        std::string stuck;
        int shown = 0;
        for (int stage = 0; stage < stages_; ++stage)
            for (const std::deque<int>& stream : at(stage).streams)
                if (!stream.empty() && shown < 6)
                    stuck += fmt::format("{}pipeline rank {} {}", shown++ ? "; " : "", stage,
                                         describe(stage, stream.front()));
        return stuck;
    }

private:
    using Line = std::tuple<int, int, int>; // (sender, receiver, tag)
    struct Event {
        int stage = -1, work = -1;
    };

    Script& at(int stage) { return scripts_[static_cast<std::size_t>(stage)]; }
    const program::Op& op(const Event& e) {
        return *at(e.stage).ops[static_cast<std::size_t>(at(e.stage).order[static_cast<std::size_t>(e.work)].op)];
    }

    std::string describe(int stage, int work) {
        const Script& s = at(stage);
        const auto name = [&](int other) {
            const auto n = static_cast<std::size_t>(s.order[static_cast<std::size_t>(other)].op);
            return fmt::format("{} (slot {}, layer {}, micro-batch {})", program::to_string(s.ops[n]->kind), s.slot[n],
                               s.ops[n]->layer, s.micro_batch[n]);
        };
        std::string text = "at " + name(work);
        for (const int other : s.order[static_cast<std::size_t>(work)].waits)
            if (!s.ended[static_cast<std::size_t>(other)]) text += ", which waits for " + name(other);
        return text;
    }

    void end(const Event& event) {
        Script& s = at(event.stage);
        s.ended[static_cast<std::size_t>(event.work)] = true;
        s.streams[static_cast<std::size_t>(s.order[static_cast<std::size_t>(event.work)].stream)].pop_front();
    }

    bool advance(int stage, std::deque<int>& stream) {
        if (stream.empty()) return false;
        Script& s = at(stage);
        const Event event{stage, stream.front()};
        const auto n = static_cast<std::size_t>(event.work);
        if (s.arrived[n]) return false;
        const device::StreamOrder::Work work = s.order[n];
        for (const int other : work.waits)
            if (!s.ended[static_cast<std::size_t>(other)]) return false;
        const program::Op& here = op(event);
        const auto* message = std::get_if<program::PeerAttr>(&here.attr);
        const bool alone =
            work.boxes || !program::is_communication(here.kind) ||
            (message != nullptr ? message->delta % stages_ == 0 : (here.group.axes & plan::axis::pipeline) == 0);
        if (alone) {
            end(event);
            return true;
        }
        s.arrived[n] = true;
        if (message == nullptr) return meet(event, here);
        const int other = ((stage + message->delta) % stages_ + stages_) % stages_;
        return match(here.kind == program::OpKind::send ? Line{stage, other, message->tag}
                                                        : Line{other, stage, message->tag},
                     event);
    }

    bool meet(const Event& event, const program::Op& here) {
        std::vector<Event>& come = meetings_[{here.stream, here.group.domain, here.group.axes}];
        come.push_back(event);
        if (static_cast<int>(come.size()) < stages_) return false;
        for (const Event& other : std::exchange(come, {})) end(other);
        return true;
    }

    bool match(const Line& line, const Event& event) {
        const Event first = std::exchange(messages_[line], event);
        if (first.stage < 0) return false;
        messages_[line] = {};
        const auto what = [&](const Event& e) {
            const Script& s = at(e.stage);
            return std::pair(std::get<program::PeerAttr>(op(e).attr).stage,
                             s.micro_batch[static_cast<std::size_t>(s.order[static_cast<std::size_t>(e.work)].op)]);
        };
        if (what(first) != what(event))
            refuse("pipeline rank {} does not receive in the order in which rank {} sends: one is {}, the other {}",
                   std::get<1>(line), std::get<0>(line), describe(first.stage, first.work),
                   describe(event.stage, event.work));
        end(first);
        end(event);
        return true;
    }

    int stages_;
    std::vector<Script> scripts_; // scripts by pipeline rank
    std::map<std::tuple<program::Stream, plan::Domain, int>, std::vector<Event>> meetings_;
    std::map<Line, Event> messages_; // the end of each message that waits for the other end
};

} // namespace

std::unique_ptr<device::Device> open_nowhere() { return std::make_unique<Nowhere>(std::uintptr_t{1} << 40); }

void check_streams(const std::vector<program::Program>& programs, const std::vector<memory::MemoryPlan>& memory,
                   const plan::Mesh& mesh) {
    if (const std::string stuck = StreamPlay(programs, memory, mesh).run(); !stuck.empty())
        refuse("the plan's streams wait for each other on devices: {}", stuck);
}

} // namespace moe::comm
