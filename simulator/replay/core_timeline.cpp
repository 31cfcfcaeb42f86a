// Plays all ranks of a CPU job on a pool of cores: who computes holds a core, who waits for others gives it back.
#include "simulator/replay/ranks.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/program.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <queue>
#include <tuple>

namespace moe::replay {
namespace {

// A collective has two meetings, before and after the members read each other's buffers; whoever comes last goes on
// with the core in its hands, the others queue for one again.
struct Meeting {
    int size = 0;
    std::vector<int> waiting;
    int arrived = 0;
};

enum class Step { arrive, work, leave };

class Pool {
public:
    Pool(const plan::Plan& plan, std::vector<RankRun>& runs)
        : runs_(runs), mesh_(plan), free_(std::max(1, std::min(static_cast<int>(runs.size()), plan.hardware->cores))) {
        for (const RankRun& run : runs) threads_.emplace_back(*run.program);
    }

    void play() {
        for (std::size_t r = 0; r < threads_.size(); ++r) ready_.push_back(static_cast<int>(r));
        grant();
        while (!events_.empty()) {
            const auto [time, sequence, rank] = events_.top();
            (void)sequence;
            events_.pop();
            now_ = time;
            finish_work(rank);
            grant();
        }
        for (std::size_t r = 0; r < threads_.size(); ++r)
            if (!ended(static_cast<int>(r)))
                fail("the schedule deadlocks: rank {} waits in slot {}, op {}", r, threads_[r].at.slot_number(),
                     threads_[r].at.index());
    }

private:
    struct Thread {
        explicit Thread(const program::Program& program) : at(program) {}
        program::OpWalk at;
        Step step = Step::arrive;
        double start = -1.0; // seconds at which the current op began
        double busy = 0.0;
    };
    using Event = std::tuple<double, std::int64_t, int>;

    Thread& thread(int rank) { return threads_[static_cast<std::size_t>(rank)]; }
    bool ended(int rank) { return thread(rank).at.done(); }
    const program::Op& op(int rank) { return thread(rank).at.op(); }
    double cost(int rank) {
        const program::OpWalk& at = thread(rank).at;
        return (*runs_[static_cast<std::size_t>(rank)].costs)[static_cast<std::size_t>(at.slot().index)][at.index()]
            .device;
    }

    void grant() {
        while (free_ > 0 && !ready_.empty()) {
            const int rank = ready_.front();
            ready_.pop_front();
            --free_;
            proceed(rank);
        }
    }
    void park() { ++free_; }
    void work(int rank) {
        thread(rank).busy = cost(rank);
        events_.emplace(now_ + thread(rank).busy, sequence_++, rank);
    }

    // The rank holds a core: it goes on until it works, waits or ends.
    void proceed(int rank) {
        if (ended(rank)) return park();
        Thread& t = thread(rank);
        if (t.start < 0.0) t.start = now_;
        const program::Op& o = op(rank);
        if (o.kind == program::OpKind::recv) {
            if (t.step == Step::arrive && !take(rank, std::get<program::PeerAttr>(o.attr))) {
                t.step = Step::work;
                return park();
            }
            return work(rank);
        }
        if (!program::is_communication(o.kind) || o.kind == program::OpKind::send) return work(rank);
        if (t.step == Step::arrive) {
            t.step = Step::work;
            if (!meet(rank, o.group)) return park();
        }
        if (t.step == Step::work) return work(rank);
        next(rank); // The rank is back from the second meeting.
    }

    void finish_work(int rank) {
        Thread& t = thread(rank);
        const program::Op& o = op(rank);
        if (o.kind == program::OpKind::send) put(rank, std::get<program::PeerAttr>(o.attr));
        if (program::is_communication(o.kind) && o.kind != program::OpKind::send && o.kind != program::OpKind::recv) {
            t.step = Step::leave;
            if (!meet(rank, o.group)) return park();
        }
        next(rank);
    }

    void next(int rank) {
        record(rank);
        Thread& t = thread(rank);
        t.step = Step::arrive;
        t.start = -1.0;
        t.at.next();
        proceed(rank);
    }

    void record(int rank) {
        RankRun& run = runs_[static_cast<std::size_t>(rank)];
        const Thread& t = thread(rank);
        const program::Op& o = op(rank);
        program::TimelineRow row;
        row.rank = run.rank;
        row.slot = static_cast<std::int32_t>(t.at.slot_number());
        row.op = static_cast<std::int32_t>(t.at.index());
        row.layer = o.layer;
        row.kind = o.kind;
        row.stream = o.stream;
        row.module = o.module;
        row.phase = o.phase;
        row.slot_kind = t.at.ops().kind;
        row.chunk = static_cast<std::int16_t>(t.at.ops().chunk);
        row.micro_batch = t.at.slot().micro_batch;
        row.start = t.start;
        row.end = now_;
        row.busy = t.busy;
        run.rows.push_back(row);
        run.host_bound.push_back(0);
    }

    // True for the last member, which wakes the others in the order in which they came.
    bool meet(int rank, plan::Group group) {
        const int first = mesh_.members(group, rank).front();
        Meeting& meeting = meetings_[{group.domain, group.axes, first}];
        if (meeting.size == 0) meeting.size = mesh_.group_size(group);
        if (++meeting.arrived < meeting.size) {
            meeting.waiting.push_back(rank);
            return false;
        }
        for (const int member : meeting.waiting) ready_.push_back(member);
        meeting.waiting.clear();
        meeting.arrived = 0;
        return true;
    }

    using Channel = std::tuple<int, int, int, int>; // (source, destination, tag, stage)
    struct Mailbox {
        int messages = 0;
        int reader = -1;
    };
    int peer(int rank, const program::PeerAttr& attr) {
        const plan::Group pipeline{plan::Domain::dense, plan::axis::pipeline};
        const std::vector<int> members = mesh_.members(pipeline, rank);
        const int n = static_cast<int>(members.size());
        return members[static_cast<std::size_t>(((mesh_.index(pipeline, rank) + attr.delta) % n + n) % n)];
    }
    void put(int rank, const program::PeerAttr& attr) {
        Mailbox& box = mailboxes_[{rank, peer(rank, attr), attr.tag, attr.stage}];
        if (box.reader >= 0) {
            ready_.push_back(box.reader); // The message goes to the reader directly.
            box.reader = -1;
        } else {
            ++box.messages;
        }
    }
    bool take(int rank, const program::PeerAttr& attr) {
        Mailbox& box = mailboxes_[{peer(rank, attr), rank, attr.tag, attr.stage}];
        if (box.messages > 0) {
            --box.messages;
            return true;
        }
        box.reader = rank;
        return false;
    }

    std::vector<RankRun>& runs_;
    plan::Mesh mesh_;
    std::vector<Thread> threads_;
    std::deque<int> ready_;
    std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
    std::map<std::tuple<plan::Domain, int, int>, Meeting> meetings_;
    std::map<Channel, Mailbox> mailboxes_;
    double now_ = 0.0;
    std::int64_t sequence_ = 0;
    int free_ = 1;
};

} // namespace

void play_cores(const plan::Plan& plan, std::vector<RankRun>& runs) { Pool(plan, runs).play(); }

} // namespace moe::replay
