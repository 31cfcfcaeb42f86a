// Dispatch and combine over peer memory against loops on the host: several ranks on one device, each on a stream of its
// own, and one per device where there are several.
#include "kernels/bf16.hpp"
#include "kernels/cuda/check.hpp"
#include "tools/bench/peer_ranks.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>

using namespace moe;
using namespace moe::bench;

namespace {

template <class T>
std::vector<T> download(const T* from, std::int64_t count) {
    std::vector<T> out(static_cast<std::size_t>(count));
    CUDA_CHECK(cudaMemcpy(out.data(), from, out.size() * sizeof(T), cudaMemcpyDefault));
    return out;
}

double element(const std::vector<char>& data, Type type, std::int64_t i) {
    if (type == Type::f32) return static_cast<double>(reinterpret_cast<const float*>(data.data())[i]);
    return static_cast<double>(float_of_bf16(reinterpret_cast<const std::uint16_t*>(data.data())[i]));
}

// The place where a copy belongs: rows of an expert in the order of (rank, token, k), those of a rank's experts in a
// row.
struct Copy {
    int rank, k;
    std::int64_t token, place;
};
std::vector<std::vector<Copy>> copies_by_rank(const PeerRanks& ranks, const std::vector<Choices>& choices) {
    const TokenShape& s = ranks.sizes().shape;
    std::vector<std::vector<Copy>> out(static_cast<std::size_t>(ranks.count()));
    const int local = s.experts / ranks.count();
    for (int e = 0; e < s.experts; ++e)
        for (int r = 0; r < ranks.count(); ++r)
            for (std::int64_t c = 0; c < s.tokens * s.top_k; ++c)
                if (choices[static_cast<std::size_t>(r)][static_cast<std::size_t>(c)] == e) {
                    std::vector<Copy>& rank = out[static_cast<std::size_t>(e / local)];
                    rank.push_back(
                        {r, static_cast<int>(c % s.top_k), c / s.top_k, static_cast<std::int64_t>(rank.size())});
                }
    return out;
}

// Rows of `row` bytes of every copy that are not those of its token, and bytes behind them that have been written.
int wrong_rows(const PeerRanks& ranks, const std::vector<std::vector<Copy>>& copies, char* PeerRank::*from,
               char* PeerRank::*to, std::int64_t row) {
    const TokenShape& s = ranks.sizes().shape;
    std::vector<std::vector<char>> x;
    for (int r = 0; r < ranks.count(); ++r) x.push_back(download(ranks[r].*from, s.tokens * row));
    int wrong = 0;
    for (int r = 0; r < ranks.count(); ++r) {
        const auto rows = download(ranks[r].*to, s.capacity * row);
        const auto& mine = copies[static_cast<std::size_t>(r)];
        for (const Copy& c : mine) {
            const char* want = x[static_cast<std::size_t>(c.rank)].data() + c.token * row;
            if (std::memcmp(rows.data() + c.place * row, want, static_cast<std::size_t>(row)) != 0) ++wrong;
        }
        for (std::int64_t i = static_cast<std::int64_t>(mine.size()) * row; i < s.capacity * row; ++i)
            if (rows[static_cast<std::size_t>(i)] != '\xff') ++wrong;
    }
    return wrong;
}

// Rows, their scales and weights lie where they belong, bit for bit, and nothing else has been written.
void check_dispatch(const PeerRanks& ranks, const std::vector<std::vector<Copy>>& copies, bool forward) {
    const PeerCase& sizes = ranks.sizes();
    CHECK(wrong_rows(ranks, copies, &PeerRank::x, &PeerRank::rows, sizes.row_bytes()) == 0);
    if (sizes.quantized)
        CHECK(wrong_rows(ranks, copies, &PeerRank::x_scale, &PeerRank::row_scale, sizes.scale_bytes()) == 0);
    if (!forward) return;
    int wrong = 0;
    for (int r = 0; r < ranks.count(); ++r) {
        const auto probs = download(ranks[r].probs, sizes.shape.capacity);
        for (const Copy& c : copies[static_cast<std::size_t>(r)]) {
            const float weight = download(ranks[c.rank].weight + c.token * sizes.shape.top_k + c.k, 1)[0];
            if (probs[static_cast<std::size_t>(c.place)] != weight) ++wrong;
        }
    }
    CHECK(wrong == 0);
}

// Sums of the rows that lie there, and each copy's value; dropped copies get 0.
void check_combine(const PeerRanks& ranks, const std::vector<std::vector<Copy>>& copies, double tolerance) {
    const TokenShape& s = ranks.sizes().shape;
    const Type type = ranks.sizes().type;
    const auto row = s.cols * static_cast<std::int64_t>(size_of(type));
    std::vector<std::vector<double>> want(static_cast<std::size_t>(ranks.count()));
    std::vector<std::vector<float>> values(want.size());
    for (auto& y : want) y.resize(static_cast<std::size_t>(s.tokens * s.cols));
    for (auto& v : values) v.resize(static_cast<std::size_t>(s.tokens * s.top_k));
    for (int r = 0; r < ranks.count(); ++r) {
        const auto rows = download(ranks[r].rows, s.capacity * row);
        const auto probs = download(ranks[r].probs, s.capacity);
        for (const Copy& c : copies[static_cast<std::size_t>(r)]) {
            auto& y = want[static_cast<std::size_t>(c.rank)];
            for (std::int64_t i = 0; i < s.cols; ++i)
                y[static_cast<std::size_t>(c.token * s.cols + i)] += element(rows, type, c.place * s.cols + i);
            values[static_cast<std::size_t>(c.rank)][static_cast<std::size_t>(c.token * s.top_k + c.k)] =
                probs[static_cast<std::size_t>(c.place)];
        }
    }
    for (int r = 0; r < ranks.count(); ++r) {
        const auto y = download(ranks[r].y, s.tokens * row);
        double error = 0.0, norm = 0.0;
        for (std::int64_t i = 0; i < s.tokens * s.cols; ++i) {
            const double at = want[static_cast<std::size_t>(r)][static_cast<std::size_t>(i)];
            error += (element(y, type, i) - at) * (element(y, type, i) - at);
            norm += at * at;
        }
        CHECK(std::sqrt(error) <= tolerance * std::sqrt(norm));
        CHECK(download(ranks[r].by_copy, s.tokens * s.top_k) == values[static_cast<std::size_t>(r)]);
    }
}

int devices() {
    int count = 0;
    CUDA_CHECK(cudaGetDeviceCount(&count));
    return count;
}

// Forward, the same as a graph played twice, and the ops that read places of a call before. So few blocks that those of
// all ranks of a device run at once.
void check_case(PeerCase sizes, const std::vector<Choices>& choices, int on) {
    sizes.blocks = std::min(sizes.blocks, 96 * on / sizes.ranks);
    const TokenShape& s = sizes.shape;
    INFO(sizes.ranks, " ranks on ", on, " devices, ", s.tokens, " tokens of ", s.cols, ", top ", s.top_k, " of ",
         s.experts,
         sizes.quantized           ? " e4m3"
         : sizes.type == Type::f32 ? " f32"
                                   : " bf16");
    const PeerRanks ranks(sizes, choices, on);
    const auto copies = copies_by_rank(ranks, choices);
    // One rounding of each rank's sum, and one of their sum.
    const double tolerance = sizes.type == Type::f32 ? 3e-6 : 6e-3;
    REQUIRE(ranks.all([&](int r) { ranks.dispatch(r, true); }) == 0);
    check_dispatch(ranks, copies, true);
    if (!sizes.quantized) {
        REQUIRE(ranks.all([&](int r) { ranks.combine(r, true); }) == 0);
        check_combine(ranks, copies, tolerance);
    }

    std::vector<cudaGraphExec_t> graphs;
    for (int r = 0; r < ranks.count(); ++r) {
        CUDA_CHECK(cudaSetDevice(ranks[r].device));
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t record = nullptr;
        CUDA_CHECK(cudaStreamBeginCapture(ranks[r].stream, cudaStreamCaptureModeThreadLocal));
        ranks.dispatch(r, true);
        if (!sizes.quantized) ranks.combine(r, true);
        CUDA_CHECK(cudaStreamEndCapture(ranks[r].stream, &graph));
        CUDA_CHECK(cudaGraphInstantiate(&record, graph, 0));
        CUDA_CHECK(cudaGraphDestroy(graph));
        graphs.push_back(record);
        ranks.poison(r);
    }
    for (int play = 0; play < 2; ++play)
        for (int r = 0; r < ranks.count(); ++r) {
            CUDA_CHECK(cudaSetDevice(ranks[r].device));
            CUDA_CHECK(cudaGraphLaunch(graphs[static_cast<std::size_t>(r)], ranks[r].stream));
        }
    REQUIRE(ranks.wait() == 0);
    check_dispatch(ranks, copies, true);
    if (!sizes.quantized) check_combine(ranks, copies, tolerance);
    for (cudaGraphExec_t graph : graphs) CUDA_CHECK(cudaGraphExecDestroy(graph));

    REQUIRE(ranks.all([&](int r) { ranks.dispatch(r, false); }) == 0);
    check_dispatch(ranks, copies, false);
}

std::vector<Choices> drawn(const PeerCase& sizes, double skew) {
    std::vector<Choices> out;
    for (int r = 0; r < sizes.ranks; ++r)
        out.push_back(draw_choices(sizes.shape, skew, static_cast<std::uint64_t>(7 * r + 1)));
    return out;
}

void check_shapes(int on) {
    for (const int ranks : {1, 2, 4, 8}) {
        if (ranks % on != 0) continue;
        for (const Type type : {Type::f32, Type::bf16})
            for (const double skew : {0.0, 1.5}) {
                PeerCase sizes{ranks, {67, 264, 0, 4, 32}, type};
                check_case(sizes, drawn(sizes, skew), on);
                sizes.shape = {5, 2048, 0, 8, 128};
                check_case(sizes, drawn(sizes, skew), on);
                sizes.shape = {1, 8, 100, 1, 8}; // fewer tokens than a tile, room to spare
                check_case(sizes, drawn(sizes, skew), on);
            }
        for (const std::int64_t cols : {512, 2048, 2560}) {
            PeerCase sizes{ranks, {67, cols, 0, 4, 32}};
            sizes.quantized = true;
            check_case(sizes, drawn(sizes, 1.5), on);
        }
    }
    PeerCase wide{2, {600, 7168, 0, 8, 256}, Type::bf16};
    for (const bool quantized : {false, true}) {
        wide.quantized = quantized;
        check_case(wide, drawn(wide, 0.5), on);
    }
}

} // namespace

TEST_CASE("peers: dispatch and combine move every copy, on one device") { check_shapes(1); }

TEST_CASE("peers: dispatch and combine move every copy, on two devices") {
    if (devices() < 2) {
        std::printf("skipped: needs 2 GPUs, this machine has %d\n", devices());
        return;
    }
    check_shapes(2);
}

TEST_CASE("peers: dropped copies, tokens that stay, tokens that all go to one expert, nothing at all") {
    const PeerCase sizes{2, {33, 128, 0, 2, 8}, Type::bf16};
    const auto all = [&](auto choice) {
        std::vector<Choices> out(2);
        for (int r = 0; r < 2; ++r)
            for (int t = 0; t < 33; ++t)
                for (int k = 0; k < 2; ++k) out[static_cast<std::size_t>(r)].push_back(choice(r, t, k));
        return out;
    };
    check_case(sizes, all([](int r, int t, int k) { return (t + k) % 3 == 0 ? -1 : (5 * t + k + r) % 8; }), 1);
    check_case(sizes, all([](int r, int, int k) { return 4 * r + k; }), 1);
    check_case(sizes, all([](int r, int, int k) { return 4 * (1 - r) + k; }), 1);
    check_case(sizes, all([](int, int t, int k) { return k == 0 ? 5 : t % 5; }), 1);
    check_case(sizes, all([](int, int, int) { return -1; }), 1);
}

TEST_CASE("peers: small gathers, again and again") {
    const PeerCase sizes{4, {64, 512, 0, 2, 8}, Type::f32, 8};
    const PeerRanks ranks(sizes, drawn(sizes, 0.0), 1);
    for (const std::int64_t bytes : {4, 1024, 4096}) {
        for (int r = 0; r < 4; ++r) ranks.poison(r);
        for (int again = 0; again < 3; ++again)
            REQUIRE(ranks.all([&](int r) { ranks.gather(r, ranks[r].x, ranks[r].y, bytes); }) == 0);
        for (int r = 0; r < 4; ++r)
            for (int from = 0; from < 4; ++from)
                CHECK(download(ranks[r].y + from * bytes, bytes) == download(ranks[from].x, bytes));
    }
}

TEST_CASE("peers: a rank that does not come is named") {
    PeerCase sizes{2, {16, 64, 0, 2, 8}, Type::bf16, 4, 0.2};
    const PeerRanks ranks(sizes, drawn(sizes, 0.0), 1);
    ranks.dispatch(0, true);
    CHECK(ranks.wait() == 2);
}

TEST_CASE("peers: sizes beyond the kernels' limits are named") {
    PeerGroup group;
    TokenShape shape{4, 12, 16, 2, 8}; // 24 bytes
    CHECK_THROWS_WITH_AS(cuda_peer_kernels().dispatch(group, shape, {nullptr, Type::bf16}, nullptr, nullptr, nullptr,
                                                      {nullptr, Type::bf16}, nullptr, nullptr, nullptr),
                         doctest::Contains("rows of 24 bytes on 1 ranks: use dispatcher alltoall"), std::runtime_error);
    shape.cols = 256; // 8 bytes of scales
    CHECK_THROWS_WITH_AS(cuda_peer_kernels().dispatch_quantized(group, shape, nullptr, nullptr, nullptr, nullptr,
                                                                nullptr, nullptr, nullptr, nullptr, nullptr, nullptr),
                         doctest::Contains("rows of 256 bytes on 1 ranks: use dispatcher alltoall"),
                         std::runtime_error);
}
