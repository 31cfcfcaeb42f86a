// Handles of arenas and boards handed round, and the group that the kernels are called with.
#include "engine/comm/peers.hpp"

#include "planner/base/error.hpp"
#include "planner/program/op_attr.hpp"
#include "planner/program/peer_blocks.hpp"

#include <cstring>

namespace moe::comm {

namespace {

// Longer than any wait of a healthy run: the others may be writing a checkpoint. Hangs inside a step are noticed by the
// watchdog, which is sooner.
constexpr double patience = 120.0;

} // namespace

PeerMemory::PeerMemory(const PeerLibrary& library, device::Device& device, Place place, char* arena,
                       std::int64_t arena_bytes, std::int64_t tokens, int blocks,
                       const std::function<std::vector<char>(const std::vector<char>& mine)>& all_gather)
    : library_(library),
      place_(std::move(place)),
      arena_bytes_(arena_bytes),
      board_bytes_(library.kernels().board_bytes(static_cast<int>(place_.ranks.size()), tokens)),
      board_(device.allocate(static_cast<std::size_t>(board_bytes_)), Release{&device}),
      host_(device.open_offload()),
      trouble_(host_->allocate(sizeof(int)), Release{host_.get()}) {
    const int me = place_.ranks[static_cast<std::size_t>(place_.index)];
    if (!board_ || !trouble_) fail("rank {}: cannot allocate {} bytes for dispatch's flags", me, board_bytes_);
    device.fill(board_.get(), 0, static_cast<std::size_t>(board_bytes_));
    host_->fill(trouble_.get(), 0, sizeof(int));
    const std::size_t ranks = place_.ranks.size(), size = sizeof(PeerLibrary::Handle);
    std::vector<char> mine;
    for (char* memory : {arena, board_.get()}) {
        const PeerLibrary::Handle handle = library_.share(memory);
        mine.insert(mine.end(), handle.begin(), handle.end());
    }
    const std::vector<char> all = all_gather(mine);
    group_.ranks = static_cast<int>(ranks);
    group_.rank = place_.index;
    group_.blocks = blocks;
    group_.patience = patience;
    group_.trouble = reinterpret_cast<int*>(trouble_.get());
    for (std::size_t r = 0; r < ranks; ++r)
        for (std::size_t part = 0; part < 2; ++part) {
            char*& at = part == 0 ? group_.arena[r] : group_.board[r];
            if (static_cast<int>(r) == place_.index) {
                at = part == 0 ? arena : board_.get();
                continue;
            }
            PeerLibrary::Handle handle;
            std::memcpy(handle.data(), all.data() + (2 * r + part) * size, size);
            std::string why;
            at = library_.reach(handle, why);
            if (at == nullptr)
                refuse("dispatcher = hybridep: rank {} cannot reach the memory of rank {}: {}: set dispatcher=alltoall",
                       me, place_.ranks[r], why);
            mapped_.push_back({handle, at});
        }
}

PeerMemory::~PeerMemory() {
    for (const Mapped& m : mapped_) library_.let_go(m.handle, m.memory);
}

void PeerMemory::exchange(const program::RowsAttr& attr, const TokenOperands& t, void* stream) const {
    PeerGroup group = group_;
    if (t.beside) group.blocks = program::peer_blocks_beside;
    const TokenShape shape{t.tokens, attr.cols, attr.capacity, t.top_k, attr.experts};
    const Type type = t.dtype == program::Dtype::bf16 ? Type::bf16 : Type::f32;
    if (attr.combine)
        library_.kernels().combine(group, shape, {t.in, type}, t.all_counts, t.row_of, t.places, t.values,
                                   {t.out, type}, {t.parts, type}, t.values_out, stream);
    else if (t.in_scale != nullptr)
        library_.kernels().dispatch_quantized(group, shape, static_cast<const std::uint8_t*>(t.in), t.in_scale,
                                              t.all_counts, t.row_of, t.values, static_cast<std::uint8_t*>(t.out),
                                              t.out_scale, t.values_out, t.places_out, stream);
    else
        library_.kernels().dispatch(group, shape, {t.in, type}, t.all_counts, t.row_of, t.values, {t.out, type},
                                    t.values_out, t.places_out, stream);
}

bool PeerMemory::gathers(const void* y, std::int64_t bytes) const {
    const char* mine = group_.arena[group_.rank];
    const auto* at = static_cast<const char*>(y);
    return bytes % 4 == 0 && group_.ranks * bytes <= program::most_gathered_over_peers && at >= mine &&
           at < mine + arena_bytes_;
}

void PeerMemory::gather(const void* x, void* y, std::int64_t bytes, void* stream) const {
    library_.kernels().gather(group_, x, y, bytes, stream);
}

void PeerMemory::check() const {
    const int late = *static_cast<const volatile int*>(group_.trouble);
    if (late != 0)
        fail("rank {}: dispatch has waited {:.0f} s for rank {}: look there for what holds it up",
             place_.ranks[static_cast<std::size_t>(place_.index)], patience,
             place_.ranks[static_cast<std::size_t>(late - 1)]);
}

} // namespace moe::comm
