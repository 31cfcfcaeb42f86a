// Communicator between processes: every member sends the others what they need of its operand, and all add up in the
// order of the group, so that results are those of ranks in one process, bit for bit.
#pragma once

#include "engine/comm/communicator.hpp"
#include "engine/comm/transport.hpp"
#include "planner/plan/fwd.hpp"

#include <deque>
#include <vector>

namespace moe::comm {

class ProcessCommunicator : public Communicator {
public:
    // Both must outlive it.
    ProcessCommunicator(Transport& transport, const plan::Mesh& mesh) : transport_(transport), mesh_(mesh) {}

    int rank() const override { return transport_.rank(); }
    int size(plan::Group group) override { return static_cast<int>(group_rank(group).ranks.size()); }
    int index(plan::Group group) override { return group_rank(group).index; }
    void all_gather(plan::Group group, const void* x, void* y, std::int64_t bytes) override;
    void reduce_scatter(plan::Group group, const void* x, void* y, std::int64_t elements,
                        program::Dtype dtype) override;
    void all_reduce(plan::Group group, const void* x, void* y, std::int64_t elements, program::Dtype dtype,
                    bool max) override;
    void all_to_all_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                         const program::RowsAttr& attr, program::Dtype dtype, std::int64_t x_rows,
                         std::int64_t capacity_rows) override;
    void all_to_all_slots(plan::Group group, const void* x, const std::int32_t* counts, void* y,
                          const program::RowsAttr& attr, program::Dtype dtype) override;
    void all_gather_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                         const program::RowsAttr& attr, program::Dtype dtype, std::int64_t x_rows,
                         std::int64_t capacity_rows) override;
    void reduce_scatter_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                             const program::RowsAttr& attr, program::Dtype dtype, std::int64_t x_rows,
                             std::int64_t capacity_rows) override;
    void all_to_all(plan::Group group, const void* x, void* y, const program::AllToAllAttr& attr,
                    std::int64_t element_bytes) override;
    void ring_exchange(plan::Group group, const void* x, void* y, std::int64_t bytes) override;
    void send(const program::PeerAttr& peer, const void* x, std::int64_t bytes) override;
    void recv(const program::PeerAttr& peer, void* y, std::int64_t bytes) override;
    double waited() const override { return transport_.waited(); }
    bool waits() const override { return transport_.waits(); }

private:
    struct GroupRank {
        plan::Group group;
        std::vector<int> ranks;
        int index = 0;
        std::uint64_t channel = 0;
    };
    const GroupRank& group_rank(plan::Group group);
    void give(const GroupRank& group_rank, int member, const void* data, std::int64_t bytes);
    void take(const GroupRank& group_rank, int member, void* data, std::int64_t bytes);
    // Sums (or maxima) of one part per member, each as long as mine; my own is read where it lies.
    void reduce(const GroupRank& group_rank, const void* mine, void* y, std::int64_t elements, program::Dtype dtype,
                bool max);
    int peer_rank(int delta);

    Transport& transport_;
    const plan::Mesh& mesh_;
    std::deque<GroupRank> group_ranks_; // group ranks; references stay valid while the deque grows
    std::vector<char> parts_, packed_;  // scratch memory of collectives
    std::vector<const void*> sources_;
};

} // namespace moe::comm
