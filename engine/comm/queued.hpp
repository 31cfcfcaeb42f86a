// Communicator of ranks on devices: collectives of a library, queued on the streams that the Program names.
//
// The host never reads counts of routed rows: what travels between two ranks is a slot as large as it can get, into and
// out of which kernels move the rows that there are.
#pragma once

#include "engine/comm/collectives.hpp"
#include "engine/comm/communicator.hpp"
#include "engine/comm/peers.hpp"
#include "engine/comm/slot_exchange.hpp"
#include "engine/comm/transport.hpp"
#include "engine/device/device.hpp"
#include "engine/device/streams.hpp"
#include "kernels/kernels.hpp"
#include "planner/program/communicators.hpp"
#include "planner/program/peer_blocks.hpp"

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <vector>

namespace moe::comm {

// Ranks that need a communicator of the library. Communication that runs side by side has one of its own, because a
// communicator's work has one order: collectives one per group and stream, messages one per sender, receiver and tag,
// as a message must not wait behind another that its receiver wants later.
struct CommGroup {
    int channel = 0;        // Stream of collectives, or stream_count + tag of messages
    std::vector<int> ranks; // ranks in the order of the group; of a message: sender, receiver
    bool pairwise = false;  // whether members send to each other, besides what they do together
    bool messages() const { return channel >= program::stream_count; }
};
// All communicators of a run, in an order that every rank finds alike. programs: by pipeline rank; may be followed by
// those of steps that are run again, in the same order.
std::vector<CommGroup> comm_groups_of(const std::vector<const program::Program*>& programs, const plan::Mesh& mesh);

// Communicators on devices: how many a rank has, and what they and their buffers took there, besides the arena.
struct Joined {
    struct Member {
        CommGroup group;
        double bytes = 0.0;
    };
    std::size_t communicators = 0;
    double bytes = 0.0;        // most bytes of any rank of this process
    double buffer_bytes = 0.0; // bytes of them in slots and boxes of the first rank
    std::vector<Member> each;  // communicators of the first rank
    std::string slots_by;      // how slots travel between NVLink domains; empty where none do
};

// The state that the ranks of this process share.
class QueuedFabric {
public:
    // points: one for each of the comm_groups. transport: leads to other processes, null where there are none.
    QueuedFabric(const CollectiveLibrary& library, const plan::Mesh& mesh, std::vector<CommGroup> comm_groups,
                 std::vector<MeetingPoint> points, Transport* transport)
        : library_(library),
          mesh_(mesh),
          comm_groups_(std::move(comm_groups)),
          points_(std::move(points)),
          transport_(transport) {}

    const CollectiveLibrary& library() const { return library_; }
    const plan::Mesh& mesh() const { return mesh_; }
    const std::vector<CommGroup>& comm_groups() const { return comm_groups_; }
    const MeetingPoint& point(std::size_t group) const { return points_[group]; }

    // A rank of this process has failed: the others' waits throw Aborted.
    void fail() { failed_ = true; }
    bool failed() const { return failed_; }
    void check();

private:
    const CollectiveLibrary& library_;
    const plan::Mesh& mesh_;
    std::vector<CommGroup> comm_groups_;
    std::vector<MeetingPoint> points_;
    Transport* transport_;
    std::atomic<bool> failed_{false};
};

class QueuedCommunicator : public Communicator {
public:
    // Joins the rank's communicators, which all ranks do at the same time, and makes their connections. `programs`: all
    // that the rank will run. Its memory, which no plan counts, is that of slots and of boxes.
    QueuedCommunicator(QueuedFabric& fabric, int rank, device::Device& device, const Kernels& kernels,
                       const std::vector<const program::Program*>& programs);
    ~QueuedCommunicator() override;
    // Before the first step, where the programs exchange tokens over peers' memory: the members of their group show
    // each other their arenas. All ranks call it at the same time.
    void reach_peers(const PeerLibrary& library, char* arena, std::int64_t arena_bytes);
    QueuedCommunicator(const QueuedCommunicator&) = delete;
    QueuedCommunicator& operator=(const QueuedCommunicator&) = delete;

    int rank() const override { return rank_; }
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
    bool exchange_tokens(plan::Group group, const program::RowsAttr& attr, const TokenOperands& operands) override;
    void all_to_all(plan::Group group, const void* x, void* y, const program::AllToAllAttr& attr,
                    std::int64_t element_bytes) override;
    void ring_exchange(plan::Group group, const void* x, void* y, std::int64_t bytes) override;
    void send(const program::PeerAttr& peer, const void* x, std::int64_t bytes) override;
    void recv(const program::PeerAttr& peer, void* y, std::int64_t bytes) override;
    void put(const program::PeerAttr& peer, const void* x, std::int64_t bytes) override;
    void use(program::Stream stream, void* queued) override;
    void begin_step() override;
    void check() override;
    double waited() const override { return 0.0; } // The device waits, not the host.
    bool waits() const override { return false; }

    std::int64_t buffer_bytes() const { return buffer_bytes_; } // bytes of slots and boxes
    // SlotExchange::by(); empty where no Program has slots between domains.
    std::string slots_by() const { return exchange_ ? exchange_->by() : ""; }
    // Bytes that each of this rank's communicators took of the device, by number in QueuedFabric::comm_groups().
    const std::map<std::size_t, double>& taken() const { return taken_; }

private:
    struct GroupRank {
        std::vector<int> ranks;
        int index = 0;
    };
    struct SendRing { // ring of a channel's messages, in the order of the calls
        program::Box box;
        char* memory = nullptr;
        int put = 0, sent = 0, received = 0;
        char* place(int number) const { return memory + number % box.places * box.bytes; }
    };
    using Key = std::pair<int, std::vector<int>>; // channel, ranks
    struct Release {
        device::Device* device;
        void operator()(char* memory) const { device->release(memory); }
    };

    const GroupRank& group_rank(plan::Group group);
    CollectiveLibrary::Member member(int channel, const std::vector<int>& ranks);
    CollectiveLibrary::Member here(const GroupRank& group_rank) {
        return member(static_cast<int>(stream_), group_rank.ranks);
    }
    void connect(const CommGroup& group, char* memory);
    char* take_memory(std::int64_t bytes, const char* what);
    char* slots(std::int64_t bytes);
    void open_exchange(char* memory);
    void exchange_slots(const GroupRank& group_rank, const char* x, char* y, std::int64_t bytes);
    SlotShape slot_shape(const program::RowsAttr& attr, RowParts parts, std::int64_t slot_rows, std::int64_t capacity);
    int peer_rank(int delta);
    SendRing& send_ring(const program::PeerAttr& peer);

    QueuedFabric& fabric_;
    const CollectiveLibrary& library_;
    const Kernels& kernels_;
    device::Device& device_;
    int rank_;
    plan::Group peer_group_{};     // group of the ops over peers' memory
    std::int64_t peer_tokens_ = 0; // tokens of the largest of those ops; 0 = there are none
    int peer_blocks_ = program::peer_blocks_alone;
    std::unique_ptr<PeerMemory> peers_;
    plan::Group exchange_group_{};    // group of all_to_all_slots, whose ops are on one stream
    std::int64_t exchange_bytes_ = 0; // bytes of all slots of the largest of those ops; 0 = there are none
    bool chunks_ = false;             // whether they are to travel in chunks, as the plan's price has it
    std::unique_ptr<SlotExchange> exchange_;
    std::map<Key, CollectiveLibrary::Member> members_;
    std::map<std::pair<plan::Domain, int>, GroupRank> group_ranks_;
    std::map<program::Channel, SendRing> boxes_;
    std::vector<std::unique_ptr<char, Release>> memory_;
    std::array<char*, program::stream_count> slots_{};
    std::array<std::int64_t, program::stream_count> slot_bytes_{};
    std::int64_t buffer_bytes_ = 0;
    std::map<std::size_t, double> taken_;
    program::Stream stream_ = program::Stream::compute;
    void* queued_ = nullptr; // the device's handle of stream_
    int checks_ = 0;
};

} // namespace moe::comm
