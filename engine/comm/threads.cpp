// Collectives between threads: publish the operands, meet, copy or add up what is mine, meet again.
#include "engine/comm/threads.hpp"

#include "engine/comm/offset.hpp"
#include "engine/comm/rows.hpp"
#include "kernels/kernels.hpp"
#include "planner/plan/mesh.hpp"

#include <thread>

namespace moe::comm {

ThreadFabric::Meeting& ThreadFabric::meeting(plan::Group group, int rank) {
    const std::vector<int> members = mesh_.members(group, rank);
    const engine::Cores::Lock held = cores_.lock();
    std::unique_ptr<Meeting>& found = meetings_[{group.domain, group.axes, members.front()}];
    if (!found) {
        found = std::make_unique<Meeting>();
        found->ranks = members;
        found->operands.resize(members.size());
        found->waiting.reserve(members.size());
    }
    return *found;
}

ThreadFabric::Mailbox& ThreadFabric::mailbox(const Channel& channel) {
    std::unique_ptr<Mailbox>& found = mailboxes_[channel];
    if (!found) found = std::make_unique<Mailbox>();
    return *found;
}

void ThreadFabric::meet(engine::Cores::Lock& held, Meeting& meeting, int rank, const char* what) {
    // A member that ends because another rank failed takes its operands along: nobody may arrive behind it.
    cores_.check();
    if (++meeting.arrived < static_cast<int>(meeting.ranks.size())) {
        meeting.waiting.push_back(rank);
        cores_.park(held, rank, what);
        return;
    }
    meeting.arrived = 0;
    for (int waiting : meeting.waiting) cores_.unpark(waiting);
    meeting.waiting.clear();
}

namespace {

// Those that still read hold a core, or are woken by the failure: a moment.
void wait_for_readers(engine::Cores::Lock& held, const ThreadFabric::Meeting& meeting) {
    while (meeting.reading > 0) {
        held.unlock();
        std::this_thread::yield();
        held.lock();
    }
}

} // namespace

void ThreadFabric::open(Meeting& meeting, int rank, const char* what) {
    engine::Cores::Lock held = cores_.lock();
    const bool last = meeting.arrived + 1 == static_cast<int>(meeting.ranks.size());
    try {
        meet(held, meeting, rank, what);
    } catch (const engine::Aborted&) {
        // Where all had arrived, this member was counted, too.
        if (meeting.reading > 0) --meeting.reading;
        wait_for_readers(held, meeting);
        throw;
    }
    if (last) meeting.reading = static_cast<int>(meeting.ranks.size());
}

void ThreadFabric::close(Meeting& meeting, int rank, const char* what) {
    engine::Cores::Lock held = cores_.lock();
    --meeting.reading;
    try {
        meet(held, meeting, rank, what);
    } catch (const engine::Aborted&) {
        wait_for_readers(held, meeting);
        throw;
    }
}

void ThreadFabric::leave(Meeting& meeting, std::exception_ptr failure) {
    engine::Cores::Lock held = cores_.lock();
    cores_.set_failure(std::move(failure));
    --meeting.reading;
    wait_for_readers(held, meeting);
}

void ThreadFabric::put(const Channel& channel, const void* x, std::int64_t bytes) {
    std::vector<char> message;
    {
        const engine::Cores::Lock held = cores_.lock();
        Mailbox& box = mailbox(channel);
        if (!box.empty.empty()) {
            message = std::move(box.empty.back());
            box.empty.pop_back();
        }
    }
    message.resize(static_cast<std::size_t>(bytes));
    copy(message.data(), x, bytes);
    const engine::Cores::Lock held = cores_.lock();
    Mailbox& box = mailbox(channel);
    box.full.push_back(std::move(message));
    if (box.reader >= 0) cores_.unpark(std::exchange(box.reader, -1));
}

void ThreadFabric::take(const Channel& channel, void* y, std::int64_t bytes) {
    std::vector<char> message;
    {
        engine::Cores::Lock held = cores_.lock();
        Mailbox& box = mailbox(channel);
        if (box.full.empty()) {
            box.reader = std::get<1>(channel);
            cores_.park(held, std::get<1>(channel), "recv");
        }
        message = std::move(box.full.front());
        box.full.erase(box.full.begin());
    }
    if (static_cast<std::int64_t>(message.size()) != bytes)
        fail("recv from rank {}: the message has {} bytes, {} were expected", std::get<0>(channel), message.size(),
             bytes);
    copy(y, message.data(), bytes);
    const engine::Cores::Lock held = cores_.lock();
    mailbox(channel).empty.push_back(std::move(message));
}

ThreadCommunicator::ThreadCommunicator(ThreadFabric& fabric, int rank) : fabric_(fabric), rank_(rank) {}

const ThreadCommunicator::GroupRank& ThreadCommunicator::group_rank(plan::Group group) {
    for (const GroupRank& group_rank : group_ranks_)
        if (group_rank.group == group) return group_rank;
    ThreadFabric::Meeting& meeting = fabric_.meeting(group, rank_);
    group_ranks_.push_back({group, &meeting, fabric_.mesh().index(group, rank_)});
    if (sources_.size() < meeting.ranks.size()) sources_.resize(meeting.ranks.size());
    return group_ranks_.back();
}

template <class Body>
void ThreadCommunicator::exchange(plan::Group group, const void* x, void* y, const char* what, const Body& body) {
    const GroupRank& here = group_rank(group);
    here.meeting->operands[static_cast<std::size_t>(here.index)] = {x, y};
    fabric_.open(*here.meeting, rank_, what);
    try {
        body(here);
    } catch (...) {
        fabric_.leave(*here.meeting, std::current_exception());
        throw;
    }
    fabric_.close(*here.meeting, rank_, what);
}

const char* ThreadCommunicator::operand(const GroupRank& group_rank, int member) const {
    return static_cast<const char*>(group_rank.meeting->operands[static_cast<std::size_t>(member)].x);
}

void ThreadCommunicator::reduce(const GroupRank& group_rank, std::int64_t first, void* y, std::int64_t elements,
                                program::Dtype dtype, bool max) {
    if (elements == 0) return;
    const Type type = storage_of_sum(dtype);
    const int members = static_cast<int>(group_rank.meeting->ranks.size());
    for (int m = 0; m < members; ++m)
        sources_[static_cast<std::size_t>(m)] = offset(operand(group_rank, m), program::bytes_of(dtype, first));
    const auto kernel = max ? cpu_kernels().reduce_max : cpu_kernels().reduce_sum;
    kernel({y, type}, sources_.data(), members, elements, type, nullptr);
}

void ThreadCommunicator::all_gather(plan::Group group, const void* x, void* y, std::int64_t bytes) {
    exchange(group, x, y, "all_gather", [&](const GroupRank& here) {
        for (int m = 0; m < size(group); ++m) copy(offset(y, m * bytes), operand(here, m), bytes);
    });
}

void ThreadCommunicator::reduce_scatter(plan::Group group, const void* x, void* y, std::int64_t elements,
                                        program::Dtype dtype) {
    exchange(group, x, y, "reduce_scatter",
             [&](const GroupRank& here) { reduce(here, here.index * elements, y, elements, dtype, false); });
}

// Each member adds up one part and hands the sum to all: nobody else reads that part of anybody's x, so y may be x.
void ThreadCommunicator::all_reduce(plan::Group group, const void* x, void* y, std::int64_t elements,
                                    program::Dtype dtype, bool max) {
    exchange(group, x, y, "all_reduce", [&](const GroupRank& here) {
        const std::int64_t members = size(group);
        const std::int64_t first = elements * here.index / members, last = elements * (here.index + 1) / members;
        const std::int64_t start = program::bytes_of(dtype, first), bytes = program::bytes_of(dtype, last - first);
        reduce(here, first, offset(y, start), last - first, dtype, max);
        for (const ThreadFabric::Operand& member : here.meeting->operands)
            copy(offset(member.y, start), offset(y, start), bytes);
    });
}

void ThreadCommunicator::all_to_all_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                         const program::RowsAttr& attr, program::Dtype dtype, std::int64_t,
                                         std::int64_t capacity_rows) {
    exchange(group, x, y, "all_to_all_rows", [&](const GroupRank& here) {
        const RowLayout layout(attr, all_counts);
        const int me = here.index, etp = index({plan::Domain::expert, plan::axis::tensor});
        const std::int64_t row = program::bytes_of(dtype, attr.cols);
        std::int64_t placed = 0;
        for (int m = 0; m < size(group); ++m) {
            const std::int64_t rows = attr.combine ? layout.sent(me, etp, m) : layout.sent(m, etp, me);
            const std::int64_t from = attr.combine ? layout.arrival_offset(me, etp, m) : layout.send_offset(m, etp, me);
            check_row_capacity("all_to_all_rows", placed + rows, capacity_rows);
            copy(offset(y, placed * row), offset(operand(here, m), from * row), rows * row);
            placed += rows;
        }
    });
}

void ThreadCommunicator::all_to_all_slots(plan::Group group, const void* x, const std::int32_t* counts, void* y,
                                          const program::RowsAttr& attr, program::Dtype dtype) {
    exchange(group, x, y, "all_to_all_slots", [&](const GroupRank& here) {
        const std::int64_t row = program::bytes_of(dtype, attr.cols), slot = attr.capacity * row;
        for (int m = 0; m < size(group); ++m)
            copy(offset(y, m * slot), operand(here, m) + here.index * slot,
                 rows_in_slot(attr, counts, m, here.index) * row);
    });
}

void ThreadCommunicator::all_gather_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                         const program::RowsAttr& attr, program::Dtype dtype, std::int64_t,
                                         std::int64_t capacity_rows) {
    exchange(group, x, y, "all_gather_rows", [&](const GroupRank& here) {
        const RowLayout layout(attr, all_counts);
        const int ep = index({plan::Domain::expert, plan::axis::expert});
        const std::int64_t row = program::bytes_of(dtype, attr.cols);
        std::int64_t placed = 0;
        for (int m = 0; m < size(group); ++m) {
            const std::int64_t rows = layout.arrived(ep, m);
            check_row_capacity("all_gather_rows", placed + rows, capacity_rows);
            copy(offset(y, placed * row), operand(here, m), rows * row);
            placed += rows;
        }
    });
}

void ThreadCommunicator::reduce_scatter_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                             const program::RowsAttr& attr, program::Dtype dtype, std::int64_t,
                                             std::int64_t capacity_rows) {
    exchange(group, x, y, "reduce_scatter_rows", [&](const GroupRank& here) {
        const RowLayout layout(attr, all_counts);
        const int ep = index({plan::Domain::expert, plan::axis::expert});
        std::int64_t first = 0;
        for (int m = 0; m < here.index; ++m) first += layout.arrived(ep, m);
        const std::int64_t rows = layout.arrived(ep, here.index);
        check_row_capacity("reduce_scatter_rows", rows, capacity_rows);
        reduce(here, first * attr.cols, y, rows * attr.cols, dtype, false);
    });
}

void ThreadCommunicator::all_to_all(plan::Group group, const void* x, void* y, const program::AllToAllAttr& attr,
                                    std::int64_t element_bytes) {
    exchange(group, x, y, "all_to_all", [&](const GroupRank& here) {
        const int parts = size(group);
        if (parts != attr.parts) fail("all_to_all: {} parts for a group of {}", attr.parts, parts);
        const auto bytes = [element_bytes](std::int64_t elements) { return elements * element_bytes; };
        for (int m = 0; m < parts; ++m)
            each_exchanged_run(attr, attr.to_heads ? m : here.index, attr.to_heads ? here.index : m,
                               [&](std::int64_t wide, std::int64_t narrow, std::int64_t count) {
                                   copy(offset(y, bytes(attr.to_heads ? narrow : wide)),
                                        offset(operand(here, m), bytes(attr.to_heads ? wide : narrow)), bytes(count));
                               });
    });
}

void ThreadCommunicator::ring_exchange(plan::Group group, const void* x, void* y, std::int64_t bytes) {
    exchange(group, x, y, "ring_exchange", [&](const GroupRank& here) {
        const int members = size(group);
        copy(y, operand(here, (here.index + members - 1) % members), bytes);
    });
}

int ThreadCommunicator::peer_rank(int delta) {
    const GroupRank& here = group_rank({plan::Domain::dense, plan::axis::pipeline});
    const int stages = static_cast<int>(here.meeting->ranks.size());
    return here.meeting->ranks[static_cast<std::size_t>(((here.index + delta) % stages + stages) % stages)];
}

void ThreadCommunicator::send(const program::PeerAttr& peer, const void* x, std::int64_t bytes) {
    fabric_.put({rank_, peer_rank(peer.delta), peer.tag, peer.stage}, x, bytes);
}

void ThreadCommunicator::recv(const program::PeerAttr& peer, void* y, std::int64_t bytes) {
    fabric_.take({peer_rank(peer.delta), rank_, peer.tag, peer.stage}, y, bytes);
}

} // namespace moe::comm
