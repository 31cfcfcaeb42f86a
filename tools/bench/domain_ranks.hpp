// Ranks that are an NVLink domain each, as nodes of one GPU are: tokens go to them once, in slots that NCCL's messages
// exchange whole, or kernels through its windows in chunks.
#pragma once

#include "engine/comm/collectives.hpp"
#include "tools/bench/peer_ranks.hpp"

#include <cstdint>
#include <memory>
#include <vector>

namespace moe::bench {

using Members = std::vector<comm::CollectiveLibrary::Member>;   // of one communicator, by rank
using Windows = std::vector<std::unique_ptr<comm::SlotWindow>>; // of its members; empty where they have none

// Queues slot m of `out` to rank m and its slot for this rank into slot m of `in`, `bytes` each.
void exchange_slots(const comm::CollectiveLibrary::Member& member, int ranks, const char* out, char* in,
                    std::int64_t bytes, cudaStream_t stream);

// Queues the engine's ops of dispatch in two levels, with nothing to do on the second, between the operands of `ranks`.
// Which token goes where is worked out beforehand, as it is for the other ways that are measured.
class DomainRanks {
public:
    DomainRanks(const PeerRanks& ranks, const Members& members, const Windows& windows,
                const std::vector<Choices>& choices);
    ~DomainRanks();
    DomainRanks(const DomainRanks&) = delete;
    DomainRanks& operator=(const DomainRanks&) = delete;

    // chunks: through the windows, which there must be.
    void dispatch(int rank, bool chunks) const;
    void combine(int rank, bool chunks) const;

private:
    struct Buffers {
        char *out = nullptr, *in = nullptr;                 // slots, of a row for each token
        std::int32_t *slot_of = nullptr, *row_of = nullptr; // [tokens, ranks]; [ranks * tokens, top_k]
        std::int32_t* counts = nullptr;                     // [ranks, ranks]
    };
    void exchange(int rank, bool chunks, bool back) const;
    std::vector<std::int32_t> places(int rank, const std::vector<Choices>& choices) const;

    const PeerRanks& ranks_;
    const Members& members_;
    const Windows& windows_;
    std::vector<Buffers> buffers_;
    std::vector<std::vector<std::int32_t>> slot_of_; // by rank
};

} // namespace moe::bench
