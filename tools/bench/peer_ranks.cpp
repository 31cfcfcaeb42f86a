// Arenas of the same layout on each rank's device, and routing as permute_map makes it.
#include "tools/bench/peer_ranks.hpp"

#include "kernels/bf16.hpp"
#include "kernels/cuda/check.hpp"

#include <algorithm>
#include <cmath>
#include <random>

namespace moe::bench {

namespace {

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

template <class T>
void upload(T* to, const std::vector<T>& from) {
    CUDA_CHECK(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
}

} // namespace

Choices draw_choices(const TokenShape& shape, double skew, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<double> cost(static_cast<std::size_t>(shape.experts));
    std::vector<std::int32_t> order(cost.size());
    std::uniform_real_distribution<double> uniform(1e-12, 1.0);
    Choices choices;
    for (std::int64_t t = 0; t < shape.tokens; ++t) {
        // The smallest of exponentials with these rates: drawing without replacement.
        for (std::size_t e = 0; e < cost.size(); ++e) {
            cost[e] = -std::log(uniform(random)) * std::pow(static_cast<double>(e + 1), skew);
            order[e] = static_cast<std::int32_t>(e);
        }
        std::partial_sort(order.begin(), order.begin() + shape.top_k, order.end(), [&](std::int32_t a, std::int32_t b) {
            return cost[static_cast<std::size_t>(a)] < cost[static_cast<std::size_t>(b)];
        });
        choices.insert(choices.end(), order.begin(), order.begin() + shape.top_k);
    }
    return choices;
}

std::vector<char> random_rows(std::int64_t elements, Type type, std::uint64_t seed) {
    std::vector<char> out(static_cast<std::size_t>(elements) * size_of(type));
    std::uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    const std::int64_t drawn = std::min<std::int64_t>(elements, 4000037); // A prime makes rows differ.
    for (std::int64_t i = 0; i < drawn; ++i) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        const float value = static_cast<float>(static_cast<std::int32_t>(state >> 32) | 1) * 0x1p-30f;
        if (type == Type::f32) {
            reinterpret_cast<float*>(out.data())[i] = value;
        } else {
            reinterpret_cast<std::uint16_t*>(out.data())[i] = bf16_of_float(value);
        }
    }
    const std::size_t period = static_cast<std::size_t>(drawn) * size_of(type);
    for (std::size_t at = period; at < out.size(); at += period)
        std::copy_n(out.begin(), std::min(period, out.size() - at), out.begin() + static_cast<std::ptrdiff_t>(at));
    return out;
}

PeerRanks::PeerRanks(const PeerCase& sizes, const std::vector<Choices>& choices, int devices) : sizes_(sizes) {
    count(choices);
    CUDA_CHECK(cudaMallocHost(reinterpret_cast<void**>(&trouble_), sizeof(int)));
    *trouble_ = 0;
    lay_out(devices);
}

PeerRanks::~PeerRanks() {
    for (const PeerRank& r : ranks_) {
        cudaSetDevice(r.device);
        cudaStreamSynchronize(r.stream);
        cudaStreamDestroy(r.stream);
    }
    for (char* memory : memory_) cudaFree(memory);
    cudaFreeHost(trouble_);
    cudaSetDevice(0);
}

void PeerRanks::count(const std::vector<Choices>& choices) {
    const TokenShape& s = sizes_.shape;
    const auto experts = static_cast<std::size_t>(s.experts);
    std::vector<std::int64_t> arriving(static_cast<std::size_t>(sizes_.ranks));
    for (const Choices& mine : choices) {
        std::vector<std::int32_t> counts(experts), next(experts);
        for (const std::int32_t e : mine)
            if (e >= 0) ++counts[static_cast<std::size_t>(e)];
        for (std::size_t e = 1; e < experts; ++e) next[e] = next[e - 1] + counts[e - 1];
        std::vector<std::int32_t> row_of;
        for (const std::int32_t e : mine) row_of.push_back(e < 0 ? -1 : next[static_cast<std::size_t>(e)]++);
        for (std::size_t e = 0; e < experts; ++e)
            arriving[e * static_cast<std::size_t>(sizes_.ranks) / experts] += counts[e];
        all_counts_.insert(all_counts_.end(), counts.begin(), counts.end());
        row_of_.push_back(std::move(row_of));
    }
    if (s.capacity == 0)
        sizes_.shape.capacity = std::max<std::int64_t>(1, *std::max_element(arriving.begin(), arriving.end()));
}

void PeerRanks::lay_out(int devices) {
    const TokenShape& s = sizes_.shape;
    const auto element = static_cast<std::int64_t>(size_of(sizes_.type));
    const std::int64_t copies = s.tokens * s.top_k, ranks = sizes_.ranks;
    std::int64_t used = 0;
    const auto place = [&](std::int64_t bytes) {
        const std::int64_t at = used;
        used += aligned(bytes);
        return at;
    };
    const std::int64_t x = place(s.tokens * sizes_.row_bytes()), x_scale = place(s.tokens * sizes_.scale_bytes()),
                       counts = place(ranks * s.experts * 4), row_of = place(copies * 4), weight = place(copies * 4);
    results_ = used;
    // Combine reads them in `type`.
    const std::int64_t rows = place(s.capacity * s.cols * element),
                       row_scale = place(s.capacity * sizes_.scale_bytes()), probs = place(s.capacity * 4),
                       places = place(ranks * copies * 4), y = place(s.tokens * s.cols * element),
                       parts = place(s.parts_of(sizes_.ranks) * s.cols * element), by_copy = place(copies * 4);
    arena_bytes_ = used;
    for (int r = 0; r < sizes_.ranks; ++r) {
        PeerRank rank;
        rank.device = r % devices;
        CUDA_CHECK(cudaSetDevice(rank.device));
        for (int other = 0; other < devices; ++other)
            if (other != rank.device && cudaDeviceEnablePeerAccess(other, 0) != cudaSuccess) cudaGetLastError();
        CUDA_CHECK(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
        char *arena = nullptr, *board = nullptr;
        const std::int64_t flags = cuda_peer_kernels().board_bytes(sizes_.ranks, s.tokens);
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&arena), static_cast<std::size_t>(arena_bytes_)));
        memory_.push_back(arena);
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&board), static_cast<std::size_t>(flags)));
        memory_.push_back(board);
        CUDA_CHECK(cudaMemset(board, 0, static_cast<std::size_t>(flags)));
        const auto at = [&]<class T>(T*& operand, std::int64_t offset) {
            operand = reinterpret_cast<T*>(arena + offset);
        };
        at(rank.x, x), at(rank.x_scale, x_scale), at(rank.row_scale, row_scale), at(rank.all_counts, counts),
            at(rank.row_of, row_of), at(rank.weight, weight);
        at(rank.rows, rows), at(rank.probs, probs), at(rank.places, places), at(rank.y, y), at(rank.parts, parts);
        at(rank.by_copy, by_copy);
        const auto seed = static_cast<std::uint64_t>(100 + r);
        upload(rank.x, sizes_.quantized ? random_rows(s.tokens * s.cols / 4, Type::f32, seed) // any bytes
                                        : random_rows(s.tokens * s.cols, sizes_.type, seed));
        upload(rank.x_scale, random_rows(s.tokens * sizes_.scale_bytes() / 4, Type::f32, seed + 20));
        upload(reinterpret_cast<char*>(rank.weight), random_rows(copies, Type::f32, seed + 50));
        upload(rank.all_counts, all_counts_);
        upload(rank.row_of, row_of_[static_cast<std::size_t>(r)]);
        ranks_.push_back(rank);
        poison(r);
    }
    for (int r = 0; r < sizes_.ranks; ++r) {
        PeerGroup& group = ranks_[static_cast<std::size_t>(r)].group;
        group.ranks = sizes_.ranks;
        group.rank = r;
        group.blocks = sizes_.blocks;
        group.patience = sizes_.patience;
        group.trouble = trouble_;
        for (int other = 0; other < sizes_.ranks; ++other) {
            group.arena[other] = memory_[static_cast<std::size_t>(2 * other)];
            group.board[other] = memory_[static_cast<std::size_t>(2 * other + 1)];
        }
    }
    for (const PeerRank& rank : ranks_) {
        CUDA_CHECK(cudaSetDevice(rank.device));
        CUDA_CHECK(cudaDeviceSynchronize());
    }
}

void PeerRanks::poison(int rank) const {
    const PeerRank& r = ranks_[static_cast<std::size_t>(rank)];
    CUDA_CHECK(cudaSetDevice(r.device));
    CUDA_CHECK(cudaMemset(memory_[static_cast<std::size_t>(2 * rank)] + results_, 0xff,
                          static_cast<std::size_t>(arena_bytes_ - results_)));
    CUDA_CHECK(cudaDeviceSynchronize());
}

void PeerRanks::dispatch(int rank, bool forward) const {
    const PeerRank& r = ranks_[static_cast<std::size_t>(rank)];
    CUDA_CHECK(cudaSetDevice(r.device));
    const float* weight = forward ? r.weight : nullptr;
    if (sizes_.quantized)
        cuda_peer_kernels().dispatch_quantized(r.group, sizes_.shape, reinterpret_cast<const std::uint8_t*>(r.x),
                                               reinterpret_cast<const float*>(r.x_scale), r.all_counts, r.row_of,
                                               weight, reinterpret_cast<std::uint8_t*>(r.rows),
                                               reinterpret_cast<float*>(r.row_scale), r.probs, r.places, r.stream);
    else
        cuda_peer_kernels().dispatch(r.group, sizes_.shape, {r.x, sizes_.type}, r.all_counts, r.row_of, weight,
                                     {r.rows, sizes_.type}, r.probs, r.places, r.stream);
}

void PeerRanks::combine(int rank, bool with_values) const {
    const PeerRank& r = ranks_[static_cast<std::size_t>(rank)];
    CUDA_CHECK(cudaSetDevice(r.device));
    cuda_peer_kernels().combine(r.group, sizes_.shape, {r.rows, sizes_.type}, r.all_counts, r.row_of, r.places,
                                with_values ? r.probs : nullptr, {r.y, sizes_.type}, {r.parts, sizes_.type}, r.by_copy,
                                r.stream);
}

void PeerRanks::gather(int rank, const void* x, void* y, std::int64_t bytes) const {
    const PeerRank& r = ranks_[static_cast<std::size_t>(rank)];
    CUDA_CHECK(cudaSetDevice(r.device));
    cuda_peer_kernels().gather(r.group, x, y, bytes, r.stream);
}

int PeerRanks::wait() const {
    for (const PeerRank& r : ranks_) {
        CUDA_CHECK(cudaSetDevice(r.device));
        CUDA_CHECK(cudaStreamSynchronize(r.stream));
    }
    return *static_cast<volatile int*>(trouble_);
}

} // namespace moe::bench
