// Plays all ranks' communication ops without data until every rank is through or nobody can go on.
#include "engine/comm/check.hpp"

#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/program.hpp"

#include <deque>
#include <map>
#include <tuple>

namespace moe::comm {

namespace {

struct Step {
    const program::Op* op = nullptr;
    int slot = 0, index = 0, micro_batch = 0;
    std::int64_t bytes = 0; // bytes of the first operand, or of the output of a recv
};

std::vector<Step> communication_of(const program::Program& program) {
    std::vector<Step> steps;
    for (program::OpWalk walk(program); !walk.done(); walk.next()) {
        const program::Op& op = walk.op();
        if (!program::is_communication(op.kind)) continue;
        const program::TensorId id = op.kind == program::OpKind::recv ? op.out.at(0) : op.in.at(0);
        steps.push_back({&op, static_cast<int>(walk.slot_number()), static_cast<int>(walk.index()),
                         walk.slot().micro_batch, program.tensors[static_cast<std::size_t>(id)].bytes()});
    }
    return steps;
}

class Play {
public:
    Play(const std::vector<program::Program>& programs, const plan::Mesh& mesh) : mesh_(mesh) {
        for (const program::Program& program : programs) steps_.push_back(communication_of(program));
        for (int rank = 0; rank < mesh.size(); ++rank)
            stage_.push_back(
                static_cast<std::size_t>(mesh.coordinate(plan::Domain::dense, plan::axis::pipeline, rank)));
        next_.resize(stage_.size());
        arrived_.resize(stage_.size());
    }

    void run() {
        bool progress = true;
        while (progress) {
            progress = false;
            for (int rank = 0; rank < mesh_.size(); ++rank)
                while (advance(rank)) progress = true;
        }
        for (int rank = 0; rank < mesh_.size(); ++rank)
            if (!done(rank)) refuse("the plan's communication cannot finish: {}", stuck());
        for (const auto& [channel, box] : mail_)
            if (!box.empty())
                refuse("rank {} sends stage {} (tag {}) of micro-batch {} to rank {}, which never receives it",
                       std::get<0>(channel), std::get<3>(channel), std::get<2>(channel), box.front().micro_batch,
                       std::get<1>(channel));
    }

private:
    using Channel = std::tuple<int, int, int, int>;
    struct Meeting {
        int first = -1;
        std::vector<int> ranks;
    };

    bool done(int rank) const { return next_[static_cast<std::size_t>(rank)] >= steps_of(rank).size(); }
    const std::vector<Step>& steps_of(int rank) const { return steps_[stage_[static_cast<std::size_t>(rank)]]; }
    const Step& step(int rank) const { return steps_of(rank)[next_[static_cast<std::size_t>(rank)]]; }

    std::string describe(int rank) const {
        if (done(rank)) return fmt::format("rank {} is through", rank);
        const Step& s = step(rank);
        return fmt::format("rank {} is at {} over {} (slot {}, op {}, layer {}, micro-batch {}, {} bytes)", rank,
                           program::to_string(s.op->kind), plan::to_string(s.op->group), s.slot, s.index, s.op->layer,
                           s.micro_batch, s.bytes);
    }

    // Names at most four ranks: enough to see who waits for whom.
    std::string stuck() const {
        std::string text;
        int shown = 0;
        for (int rank = 0; rank < mesh_.size() && shown < 4; ++rank) {
            if (done(rank)) continue;
            text += (shown++ ? "; " : "") + describe(rank);
        }
        return text;
    }

    int peer(int rank, int delta) const {
        const std::vector<int> stages = mesh_.members({plan::Domain::dense, plan::axis::pipeline}, rank);
        const int count = static_cast<int>(stages.size()),
                  at = mesh_.index({plan::Domain::dense, plan::axis::pipeline}, rank);
        return stages[static_cast<std::size_t>(((at + delta) % count + count) % count)];
    }

    bool advance(int rank) {
        if (done(rank)) return false;
        const Step& s = step(rank);
        if (s.op->kind == program::OpKind::send) {
            const program::PeerAttr& p = std::get<program::PeerAttr>(s.op->attr);
            mail_[{rank, peer(rank, p.delta), p.tag, p.stage}].push_back(s);
        } else if (s.op->kind == program::OpKind::recv) {
            const program::PeerAttr& p = std::get<program::PeerAttr>(s.op->attr);
            const int from = peer(rank, p.delta);
            std::deque<Step>& box = mail_[{from, rank, p.tag, p.stage}];
            if (box.empty()) return false;
            if (box.front().bytes != s.bytes || box.front().micro_batch != s.micro_batch)
                refuse("rank {} sends micro-batch {} ({} bytes) where {} expects it", from, box.front().micro_batch,
                       box.front().bytes, describe(rank));
            box.pop_front();
        } else {
            return meet(rank, s);
        }
        ++next_[static_cast<std::size_t>(rank)];
        return true;
    }

    bool meet(int rank, const Step& s) {
        if (arrived_[static_cast<std::size_t>(rank)]) return false;
        const std::vector<int> members = mesh_.members(s.op->group, rank);
        Meeting& meeting = meetings_[{s.op->group.domain, s.op->group.axes, members.front()}];
        if (meeting.first < 0) meeting.first = rank;
        const Step& other = step(meeting.first);
        if (other.op->kind != s.op->kind || other.bytes != s.bytes)
            refuse("collectives do not line up: {}, but {}", describe(meeting.first), describe(rank));
        arrived_[static_cast<std::size_t>(rank)] = true;
        meeting.ranks.push_back(rank);
        if (meeting.ranks.size() < members.size()) return false;
        for (int member : meeting.ranks) {
            ++next_[static_cast<std::size_t>(member)];
            arrived_[static_cast<std::size_t>(member)] = false;
        }
        meeting = {};
        return true;
    }

    const plan::Mesh& mesh_;
    std::vector<std::vector<Step>> steps_; // steps by pipeline rank
    std::vector<std::size_t> stage_, next_;
    std::vector<bool> arrived_;
    std::map<std::tuple<plan::Domain, int, int>, Meeting> meetings_;
    std::map<Channel, std::deque<Step>> mail_;
};

} // namespace

void check_communication(const std::vector<program::Program>& programs, const plan::Mesh& mesh) {
    Play(programs, mesh).run();
}

} // namespace moe::comm
