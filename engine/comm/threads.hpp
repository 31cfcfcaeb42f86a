// Communicator between the threads of one process: members read each other's buffers directly between two meetings.
#pragma once

#include "engine/base/cores.hpp"
#include "engine/comm/communicator.hpp"
#include "planner/plan/fwd.hpp"

#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace moe::comm {

// State that all ranks share. Guarded by the gang's lock, except for a meeting's operands: a member writes its own
// before it arrives and reads the others' after all have arrived.
class ThreadFabric {
public:
    ThreadFabric(const plan::Mesh& mesh, engine::Cores& cores) : mesh_(mesh), cores_(cores) {}

    struct Operand {
        const void* x = nullptr;
        void* y = nullptr;
    };
    struct Meeting {
        std::vector<int> ranks;
        std::vector<Operand> operands; // operands by index in the group
        std::vector<int> waiting;
        int arrived = 0;
        int reading = 0; // members that may still read or write the others' operands
    };
    using Channel = std::tuple<int, int, int, int>; // (source, destination, tag, stage)
    struct Mailbox {
        std::vector<std::vector<char>> full;  // messages in order of arrival
        std::vector<std::vector<char>> empty; // buffers to use again
        int reader = -1;                      // rank that waits for the next message, -1 = none
    };

    Meeting& meeting(plan::Group group, int rank);
    Mailbox& mailbox(const Channel& channel);
    // Each returns when every member has called it. Between open() and close() a member may use the operands of all.
    // What either throws, a rank that failed or one that ends beside it, is thrown when nobody uses them any more.
    void open(Meeting& meeting, int rank, const char* what);
    void close(Meeting& meeting, int rank, const char* what);
    // In place of close() for a member that fails.
    void leave(Meeting& meeting, std::exception_ptr failure);
    void put(const Channel& channel, const void* x, std::int64_t bytes);
    void take(const Channel& channel, void* y, std::int64_t bytes);

    const plan::Mesh& mesh() const { return mesh_; }
    engine::Cores& cores() { return cores_; }

private:
    void meet(engine::Cores::Lock& held, Meeting& meeting, int rank, const char* what);

    const plan::Mesh& mesh_;
    engine::Cores& cores_;
    std::map<std::tuple<plan::Domain, int, int>, std::unique_ptr<Meeting>> meetings_; // (domain, axes, first member)
    std::map<Channel, std::unique_ptr<Mailbox>> mailboxes_;
};

class ThreadCommunicator : public Communicator {
public:
    ThreadCommunicator(ThreadFabric& fabric, int rank);

    int rank() const override { return rank_; }
    int size(plan::Group group) override { return static_cast<int>(group_rank(group).meeting->ranks.size()); }
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
    double waited() const override { return fabric_.cores().waited(rank_); }
    bool waits() const override { return fabric_.cores().waits(rank_); }

private:
    struct GroupRank {
        plan::Group group;
        ThreadFabric::Meeting* meeting = nullptr;
        int index = 0;
    };
    const GroupRank& group_rank(plan::Group group);
    // Runs body(group rank) between two meetings of the group.
    template <class Body>
    void exchange(plan::Group group, const void* x, void* y, const char* what, const Body& body);
    const char* operand(const GroupRank& group_rank, int member) const;
    // y = sum or maximum over the members of `elements` elements that start at element `first` of each one's x.
    void reduce(const GroupRank& group_rank, std::int64_t first, void* y, std::int64_t elements, program::Dtype dtype,
                bool max);
    int peer_rank(int delta);

    ThreadFabric& fabric_;
    int rank_;
    std::deque<GroupRank> group_ranks_; // group ranks; references stay valid while the deque grows
    std::vector<const void*> sources_;  // sources of a sum, kept between calls so that none allocates
};

} // namespace moe::comm
