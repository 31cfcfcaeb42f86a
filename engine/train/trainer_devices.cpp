// Ranks on devices: which device each one has, and how they are joined.
#include "engine/train/trainer_processes.hpp"

#include "engine/comm/check_streams.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/memory/memory.hpp"

#include <algorithm>

namespace moe::train {

// A launcher that shows a process only its own device makes that number 0.
int Trainer::device_of(int place) const {
    if (backend_->devices == nullptr) return 0;
    const int devices = backend_->devices(), device = options_.device + place;
    if (transport() != nullptr && devices == 1) return 0;
    if (device >= devices)
        refuse("execute: {} on this machine, but it has {}, and every rank needs one of its own: search "
               "again with --gpus {}, start the processes on more machines, or use --backend cpu",
               counted(transport() != nullptr ? device + 1 : plan_.gpus, "rank"), counted(devices, "GPU"), devices);
    return device;
}

std::vector<comm::MeetingPoint> Trainer::meeting_points(std::size_t count) const {
    std::vector<comm::MeetingPoint> points(count);
    if (transport() == nullptr || transport()->rank() == 0)
        for (comm::MeetingPoint& point : points) point = backend_->collectives().meeting_point();
    if (transport() != nullptr)
        among_processes([&](comm::Transport& t) {
            t.broadcast(0, {points.front().data(), points.size() * sizeof(comm::MeetingPoint)});
            return 0;
        });
    return points;
}

// All ranks are built by now: none can fail where the others wait for it to come.
void Trainer::join_devices(const std::vector<memory::MemoryPlan>& memory) {
    std::vector<const program::Program*> programs;
    for (const program::Program& program : programs_) programs.push_back(&program);
    for (const std::vector<program::Program>* beside : {&reruns_, &forwards_})
        for (const program::Program& program : *beside) programs.push_back(&program);
    std::vector<comm::CommGroup> comm_groups = comm::comm_groups_of(programs, mesh_);
    std::vector<comm::MeetingPoint> points = meeting_points(comm_groups.size());
    queued_fabric_ = std::make_unique<comm::QueuedFabric>(backend_->collectives(), mesh_, std::move(comm_groups),
                                                          std::move(points), transport());
    comm::check_streams(programs_, memory, mesh_);
    for (const std::vector<program::Program>* beside : {&reruns_, &forwards_}) {
        if (beside->empty()) continue;
        std::vector<memory::MemoryPlan> second;
        for (const program::Program& program : *beside) second.push_back(memory::plan_memory(program));
        comm::check_streams(*beside, second, mesh_);
    }
    std::vector<double> before(ranks_.size()), after(ranks_.size());
    run_ranks([&](Rank& rank, int place) {
        std::vector<const program::Program*> mine{&program_of(rank)};
        for (const std::vector<program::Program>* beside : {&reruns_, &forwards_})
            if (!beside->empty()) mine.push_back(&(*beside)[static_cast<std::size_t>(rank.stage)]);
        before[static_cast<std::size_t>(place)] = rank.device->used_bytes();
        auto joined = std::make_unique<comm::QueuedCommunicator>(*queued_fabric_, rank.rank, *rank.device,
                                                                 *backend_->kernels, mine);
        if (backend_->peers != nullptr)
            joined->reach_peers(backend_->peers(), rank.arena->memory(),
                                static_cast<std::int64_t>(rank.arena->bytes()));
        if (place == 0)
            for (const auto& [group, bytes] : joined->taken())
                joined_.each.push_back({queued_fabric_->comm_groups()[group], bytes});
        if (place == 0) joined_.buffer_bytes = static_cast<double>(joined->buffer_bytes());
        if (place == 0) joined_.slots_by = joined->slots_by();
        rank.communicator = std::move(joined);
        after[static_cast<std::size_t>(place)] = rank.device->used_bytes();
    });
    for (std::size_t place = 0; place < ranks_.size(); ++place) {
        joined_.bytes = std::max(joined_.bytes, after[place] - before[place]);
        const int rank = ranks_[place].rank;
        const auto& all = queued_fabric_->comm_groups();
        const auto mine = std::count_if(all.begin(), all.end(), [rank](const comm::CommGroup& group) {
            return std::find(group.ranks.begin(), group.ranks.end(), rank) != group.ranks.end();
        });
        joined_.communicators = std::max(joined_.communicators, static_cast<std::size_t>(mine));
    }
}

device::PowerSample Trainer::power_sample() const {
    std::vector<device::PowerSample> devices;
    for (const Rank& rank : ranks_) devices.push_back(rank.device->power_sample());
    return device::combined(devices);
}

std::string Trainer::device_name() const {
    const std::string name = ranks_.front().device->name();
    return ranks_.size() > 1 ? fmt::format("{} x {}", ranks_.size(), name) : name;
}

device::QueuedStep Trainer::queued_step() const {
    const device::Queue* queue = ranks_.front().device->queue();
    if (queue == nullptr) return {};
    device::QueuedStep step = queue->queued_step();
    if (step.records == 0) step = ranks_.front().executor->queued_parts();
    step.event_overhead = ranks_.front().executor->event_overhead();
    step.usual_stamp_seconds = ranks_.front().executor->usual_stamp_seconds();
    return step;
}

} // namespace moe::train
