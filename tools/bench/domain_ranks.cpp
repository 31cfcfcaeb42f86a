// Slots of tokens by destination, and the rows that their copies become there.
#include "tools/bench/domain_ranks.hpp"

#include "engine/backends/cuda/backend.hpp"
#include "kernels/cuda/check.hpp"
#include "planner/program/slot_chunks.hpp"

namespace moe::bench {

namespace {

template <class T>
T* on_device(std::size_t elements) {
    T* memory = nullptr;
    CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&memory), elements * sizeof(T)));
    CUDA_CHECK(cudaMemset(memory, 0, elements * sizeof(T)));
    return memory;
}

std::int32_t* uploaded(const std::vector<std::int32_t>& from) {
    auto* to = on_device<std::int32_t>(from.size());
    CUDA_CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof from[0], cudaMemcpyHostToDevice));
    return to;
}

} // namespace

void exchange_slots(const comm::CollectiveLibrary::Member& member, int ranks, const char* out, char* in,
                    std::int64_t bytes, cudaStream_t stream) {
    const comm::CollectiveLibrary& nccl = backends::nccl_library();
    nccl.begin_group();
    for (int m = 0; m < ranks; ++m) {
        nccl.send(member, out + m * bytes, bytes, m, stream);
        nccl.recv(member, in + m * bytes, bytes, m, stream);
    }
    nccl.end_group();
}

DomainRanks::DomainRanks(const PeerRanks& ranks, const Members& members, const Windows& windows,
                         const std::vector<Choices>& choices)
    : ranks_(ranks), members_(members), windows_(windows) {
    const TokenShape& s = ranks.sizes().shape;
    const auto tokens = static_cast<std::size_t>(s.tokens), top_k = static_cast<std::size_t>(s.top_k),
               domains = static_cast<std::size_t>(ranks.count());
    const int local = s.experts / ranks.count();
    std::vector<std::int32_t> counts; // by sender and receiver
    for (const Choices& mine : choices) {
        std::vector<std::int32_t> slot_of(tokens * domains, -1), used(domains);
        for (std::size_t t = 0; t < tokens; ++t)
            for (std::size_t k = 0; k < top_k; ++k) {
                if (mine[t * top_k + k] < 0) continue;
                const auto d = static_cast<std::size_t>(mine[t * top_k + k] / local);
                std::int32_t& slot = slot_of[t * domains + d];
                if (slot < 0) slot = static_cast<std::int32_t>(d * tokens) + used[d]++;
            }
        slot_of_.push_back(std::move(slot_of));
        counts.insert(counts.end(), used.begin(), used.end());
    }
    const std::size_t slots = domains * tokens * static_cast<std::size_t>(s.cols) * size_of(ranks.sizes().type);
    for (int r = 0; r < ranks.count(); ++r) {
        CUDA_CHECK(cudaSetDevice(ranks[r].device));
        buffers_.push_back({on_device<char>(slots), on_device<char>(slots),
                            uploaded(slot_of_[static_cast<std::size_t>(r)]), uploaded(places(r, choices)),
                            uploaded(counts)});
    }
}

DomainRanks::~DomainRanks() {
    for (const Buffers& b : buffers_) {
        for (char* memory : {b.out, b.in}) cudaFree(memory);
        for (std::int32_t* memory : {b.slot_of, b.row_of, b.counts}) cudaFree(memory);
    }
}

// Rows, expert by expert and in the order of the slots, of what the choices of tokens in this rank's slots are.
std::vector<std::int32_t> DomainRanks::places(int rank, const std::vector<Choices>& choices) const {
    const TokenShape& s = ranks_.sizes().shape;
    const auto tokens = static_cast<std::size_t>(s.tokens), top_k = static_cast<std::size_t>(s.top_k),
               domains = static_cast<std::size_t>(ranks_.count()), me = static_cast<std::size_t>(rank);
    const int local = s.experts / ranks_.count();
    std::vector<std::int32_t> index(domains * tokens * top_k, -1), next(static_cast<std::size_t>(local) + 1);
    for (std::size_t from = 0; from < domains; ++from)
        for (std::size_t t = 0; t < tokens; ++t) {
            const std::int32_t slot = slot_of_[from][t * domains + me];
            if (slot < 0) continue;
            const std::size_t row = from * tokens + static_cast<std::size_t>(slot) - me * tokens;
            for (std::size_t k = 0; k < top_k; ++k) {
                const std::int32_t expert = choices[from][t * top_k + k];
                if (expert < 0 || expert / local != rank) continue;
                index[row * top_k + k] = expert % local;
                ++next[static_cast<std::size_t>(expert % local) + 1];
            }
        }
    for (std::size_t e = 1; e < next.size(); ++e) next[e] += next[e - 1];
    for (std::int32_t& place : index)
        if (place >= 0) place = next[static_cast<std::size_t>(place)]++;
    return index;
}

void DomainRanks::exchange(int rank, bool chunks, bool back) const {
    const TokenShape& s = ranks_.sizes().shape;
    const Buffers& b = buffers_[static_cast<std::size_t>(rank)];
    const std::int64_t row = s.cols * static_cast<std::int64_t>(size_of(ranks_.sizes().type));
    const cudaStream_t stream = ranks_[rank].stream;
    if (!chunks)
        return exchange_slots(members_[static_cast<std::size_t>(rank)], ranks_.count(), b.out, b.in, s.tokens * row,
                              stream);
    const comm::SlotWindow& window = *windows_[static_cast<std::size_t>(rank)];
    window.kernels().exchange(window.group(), {s.tokens, program::slot_chunk_rows, row, back}, b.out, b.counts, b.in,
                              stream);
}

void DomainRanks::dispatch(int rank, bool chunks) const {
    const TokenShape& s = ranks_.sizes().shape;
    const Type type = ranks_.sizes().type;
    const Kernels& k = *cuda_kernels();
    const PeerRank& of = ranks_[rank];
    const Buffers& b = buffers_[static_cast<std::size_t>(rank)];
    const int domains = ranks_.count();
    k.permute({s.tokens, s.cols, domains, false, 0}, {of.x, type}, b.slot_of, {b.out, type}, of.stream);
    exchange(rank, chunks, false);
    k.permute({domains * s.tokens, s.cols, s.top_k, false, 0}, {b.in, type}, b.row_of, {of.rows, type}, of.stream);
}

void DomainRanks::combine(int rank, bool chunks) const {
    const TokenShape& s = ranks_.sizes().shape;
    const Type type = ranks_.sizes().type;
    const Kernels& k = *cuda_kernels();
    const PeerRank& of = ranks_[rank];
    const Buffers& b = buffers_[static_cast<std::size_t>(rank)];
    const int domains = ranks_.count();
    k.unpermute({domains * s.tokens, s.cols, s.top_k, false, 0}, {of.rows, type}, b.row_of, {b.out, type}, of.stream);
    exchange(rank, chunks, true);
    k.unpermute({s.tokens, s.cols, domains, false, 0}, {b.in, type}, b.slot_of, {of.y, type}, of.stream);
}

} // namespace moe::bench
