// Collectives as calls of the library, with kernels that pack and unpack what the host cannot size.
#include "engine/comm/queued.hpp"

#include "engine/base/cores.hpp"
#include "engine/comm/offset.hpp"
#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/communicators.hpp"
#include "planner/program/program.hpp"

#include <algorithm>
#include <set>

namespace moe::comm {

namespace {

// The blocks that may wait for other ranks at one time fit the multiprocessors of an H100 or H200
// (planner/program/peer_blocks.hpp).
constexpr int multiprocessors = 132;
static_assert(program::peer_blocks_beside <= program::peer_blocks_in_pipeline &&
              program::peer_blocks_in_pipeline <= program::peer_blocks_alone);
static_assert(program::peer_blocks_alone + 2 * program::most_collective_blocks <= multiprocessors);
static_assert(program::peer_blocks_in_pipeline + 2 * program::most_collective_blocks + 4 * program::message_channels <=
              multiprocessors);

std::vector<int> peers(const plan::Mesh& mesh, int rank) {
    return mesh.members({plan::Domain::dense, plan::axis::pipeline}, rank);
}

int peer_of(const plan::Mesh& mesh, int rank, int delta) {
    const std::vector<int> stages = peers(mesh, rank);
    const int count = static_cast<int>(stages.size()),
              at = mesh.index({plan::Domain::dense, plan::axis::pipeline}, rank);
    return stages[static_cast<std::size_t>(((at + delta) % count + count) % count)];
}

// The library allocates as it joins, and calls what it does not get an error of CUDA.
std::string not_joined(int rank, const CommGroup& group, double free_bytes, const char* why) {
    return fmt::format("rank {}: joining {} ranks for {}, {:.2f} GiB free: {}; where memory is short use a smaller mbs",
                       rank, group.ranks.size(),
                       group.messages() ? "messages" : program::to_string(static_cast<program::Stream>(group.channel)),
                       free_bytes / (1 << 30), why);
}

} // namespace

std::vector<CommGroup> comm_groups_of(const std::vector<const program::Program*>& programs, const plan::Mesh& mesh) {
    const int stages = mesh.group_size({plan::Domain::dense, plan::axis::pipeline});
    struct Use {
        int channel;
        plan::Group group;
        int delta;
        bool pairwise;
        auto key() const { return std::tuple(channel, group.domain, group.axes, delta, pairwise); }
        bool operator<(const Use& other) const { return key() < other.key(); }
    };
    std::vector<std::set<Use>> uses(static_cast<std::size_t>(stages)); // uses by pipeline rank
    for (std::size_t p = 0; p < programs.size(); ++p)
        for (const program::Template& ops : programs[p]->templates)
            for (const program::Op& op : ops.ops) {
                if (!program::is_communication(op.kind) || op.kind == program::OpKind::recv) continue;
                const auto* peer = std::get_if<program::PeerAttr>(&op.attr);
                if (peer != nullptr && peer->delta % stages == 0) continue;
                uses[p % uses.size()].insert(
                    peer != nullptr ? Use{program::stream_count + peer->tag, {}, peer->delta, false}
                                    : Use{static_cast<int>(op.stream), op.group, 0, program::is_pairwise(op.kind)});
            }
    std::map<std::pair<int, std::vector<int>>, bool> found; // true for groups that send pairwise
    for (int rank = 0; rank < mesh.size(); ++rank)
        for (const Use& use :
             uses[static_cast<std::size_t>(mesh.coordinate(plan::Domain::dense, plan::axis::pipeline, rank))]) {
            const std::vector<int> ranks = use.channel >= program::stream_count
                                               ? std::vector<int>{rank, peer_of(mesh, rank, use.delta)}
                                               : mesh.members(use.group, rank);
            bool& sends = found[{use.channel, ranks}];
            sends = sends || use.pairwise;
        }
    std::vector<CommGroup> comm_groups;
    for (const auto& [key, sends] : found) comm_groups.push_back({key.first, key.second, sends});
    return comm_groups;
}

void QueuedFabric::check() {
    if (failed_) throw engine::Aborted();
    if (transport_ != nullptr) transport_->check_peers();
}

QueuedCommunicator::QueuedCommunicator(QueuedFabric& fabric, int rank, device::Device& device, const Kernels& kernels,
                                       const std::vector<const program::Program*>& programs)
    : fabric_(fabric), library_(fabric.library()), kernels_(kernels), device_(device), rank_(rank) {
    const int stages = fabric.mesh().group_size({plan::Domain::dense, plan::axis::pipeline});
    for (const program::Program* program : programs) {
        peer_blocks_ = std::min(peer_blocks_, program::peer_blocks(*program));
        chunks_ = chunks_ || program::sends_chunks(*program);
        for (const program::Template& ops : program->templates)
            for (const program::Op& op : ops.ops) {
                if (op.kind == program::OpKind::dispatch_tokens) {
                    peer_group_ = op.group;
                    peer_tokens_ = std::max(peer_tokens_, program->tensors[static_cast<std::size_t>(op.in[0])].rows);
                }
                if (op.kind == program::OpKind::all_to_all_slots) {
                    exchange_group_ = op.group;
                    exchange_bytes_ =
                        std::max(exchange_bytes_, program->tensors[static_cast<std::size_t>(op.in[0])].bytes());
                }
                std::int64_t& most = slot_bytes_[static_cast<std::size_t>(op.stream)];
                most = std::max(most, program::slots_of(*program, op));
            }
        for (const auto& [channel, box] : program::boxes_of(*program, stages)) {
            program::Box& most = boxes_[channel].box;
            most.bytes = std::max(most.bytes, (box.bytes + 255) / 256 * 256);
            most.places = std::max(most.places, box.places);
        }
    }
    for (std::size_t s = 0; s < slots_.size(); ++s)
        if (slot_bytes_[s] > 0) slots_[s] = take_memory(slot_bytes_[s], "slots of routed rows");
    for (auto& [channel, box] : boxes_) box.memory = take_memory(box.box.bytes * box.box.places, "messages that leave");
    const int greeting_bytes = 8 * fabric.mesh().size();
    char* greetings = take_memory(greeting_bytes, "the first messages");
    device_.fill(greetings, 0, static_cast<std::size_t>(greeting_bytes));
    if (device::Queue* queue = device_.queue()) QueuedCommunicator::use(program::Stream::compute, queue->stream());
    for (std::size_t i = 0; i < fabric.comm_groups().size(); ++i) {
        const CommGroup& group = fabric.comm_groups()[i];
        const auto me = std::find(group.ranks.begin(), group.ranks.end(), rank_);
        if (me == group.ranks.end()) continue;
        const double before = device_.used_bytes();
        // Messages leave the device to what computes beside them, collectives to what moves tokens.
        const int blocks = group.messages() ? program::message_channels : program::most_collective_blocks;
        try {
            members_[{group.channel, group.ranks}] =
                library_.join(fabric.point(i), static_cast<int>(group.ranks.size()),
                              static_cast<int>(me - group.ranks.begin()), blocks);
            connect(group, greetings);
            if (device::Queue* queue = device_.queue()) queue->wait();
        } catch (const Error& error) {
            throw Error(error.fault(), not_joined(rank_, group, device_.free_bytes(), error.what()));
        }
        taken_[i] = device_.used_bytes() - before;
    }
    if (exchange_bytes_ > 0) open_exchange(greetings);
}

// memory: 4 bytes for the members' answers.
void QueuedCommunicator::open_exchange(char* memory) {
    const GroupRank& group = group_rank(exchange_group_);
    const CollectiveLibrary::Member to = member(static_cast<int>(program::Stream::expert), group.ranks);
    const auto all_agree = [&](bool mine) {
        float against = mine ? 0.0f : 1.0f;
        device_.write(memory, &against, sizeof against);
        library_.all_reduce(to, memory, memory, 1, program::Dtype::f32, true, queued_);
        device_.read(&against, memory, sizeof against);
        return against == 0.0f;
    };
    exchange_ = std::make_unique<SlotExchange>(library_, device_, SlotExchange::Place{to, group.ranks, group.index},
                                               chunks_ ? exchange_bytes_ : 0, all_agree);
    buffer_bytes_ += exchange_->bytes();
}

void QueuedCommunicator::reach_peers(const PeerLibrary& library, char* arena, std::int64_t arena_bytes) {
    if (peer_tokens_ == 0) return;
    const GroupRank& members = group_rank(peer_group_);
    const auto gather = [&](const std::vector<char>& mine) {
        const std::size_t count = members.ranks.size();
        char* memory = take_memory(static_cast<std::int64_t>((count + 1) * mine.size()), "handles of arenas");
        device_.write(memory, mine.data(), mine.size());
        library_.all_gather(member(static_cast<int>(program::Stream::expert), members.ranks), memory,
                            memory + mine.size(), static_cast<std::int64_t>(mine.size()), device_.queue()->stream());
        std::vector<char> all(count * mine.size());
        device_.read(all.data(), memory + mine.size(), all.size());
        return all;
    };
    peers_ = std::make_unique<PeerMemory>(library, device_, PeerMemory::Place{members.ranks, members.index}, arena,
                                          arena_bytes, peer_tokens_, peer_blocks_, gather);
    buffer_bytes_ += peers_->bytes();
}

bool QueuedCommunicator::exchange_tokens(plan::Group group, const program::RowsAttr& attr,
                                         const TokenOperands& operands) {
    if (!peers_ || !(group == peer_group_)) fail("tokens move over peers' memory, and rank {} has reached none", rank_);
    peers_->exchange(attr, operands, queued_);
    return true;
}

// Records hold on to the communicators that they were made with.
QueuedCommunicator::~QueuedCommunicator() {
    if (fabric_.failed()) {
        if (exchange_) exchange_->abandon();
        for (const auto& [key, member] : members_) library_.abandon(member);
        return;
    }
    try {
        if (device::Queue* queue = device_.queue()) queue->forget();
        exchange_.reset();
        for (const auto& [key, member] : members_) library_.leave(member);
    } catch (const Error&) {
        // Errors of the run have been reported; there is nothing left to save.
    }
}

// Connections are made at the first use, which both ends wait for on the host: here all ranks come in one order, in a
// step they would not.
void QueuedCommunicator::connect(const CommGroup& group, char* memory) {
    const CollectiveLibrary::Member to = members_.at({group.channel, group.ranks});
    const int count = static_cast<int>(group.ranks.size());
    if (group.messages()) {
        if (group.ranks.front() == rank_)
            library_.send(to, memory, 4, 1, queued_);
        else
            library_.recv(to, memory + 4, 4, 0, queued_);
        return;
    }
    library_.all_reduce(to, memory, memory, 1, program::Dtype::f32, false, queued_);
    if (!group.pairwise) return;
    library_.begin_group();
    for (int m = 0; m < count; ++m) {
        library_.send(to, memory + 8 * m, 4, m, queued_);
        library_.recv(to, memory + 8 * m + 4, 4, m, queued_);
    }
    library_.end_group();
}

char* QueuedCommunicator::take_memory(std::int64_t bytes, const char* what) {
    char* memory = device_.allocate(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)));
    if (memory == nullptr)
        fail("rank {}: cannot allocate {:.2f} GiB for {} beside the arena, {:.2f} GiB are free: use a smaller mbs or a "
             "capacity",
             rank_, static_cast<double>(bytes) / (1 << 30), what, device_.free_bytes() / (1 << 30));
    memory_.emplace_back(memory, Release{&device_});
    buffer_bytes_ += bytes;
    return memory;
}

char* QueuedCommunicator::slots(std::int64_t bytes) {
    const auto s = static_cast<std::size_t>(stream_);
    if (bytes > slot_bytes_[s])
        fail("slots of {} bytes on the {} stream, {} were planned", bytes, program::to_string(stream_), slot_bytes_[s]);
    return slots_[s];
}

void QueuedCommunicator::use(program::Stream stream, void* queued) {
    stream_ = stream;
    queued_ = queued;
}

void QueuedCommunicator::begin_step() {
    for (auto& [channel, box] : boxes_) box.put = box.sent = box.received = 0;
}

void QueuedCommunicator::check() {
    fabric_.check();
    if (peers_) peers_->check();
    if (exchange_) exchange_->check();
    if (++checks_ % 100 != 0) return; // The library takes a lock for each check.
    for (const auto& [key, member] : members_)
        if (const std::string trouble = library_.trouble(member); !trouble.empty())
            fail("{}: another rank, a link or a GPU has failed (NCCL_DEBUG=INFO says more): mend it and go on from the "
                 "last checkpoint with --resume",
                 trouble);
}

const QueuedCommunicator::GroupRank& QueuedCommunicator::group_rank(plan::Group group) {
    const auto [at, fresh] = group_ranks_.try_emplace({group.domain, group.axes});
    if (fresh) at->second = {fabric_.mesh().members(group, rank_), fabric_.mesh().index(group, rank_)};
    return at->second;
}

CollectiveLibrary::Member QueuedCommunicator::member(int channel, const std::vector<int>& ranks) {
    const auto found = members_.find({channel, ranks});
    if (found == members_.end())
        fail("rank {} has no communicator of {} ranks for purpose {}", rank_, ranks.size(), channel);
    return found->second;
}

// Counts of routed rows go where the rows will go, in the order of the same stream.
void QueuedCommunicator::all_gather(plan::Group group, const void* x, void* y, std::int64_t bytes) {
    if (peers_ && stream_ == program::Stream::expert && group == peer_group_ && peers_->gathers(y, bytes))
        return peers_->gather(x, y, bytes, queued_);
    library_.all_gather(here(group_rank(group)), x, y, bytes, queued_);
}

void QueuedCommunicator::reduce_scatter(plan::Group group, const void* x, void* y, std::int64_t elements,
                                        program::Dtype dtype) {
    library_.reduce_scatter(here(group_rank(group)), x, y, elements, dtype, queued_);
}

void QueuedCommunicator::all_reduce(plan::Group group, const void* x, void* y, std::int64_t elements,
                                    program::Dtype dtype, bool max) {
    library_.all_reduce(here(group_rank(group)), x, y, elements, dtype, max, queued_);
}

// One member's tokens are two runs of rows as they lie on the side of heads, and columns of every row on the side of
// tokens.
void QueuedCommunicator::all_to_all(plan::Group group, const void* x, void* y, const program::AllToAllAttr& attr,
                                    std::int64_t element_bytes) {
    const GroupRank& members = group_rank(group);
    const int parts = static_cast<int>(members.ranks.size());
    if (parts != attr.parts) fail("all_to_all: {} parts for a group of {}", attr.parts, parts);
    const std::int64_t rows = attr.to_heads ? attr.rows : attr.rows / parts; // rows of one member's tokens
    const std::int64_t narrow = attr.rows * attr.cols / (rows * parts) * element_bytes, half = rows / 2 * narrow;
    PartsShape shape{rows, {}, parts};
    std::copy(attr.pieces.begin(), attr.pieces.end(), shape.pieces);
    const Type type = element_bytes == 2 ? Type::bf16 : Type::f32;
    char* packed = slots(parts * rows * narrow);
    if (attr.to_heads) kernels_.split_columns(shape, {x, type}, {packed, type}, queued_);
    const CollectiveLibrary::Member to = here(members);
    library_.begin_group();
    for (int m = 0; m < parts; ++m)
        for (int run = 0; run < 2; ++run) {
            const std::int64_t by_tokens = m * rows * narrow + run * half,
                               by_heads = plan::run_start(m, run, parts, rows) * narrow;
            if (attr.to_heads) {
                library_.send(to, packed + by_tokens, half, m, queued_);
                library_.recv(to, offset(y, by_heads), half, m, queued_);
            } else {
                library_.send(to, offset(x, by_heads), half, m, queued_);
                library_.recv(to, packed + by_tokens, half, m, queued_);
            }
        }
    library_.end_group();
    if (!attr.to_heads) kernels_.join_columns(shape, {packed, type}, {y, type}, queued_);
}

void QueuedCommunicator::ring_exchange(plan::Group group, const void* x, void* y, std::int64_t bytes) {
    const GroupRank& members = group_rank(group);
    const int count = static_cast<int>(members.ranks.size());
    const CollectiveLibrary::Member to = here(members);
    library_.begin_group();
    library_.send(to, x, bytes, (members.index + 1) % count, queued_);
    library_.recv(to, y, bytes, (members.index + count - 1) % count, queued_);
    library_.end_group();
}

int QueuedCommunicator::peer_rank(int delta) { return peer_of(fabric_.mesh(), rank_, delta); }

QueuedCommunicator::SendRing& QueuedCommunicator::send_ring(const program::PeerAttr& peer) {
    const int stages = static_cast<int>(peers(fabric_.mesh(), rank_).size());
    return boxes_.at({(peer.delta % stages + stages) % stages, peer.tag, peer.stage});
}

void QueuedCommunicator::put(const program::PeerAttr& peer, const void* x, std::int64_t bytes) {
    SendRing& box = send_ring(peer);
    library_.copy(box.place(box.put++), x, bytes, queued_);
}

// Sends from the box, where put() has left the bytes.
void QueuedCommunicator::send(const program::PeerAttr& peer, const void*, std::int64_t bytes) {
    const int to = peer_rank(peer.delta);
    if (to == rank_) return; // The message need not leave the rank.
    SendRing& box = send_ring(peer);
    library_.send(member(program::stream_count + peer.tag, {rank_, to}), box.place(box.sent++), bytes, 1, queued_);
}

void QueuedCommunicator::recv(const program::PeerAttr& peer, void* y, std::int64_t bytes) {
    const int from = peer_rank(peer.delta);
    if (from == rank_) {
        SendRing& box = send_ring(peer);
        return library_.copy(y, box.place(box.received++), bytes, queued_);
    }
    library_.recv(member(program::stream_count + peer.tag, {from, rank_}), y, bytes, 0, queued_);
}

} // namespace moe::comm
