// Counts the communicators that the communication of a Program needs, and adds up its buffers.
#include "planner/program/communicators.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"
#include "planner/program/peer_blocks.hpp"
#include "planner/program/program.hpp"
#include "planner/program/slot_chunks.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>
#include <vector>

namespace moe::program {

namespace {

const PeerAttr* message(const Op& op) { return std::get_if<PeerAttr>(&op.attr); }

const Tensor& tensor(const Program& program, TensorId id) { return program.tensors[static_cast<std::size_t>(id)]; }

int first_rank(const Program& program, const plan::Mesh& mesh) {
    int rank = 0;
    while (mesh.coordinate(plan::Domain::dense, plan::axis::pipeline, rank) != program.pipeline_rank) ++rank;
    return rank;
}

std::int64_t buffers_of(const Program& program, int stages) {
    std::int64_t bytes = all_slots(program);
    for (const auto& [channel, box] : boxes_of(program, stages)) bytes += box.places * ((box.bytes + 255) / 256 * 256);
    return bytes;
}

} // namespace

Channel channel_of(const PeerAttr& peer, int stages) {
    return {((peer.delta % stages) + stages) % stages, peer.tag, peer.stage};
}

std::map<Channel, Box> boxes_of(const Program& program, int stages) {
    std::map<Channel, Box> boxes;
    std::map<Channel, int> waiting;
    for (OpWalk walk(program); !walk.done(); walk.next()) {
        const Op& op = walk.op();
        if (message(op) == nullptr) continue;
        const Channel channel = channel_of(*message(op), stages);
        const bool sends = op.kind == OpKind::send;
        if (!sends && channel.delta != 0) continue;
        Box& box = boxes[channel];
        if (channel.delta == 0) box.places = std::max(box.places, waiting[channel] += sends ? 1 : -1);
        box.bytes = std::max(box.bytes, tensor(program, sends ? op.in[0] : op.out[0]).bytes());
    }
    return boxes;
}

std::int64_t slots_of(const Program& program, const Op& op) {
    if (op.kind < OpKind::all_to_all_rows || op.kind > OpKind::all_to_all) return 0;
    const Tensor &x = tensor(program, op.in[0]), &y = tensor(program, op.out[0]);
    if (op.kind == OpKind::all_to_all) return x.bytes();
    const RowsAttr& attr = std::get<RowsAttr>(op.attr);
    const std::int64_t row = bytes_of(x.dtype, attr.cols);
    if (op.kind == OpKind::all_gather_rows) return attr.etp * x.rows * row;
    if (op.kind == OpKind::reduce_scatter_rows) return attr.etp * y.rows * row;
    return 2 * attr.ep * slot_rows(x.rows, y.rows) * row;
}

bool sends_chunks(const Program& program) {
    for (const Template& ops : program.templates)
        for (const Op& op : ops.ops) {
            if (op.kind != OpKind::all_to_all_slots) continue;
            const RowsAttr& attr = std::get<RowsAttr>(op.attr);
            if (chunks_gain(tensor(program, op.out[0]).expected_rows / attr.ep, attr.capacity)) return true;
        }
    return false;
}

std::int64_t windows_of(const Program& program) {
    if (!sends_chunks(program)) return 0;
    std::int64_t slots = 0;
    for (const Template& ops : program.templates)
        for (const Op& op : ops.ops)
            if (op.kind == OpKind::all_to_all_slots) slots = std::max(slots, tensor(program, op.in[0]).bytes());
    return 2 * slots;
}

std::int64_t all_slots(const Program& program) {
    std::array<std::int64_t, stream_count> slots{};
    for (const Template& ops : program.templates)
        for (const Op& op : ops.ops) {
            std::int64_t& most = slots[static_cast<std::size_t>(op.stream)];
            most = std::max(most, slots_of(program, op));
        }
    return std::accumulate(slots.begin(), slots.end(), std::int64_t{0});
}

int reserved_sms_of(const Program& program, int stages) {
    int messages = 0, copies = 0;
    for (const Template& ops : program.templates)
        for (const Op& op : ops.ops) {
            if (message(op) != nullptr && channel_of(*message(op), stages).delta != 0) messages = 2 * message_channels;
            if (copies_with_host(op.kind) && op.phase != Phase::step) copies = host_copy_blocks;
        }
    return messages + copies;
}

int reserved_sms_of(const plan::Plan& plan) {
    return (joins_devices(plan) && plan.pp > 1 ? 2 * message_channels : 0) +
           ((plan.offload & plan::offload::activations) != 0 ? host_copy_blocks : 0);
}

bool joins_devices(const plan::Plan& plan) {
    return plan::stack_traits(plan).joins_devices && !plan.hardware->cpu && plan.gpus > 1;
}

bool is_pairwise(OpKind kind) {
    return kind == OpKind::all_to_all_rows || kind == OpKind::all_to_all || kind == OpKind::all_to_all_slots ||
           kind == OpKind::ring_exchange;
}

Communicators communicators_of(const Program& program, const plan::Mesh& mesh) {
    const int stages = mesh.group_size({plan::Domain::dense, plan::axis::pipeline}), rank = first_rank(program, mesh);
    std::map<std::pair<int, std::vector<int>>, bool> groups; // pairwise or not, by stream and members
    std::map<std::array<int, 3>, bool> lines;                // lines by peer, tag and direction
    for (const Template& ops : program.templates)
        for (const Op& op : ops.ops) {
            if (!is_communication(op.kind)) continue;
            if (const PeerAttr* peer = message(op)) {
                const int delta = channel_of(*peer, stages).delta;
                if (delta != 0) lines[{delta, peer->tag, op.kind == OpKind::send}] = true;
                continue;
            }
            bool& sends = groups[{static_cast<int>(op.stream), mesh.members(op.group, rank)}];
            sends = sends || is_pairwise(op.kind);
        }
    Communicators all;
    for (const auto& [group, sends] : groups)
        (sends ? all.pairwise : all.collective).push_back(static_cast<int>(group.second.size()));
    all.messages = static_cast<int>(lines.size());
    all.buffer_bytes = buffers_of(program, stages);
    all.window_bytes = windows_of(program);
    return all;
}

double Communicators::bytes(const machine::CommunicatorBytes& each) const {
    const bool any = !collective.empty() || !pairwise.empty() || messages > 0;
    double bytes =
        (any ? each.first : 0.0) + each.messages * messages + static_cast<double>(buffer_bytes + window_bytes);
    if (!pairwise.empty()) bytes += each.first_pairwise;
    for (const int members : collective) bytes += machine::bytes_among(each.collective, members);
    for (const int members : pairwise) bytes += machine::bytes_among(each.pairwise, members);
    return bytes;
}

int peer_blocks(const Program& program) {
    for (const Template& ops : program.templates)
        for (const Op& op : ops.ops)
            if (op.kind == OpKind::send) return peer_blocks_in_pipeline;
    return peer_blocks_alone;
}

} // namespace moe::program
