// Communicator between the threads of one process: members read each other's buffers directly between two meetings.
#pragma once

#include "engine/base/cores.hpp"
#include "engine/comm/communicator.hpp"
#include "planner/plan/fwd.hpp"

#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

namespace moe {

// State that all ranks share. Guarded by the gang's lock, except for a meeting's operands: a member writes its own
// before it arrives and reads the others' after all have arrived.
class ThreadFabric {
public:
    ThreadFabric(const Mesh& mesh, Cores& cores) : mesh_(mesh), cores_(cores) {}

    struct Operand {
        const void* x = nullptr;
        void* y = nullptr;
    };
    struct Meeting {
        std::vector<int> ranks;
        std::vector<Operand> operands; // by index in the group
        std::vector<int> waiting;
        int arrived = 0;
    };
    using Channel = std::tuple<int, int, int, int>; // source, destination, tag, stage
    struct Mailbox {
        std::vector<std::vector<char>> full;  // in order of arrival
        std::vector<std::vector<char>> empty; // buffers to use again
        int reader = -1;                      // a rank that waits for the next message
    };

    Meeting& meeting(Group group, int rank);
    Mailbox& mailbox(const Channel& channel);
    // Returns when every member has called it.
    void meet(Meeting& meeting, int rank, const char* what);
    void put(const Channel& channel, const void* x, std::int64_t bytes);
    void take(const Channel& channel, void* y, std::int64_t bytes);

    const Mesh& mesh() const { return mesh_; }
    Cores& cores() { return cores_; }

private:
    const Mesh& mesh_;
    Cores& cores_;
    std::map<std::tuple<Domain, int, int>, std::unique_ptr<Meeting>> meetings_; // domain, axes, first member
    std::map<Channel, std::unique_ptr<Mailbox>> mailboxes_;
};

class ThreadCommunicator : public Communicator {
public:
    ThreadCommunicator(ThreadFabric& fabric, int rank);

    int rank() const override { return rank_; }
    int size(Group group) override { return static_cast<int>(seat(group).meeting->ranks.size()); }
    int index(Group group) override { return seat(group).index; }
    void all_gather(Group group, const void* x, void* y, std::int64_t bytes) override;
    void reduce_scatter(Group group, const void* x, void* y, std::int64_t elements, Dtype dtype) override;
    void all_reduce(Group group, const void* x, void* y, std::int64_t elements, Dtype dtype, bool max) override;
    void all_to_all_rows(Group group, const void* x, const std::int32_t* all_counts, void* y, const RowsAttr& attr,
                         Dtype dtype, std::int64_t x_rows, std::int64_t capacity_rows) override;
    void all_gather_rows(Group group, const void* x, const std::int32_t* all_counts, void* y, const RowsAttr& attr,
                         Dtype dtype, std::int64_t x_rows, std::int64_t capacity_rows) override;
    void reduce_scatter_rows(Group group, const void* x, const std::int32_t* all_counts, void* y, const RowsAttr& attr,
                             Dtype dtype, std::int64_t x_rows, std::int64_t capacity_rows) override;
    void all_to_all(Group group, const void* x, void* y, const AllToAllAttr& attr, std::int64_t element_bytes) override;
    void ring_exchange(Group group, const void* x, void* y, std::int64_t bytes) override;
    void send(const PeerAttr& peer, const void* x, std::int64_t bytes) override;
    void recv(const PeerAttr& peer, void* y, std::int64_t bytes) override;
    double waited() const override { return fabric_.cores().waited(rank_); }
    bool waits() const override { return fabric_.cores().waits(rank_); }

private:
    struct Seat {
        Group group;
        ThreadFabric::Meeting* meeting = nullptr;
        int index = 0;
    };
    const Seat& seat(Group group);
    // Between open() and close() the operands of every member may be read.
    const Seat& open(Group group, const void* x, void* y, const char* what);
    void close(const Seat& seat, const char* what);
    const char* operand(const Seat& seat, int member) const;
    // y = sum or maximum over the members of `elements` elements that start at element `first` of each one's x.
    void reduce(const Seat& seat, std::int64_t first, void* y, std::int64_t elements, Dtype dtype, bool max);
    int peer_rank(int delta);

    ThreadFabric& fabric_;
    int rank_;
    std::deque<Seat> seats_;           // references stay valid while it grows
    std::vector<const void*> sources_; // kept between calls so that none allocates
};

} // namespace moe
