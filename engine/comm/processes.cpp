// Collectives by direct messages: everything is sent before anything is awaited.
#include "engine/comm/processes.hpp"

#include "engine/comm/offset.hpp"
#include "engine/comm/rows.hpp"
#include "kernels/kernels.hpp"
#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"

#include <cstring>

namespace moe::comm {

namespace {

constexpr std::uint64_t group_channels = std::uint64_t{1} << 60, peer_channels = std::uint64_t{2} << 60;

std::uint64_t channel_of(plan::Group group) {
    return group_channels | static_cast<std::uint64_t>(group.domain) << 32 | static_cast<std::uint64_t>(group.axes);
}
std::uint64_t channel_of(const program::PeerAttr& peer) {
    return peer_channels | static_cast<std::uint64_t>(peer.tag) << 32 | static_cast<std::uint64_t>(peer.stage);
}

} // namespace

const ProcessCommunicator::GroupRank& ProcessCommunicator::group_rank(plan::Group group) {
    for (const GroupRank& group_rank : group_ranks_)
        if (group_rank.group == group) return group_rank;
    group_ranks_.push_back({group, mesh_.members(group, rank()), mesh_.index(group, rank()), channel_of(group)});
    return group_ranks_.back();
}

void ProcessCommunicator::give(const GroupRank& group_rank, int member, const void* data, std::int64_t bytes) {
    transport_.send(group_rank.ranks[static_cast<std::size_t>(member)], group_rank.channel, data,
                    static_cast<std::size_t>(bytes));
}

void ProcessCommunicator::take(const GroupRank& group_rank, int member, void* data, std::int64_t bytes) {
    transport_.receive(group_rank.ranks[static_cast<std::size_t>(member)], group_rank.channel,
                       {static_cast<char*>(data), static_cast<std::size_t>(bytes)});
}

void ProcessCommunicator::reduce(const GroupRank& group_rank, const void* mine, void* y, std::int64_t elements,
                                 program::Dtype dtype, bool max) {
    const Type type = storage_of_sum(dtype);
    const std::int64_t bytes = program::bytes_of(dtype, elements);
    const auto members = static_cast<std::int64_t>(group_rank.ranks.size());
    parts_.resize(static_cast<std::size_t>(members * bytes));
    sources_.resize(group_rank.ranks.size());
    for (int m = 0; m < members; ++m) {
        char* part = offset(parts_.data(), m * bytes);
        if (m == group_rank.index)
            copy(part, mine, bytes); // y may be a part of x.
        else
            take(group_rank, m, part, bytes);
        sources_[static_cast<std::size_t>(m)] = part;
    }
    if (elements == 0) return;
    const auto kernel = max ? cpu_kernels().reduce_max : cpu_kernels().reduce_sum;
    kernel({y, type}, sources_.data(), static_cast<int>(members), elements, type, nullptr);
}

void ProcessCommunicator::all_gather(plan::Group group, const void* x, void* y, std::int64_t bytes) {
    const GroupRank& here = group_rank(group);
    for (int m = 0; m < size(group); ++m)
        if (m != here.index) give(here, m, x, bytes);
    copy(offset(y, here.index * bytes), x, bytes);
    for (int m = 0; m < size(group); ++m)
        if (m != here.index) take(here, m, offset(y, m * bytes), bytes);
}

void ProcessCommunicator::reduce_scatter(plan::Group group, const void* x, void* y, std::int64_t elements,
                                         program::Dtype dtype) {
    const GroupRank& here = group_rank(group);
    const std::int64_t bytes = program::bytes_of(dtype, elements);
    for (int m = 0; m < size(group); ++m)
        if (m != here.index) give(here, m, offset(x, m * bytes), bytes);
    reduce(here, offset(x, here.index * bytes), y, elements, dtype, false);
}

// Each member adds up one part and hands the sum to all.
void ProcessCommunicator::all_reduce(plan::Group group, const void* x, void* y, std::int64_t elements,
                                     program::Dtype dtype, bool max) {
    const GroupRank& here = group_rank(group);
    const std::int64_t members = size(group);
    const auto first = [&](std::int64_t m) { return elements * m / members; }; // NOLINT(clang-analyzer-core.DivideZero)
    const auto bytes = [&](std::int64_t m) { return program::bytes_of(dtype, first(m + 1) - first(m)); };
    for (int m = 0; m < members; ++m)
        if (m != here.index) give(here, m, offset(x, program::bytes_of(dtype, first(m))), bytes(m));
    const std::int64_t mine = program::bytes_of(dtype, first(here.index));
    reduce(here, offset(x, mine), offset(y, mine), first(here.index + 1) - first(here.index), dtype, max);
    for (int m = 0; m < members; ++m)
        if (m != here.index) give(here, m, offset(y, mine), bytes(here.index));
    for (int m = 0; m < members; ++m)
        if (m != here.index) take(here, m, offset(y, program::bytes_of(dtype, first(m))), bytes(m));
}

void ProcessCommunicator::all_to_all_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                          const program::RowsAttr& attr, program::Dtype dtype, std::int64_t,
                                          std::int64_t capacity_rows) {
    const GroupRank& here = group_rank(group);
    const RowLayout layout(attr, all_counts);
    const int me = here.index, etp = index({plan::Domain::expert, plan::axis::tensor});
    const std::int64_t row = program::bytes_of(dtype, attr.cols);
    const auto rows_to = [&](int m) { return attr.combine ? layout.sent(m, etp, me) : layout.sent(me, etp, m); };
    const auto rows_from = [&](int m) { return attr.combine ? layout.sent(me, etp, m) : layout.sent(m, etp, me); };
    const auto mine = [&](int m) {
        return offset(x, (attr.combine ? layout.arrival_offset(m, etp, me) : layout.send_offset(me, etp, m)) * row);
    };
    for (int m = 0; m < size(group); ++m)
        if (m != me) give(here, m, mine(m), rows_to(m) * row);
    std::int64_t placed = 0;
    for (int m = 0; m < size(group); ++m) {
        const std::int64_t bytes = rows_from(m) * row;
        check_row_capacity("all_to_all_rows", placed + rows_from(m), capacity_rows);
        if (m == me)
            copy(offset(y, placed * row), mine(m), bytes);
        else
            take(here, m, offset(y, placed * row), bytes);
        placed += rows_from(m);
    }
}

void ProcessCommunicator::all_to_all_slots(plan::Group group, const void* x, const std::int32_t* counts, void* y,
                                           const program::RowsAttr& attr, program::Dtype dtype) {
    const GroupRank& here = group_rank(group);
    const int me = here.index;
    const std::int64_t row = program::bytes_of(dtype, attr.cols), slot = attr.capacity * row;
    for (int m = 0; m < size(group); ++m)
        if (m != me) give(here, m, offset(x, m * slot), rows_in_slot(attr, counts, me, m) * row);
    for (int m = 0; m < size(group); ++m) {
        const std::int64_t bytes = rows_in_slot(attr, counts, m, me) * row;
        if (m == me)
            copy(offset(y, m * slot), offset(x, m * slot), bytes);
        else
            take(here, m, offset(y, m * slot), bytes);
    }
}

void ProcessCommunicator::all_gather_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                          const program::RowsAttr& attr, program::Dtype dtype, std::int64_t,
                                          std::int64_t capacity_rows) {
    const GroupRank& here = group_rank(group);
    const RowLayout layout(attr, all_counts);
    const int ep = index({plan::Domain::expert, plan::axis::expert});
    const std::int64_t row = program::bytes_of(dtype, attr.cols), own = layout.arrived(ep, here.index) * row;
    for (int m = 0; m < size(group); ++m)
        if (m != here.index) give(here, m, x, own);
    std::int64_t placed = 0;
    for (int m = 0; m < size(group); ++m) {
        const std::int64_t rows = layout.arrived(ep, m);
        check_row_capacity("all_gather_rows", placed + rows, capacity_rows);
        if (m == here.index)
            copy(offset(y, placed * row), x, own);
        else
            take(here, m, offset(y, placed * row), rows * row);
        placed += rows;
    }
}

void ProcessCommunicator::reduce_scatter_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                              const program::RowsAttr& attr, program::Dtype dtype, std::int64_t,
                                              std::int64_t capacity_rows) {
    const GroupRank& here = group_rank(group);
    const RowLayout layout(attr, all_counts);
    const int ep = index({plan::Domain::expert, plan::axis::expert});
    const std::int64_t row = program::bytes_of(dtype, attr.cols), rows = layout.arrived(ep, here.index);
    check_row_capacity("reduce_scatter_rows", rows, capacity_rows);
    std::int64_t first = 0, mine = 0;
    for (int m = 0; m < size(group); ++m) {
        if (m == here.index)
            mine = first;
        else
            give(here, m, offset(x, first * row), layout.arrived(ep, m) * row);
        first += layout.arrived(ep, m);
    }
    reduce(here, offset(x, mine * row), y, rows * attr.cols, dtype, false);
}

void ProcessCommunicator::all_to_all(plan::Group group, const void* x, void* y, const program::AllToAllAttr& attr,
                                     std::int64_t element_bytes) {
    const GroupRank& here = group_rank(group);
    if (size(group) != attr.parts) fail("all_to_all: {} parts for a group of {}", attr.parts, size(group));
    const std::int64_t part = attr.rows * attr.cols / attr.parts * element_bytes;
    packed_.resize(static_cast<std::size_t>(part));
    const auto bytes = [element_bytes](std::int64_t elements) {
        return static_cast<std::size_t>(elements * element_bytes);
    };
    const auto pack = [&](int m) {
        char* to = packed_.data();
        each_exchanged_run(attr, attr.to_heads ? here.index : m, attr.to_heads ? m : here.index,
                           [&](std::int64_t wide, std::int64_t narrow, std::int64_t count) {
                               const std::int64_t from = (attr.to_heads ? wide : narrow) * element_bytes;
                               std::memcpy(to, offset(x, from), bytes(count));
                               to += bytes(count);
                           });
    };
    const auto unpack = [&](int m) {
        const char* from = packed_.data();
        each_exchanged_run(attr, attr.to_heads ? m : here.index, attr.to_heads ? here.index : m,
                           [&](std::int64_t wide, std::int64_t narrow, std::int64_t count) {
                               const std::int64_t to = (attr.to_heads ? narrow : wide) * element_bytes;
                               std::memcpy(offset(y, to), from, bytes(count));
                               from += bytes(count);
                           });
    };
    for (int m = 0; m < attr.parts; ++m) {
        if (m == here.index) continue;
        pack(m);
        give(here, m, packed_.data(), part);
    }
    pack(here.index);
    unpack(here.index);
    for (int m = 0; m < attr.parts; ++m) {
        if (m == here.index) continue;
        take(here, m, packed_.data(), part);
        unpack(m);
    }
}

void ProcessCommunicator::ring_exchange(plan::Group group, const void* x, void* y, std::int64_t bytes) {
    const GroupRank& here = group_rank(group);
    const int members = size(group);
    give(here, (here.index + 1) % members, x, bytes);
    take(here, (here.index + members - 1) % members, y, bytes);
}

int ProcessCommunicator::peer_rank(int delta) {
    const GroupRank& here = group_rank({plan::Domain::dense, plan::axis::pipeline});
    const int stages = static_cast<int>(here.ranks.size());
    return here.ranks[static_cast<std::size_t>(((here.index + delta) % stages + stages) % stages)];
}

void ProcessCommunicator::send(const program::PeerAttr& peer, const void* x, std::int64_t bytes) {
    transport_.send(peer_rank(peer.delta), channel_of(peer), x, static_cast<std::size_t>(bytes));
}

void ProcessCommunicator::recv(const program::PeerAttr& peer, void* y, std::int64_t bytes) {
    transport_.receive(peer_rank(peer.delta), channel_of(peer),
                       {static_cast<char*>(y), static_cast<std::size_t>(bytes)});
}

} // namespace moe::comm
