// Windows are made, then opened, and used where every member's were; a member's reason against them is enough.
#include "engine/comm/slot_exchange.hpp"

#include "planner/base/error.hpp"
#include "planner/program/op_attr.hpp"
#include "planner/program/peer_blocks.hpp"
#include "planner/program/slot_chunks.hpp"

#include <utility>

namespace moe::comm {

namespace {

// As that of tokens over peers' memory (peers.cpp).
constexpr double patience = 120.0;

// The planner's chunks are the kernels'.
constexpr bool same_chunks(std::int64_t rows, std::int64_t slot_rows) {
    return ChunkShape{slot_rows, program::slot_chunk_rows, 2, false}.moved_bytes(rows) ==
           2 * program::rows_in_chunks(rows, slot_rows);
}
static_assert(same_chunks(0, 300) && same_chunks(1, 300) && same_chunks(128, 300) && same_chunks(257, 300));

} // namespace

SlotExchange::SlotExchange(const CollectiveLibrary& library, device::Device& device, Place place,
                           std::int64_t slots_bytes, const std::function<bool(bool mine)>& all_agree)
    : place_(std::move(place)), host_(device.open_offload()), trouble_(host_->allocate(sizeof(int)), {host_.get()}) {
    if (!trouble_)
        fail("rank {}: cannot allocate {} bytes of pinned memory", place_.ranks[static_cast<std::size_t>(place_.index)],
             sizeof(int));
    host_->fill(trouble_.get(), 0, sizeof(int));
    std::string why = opened(library, slots_bytes, all_agree);
    if (!why.empty()) {
        window_.reset();
        by_ = "whole slots by messages: " + why;
        return;
    }
    by_ = fmt::format("chunks of {} rows by {}", program::slot_chunk_rows, window_->name());
    group_ = window_->group();
    group_.patience = patience;
    group_.trouble = reinterpret_cast<int*>(trouble_.get());
}

// Why not; empty where all windows are open. Members come to all_agree() as often, whatever their own answers.
std::string SlotExchange::opened(const CollectiveLibrary& library, std::int64_t slots_bytes,
                                 const std::function<bool(bool mine)>& all_agree) {
    if (slots_bytes == 0) return "nearly all of their rows are expected to be filled";
    if (library.slot_window == nullptr) return "the library of collectives has no windows";
    constexpr const char* another = "another rank cannot have a window";
    std::string why;
    window_ = library.slot_window(place_.member, slots_bytes, program::peer_blocks_beside, why);
    if (!all_agree(window_ != nullptr)) return why.empty() ? another : why;
    why = window_->open();
    if (!all_agree(why.empty())) return why.empty() ? another : why;
    return "";
}

void SlotExchange::exchange(const program::RowsAttr& attr, const void* x, const std::int32_t* counts, void* y,
                            program::Dtype dtype, void* stream) const {
    const ChunkShape shape{attr.capacity, program::slot_chunk_rows, program::bytes_of(dtype, attr.cols), attr.combine};
    window_->kernels().exchange(group_, shape, x, counts, y, stream);
}

void SlotExchange::check() const {
    const int late = *reinterpret_cast<const volatile int*>(trouble_.get());
    if (late != 0)
        fail("rank {}: an exchange between domains has waited {:.0f} s for rank {}: look there for what holds it up",
             place_.ranks[static_cast<std::size_t>(place_.index)], patience,
             place_.ranks[static_cast<std::size_t>(late - 1)]);
}

} // namespace moe::comm
