// Routed rows between ranks: packed into slots of one size, exchanged as a collective, unpacked where they belong.
#include "engine/comm/queued.hpp"
#include "engine/comm/rows.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/program.hpp"

namespace moe::comm {

namespace {

Type storage(program::Dtype dtype) { return dtype == program::Dtype::bf16 ? Type::bf16 : Type::f32; }

} // namespace

SlotShape QueuedCommunicator::slot_shape(const program::RowsAttr& attr, RowParts parts, std::int64_t rows,
                                         std::int64_t capacity) {
    SlotShape shape;
    shape.parts = parts;
    shape.cols = attr.cols;
    shape.slot_rows = rows;
    shape.capacity = capacity;
    shape.experts = attr.experts;
    shape.ep = attr.ep;
    shape.etp = attr.etp;
    shape.rank = index({plan::Domain::expert, plan::axis::expert});
    shape.member = index({plan::Domain::expert, plan::axis::tensor});
    return shape;
}

// Slot m of x goes to member m, whose slot for me comes to slot m of y; `bytes` each.
void QueuedCommunicator::exchange_slots(const GroupRank& group_rank, const char* x, char* y, std::int64_t bytes) {
    const CollectiveLibrary::Member to = here(group_rank);
    const int members = static_cast<int>(group_rank.ranks.size());
    library_.begin_group();
    for (int m = 0; m < members; ++m) {
        library_.send(to, x + m * bytes, bytes, m, queued_);
        library_.recv(to, y + m * bytes, bytes, m, queued_);
    }
    library_.end_group();
}

void QueuedCommunicator::all_to_all_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                         const program::RowsAttr& attr, program::Dtype dtype, std::int64_t x_rows,
                                         std::int64_t capacity_rows) {
    const GroupRank& members = group_rank(group);
    const std::int64_t rows = program::slot_rows(x_rows, capacity_rows),
                       bytes = rows * program::bytes_of(dtype, attr.cols);
    char* out = slots(2 * attr.ep * bytes);
    char* in = out + attr.ep * bytes;
    const RowParts there = attr.combine ? RowParts::arriving : RowParts::sent,
                   here = attr.combine ? RowParts::sent : RowParts::arriving;
    const Type type = storage(dtype);
    kernels_.rows_to_slots(slot_shape(attr, there, rows, x_rows), {x, type}, all_counts, {out, type}, queued_);
    exchange_slots(members, out, in, bytes);
    kernels_.slots_to_rows(slot_shape(attr, here, rows, capacity_rows), {in, type}, all_counts, {y, type}, queued_);
}

// The host knows no counts: the device moves the chunks that are filled, or slots travel whole as they are, between the
// operands themselves.
void QueuedCommunicator::all_to_all_slots(plan::Group group, const void* x, const std::int32_t* counts, void* y,
                                          const program::RowsAttr& attr, program::Dtype dtype) {
    if (exchange_->open()) return exchange_->exchange(attr, x, counts, y, dtype, queued_);
    exchange_slots(group_rank(group), static_cast<const char*>(x), static_cast<char*>(y),
                   attr.capacity * program::bytes_of(dtype, attr.cols));
}

void QueuedCommunicator::all_gather_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                         const program::RowsAttr& attr, program::Dtype dtype, std::int64_t x_rows,
                                         std::int64_t capacity_rows) {
    const std::int64_t bytes = x_rows * program::bytes_of(dtype, attr.cols);
    char* in = slots(attr.etp * bytes);
    library_.all_gather(here(group_rank(group)), x, in, bytes, queued_);
    const Type type = storage(dtype);
    kernels_.slots_to_rows(slot_shape(attr, RowParts::gathered, x_rows, capacity_rows), {in, type}, all_counts,
                           {y, type}, queued_);
}

void QueuedCommunicator::reduce_scatter_rows(plan::Group group, const void* x, const std::int32_t* all_counts, void* y,
                                             const program::RowsAttr& attr, program::Dtype dtype, std::int64_t x_rows,
                                             std::int64_t capacity_rows) {
    char* out = slots(attr.etp * capacity_rows * program::bytes_of(dtype, attr.cols));
    const Type type = storage(dtype);
    kernels_.rows_to_slots(slot_shape(attr, RowParts::gathered, capacity_rows, x_rows), {x, type}, all_counts,
                           {out, type}, queued_);
    library_.reduce_scatter(here(group_rank(group)), out, y, capacity_rows * attr.cols, dtype, queued_);
}

} // namespace moe::comm
