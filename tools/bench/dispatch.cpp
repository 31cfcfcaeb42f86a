// Dispatch and combine over peer memory beside NCCL's exchange in slots, of all rows or of a token once for each GPU,
// and beside a peer copy: GB/s over sizes.
//
// bench-dispatch [--peers] [BLOCKS..]: on the GPUs of this machine (2, 4 or 8 of them, a rank each), for each limit of
// multiprocessors. --peers leaves NCCL's ways out. GB/s of the link count the rows that a rank sends to others, one per
// token and rank, those of NCCL's exchange too, although it sends one per copy: times compare by them. `rows` counts
// every row that is delivered. `domains` are two levels where every GPU is a node, whose slots travel whole by NCCL's
// messages, `chunks` the same with kernels through its windows. NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1 make NCCL's
// messages leave the node.
#include "engine/backends/cuda/backend.hpp"
#include "kernels/cuda/check.hpp"
#include "planner/base/error.hpp"
#include "planner/program/peer_blocks.hpp"
#include "tools/bench/domain_ranks.hpp"
#include "tools/bench/peer_ranks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <set>
#include <string_view>
#include <thread>

namespace {

using namespace moe;
using namespace moe::bench;

constexpr int repeats = 10, plays = 5;

// Runs job(rank) on a thread for each rank.
void on_threads(int ranks, const std::function<void(int)>& job) {
    std::vector<std::thread> threads;
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
    for (int r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
            try {
                job(r);
            } catch (...) {
                errors[static_cast<std::size_t>(r)] = std::current_exception();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

// Seconds of one of `repeats` calls, all of them a graph per rank: the median of the plays, of the slowest rank.
class Timer {
public:
    Timer(const PeerRanks& ranks, const std::function<void(int)>& call) : ranks_(ranks) {
        records_.resize(static_cast<std::size_t>(ranks.count()));
        on_threads(ranks.count(), [&](int r) {
            CUDA_CHECK(cudaSetDevice(ranks[r].device));
            cudaGraph_t graph = nullptr;
            Record& record = records_[static_cast<std::size_t>(r)];
            CUDA_CHECK(cudaStreamBeginCapture(ranks[r].stream, cudaStreamCaptureModeThreadLocal));
            for (int i = 0; i < repeats; ++i) call(r);
            CUDA_CHECK(cudaStreamEndCapture(ranks[r].stream, &graph));
            CUDA_CHECK(cudaGraphInstantiate(&record.graph, graph, 0));
            CUDA_CHECK(cudaGraphDestroy(graph));
            for (cudaEvent_t* event : {&record.begin, &record.end}) CUDA_CHECK(cudaEventCreate(event));
        });
    }
    ~Timer() {
        for (const Record& r : records_) {
            cudaGraphExecDestroy(r.graph);
            cudaEventDestroy(r.begin);
            cudaEventDestroy(r.end);
        }
    }
    Timer(const Timer&) = delete;
    Timer& operator=(const Timer&) = delete;

    double seconds() const {
        std::vector<double> times;
        for (int play = 0; play < plays + 1; ++play) { // The first play warms up.
            for (int r = 0; r < ranks_.count(); ++r) {
                const Record& record = records_[static_cast<std::size_t>(r)];
                CUDA_CHECK(cudaSetDevice(ranks_[r].device));
                CUDA_CHECK(cudaEventRecord(record.begin, ranks_[r].stream));
                CUDA_CHECK(cudaGraphLaunch(record.graph, ranks_[r].stream));
                CUDA_CHECK(cudaEventRecord(record.end, ranks_[r].stream));
            }
            if (const int late = ranks_.wait(); late != 0) fail("a rank waited too long for rank {}", late - 1);
            double slowest = 0.0;
            for (const Record& record : records_) {
                float milliseconds = 0.0f;
                CUDA_CHECK(cudaEventElapsedTime(&milliseconds, record.begin, record.end));
                slowest = std::max(slowest, 1e-3 * static_cast<double>(milliseconds) / repeats);
            }
            if (play > 0) times.push_back(slowest);
        }
        std::sort(times.begin(), times.end());
        return times[times.size() / 2];
    }

private:
    struct Record {
        cudaGraphExec_t graph = nullptr;
        cudaEvent_t begin = nullptr, end = nullptr;
    };
    const PeerRanks& ranks_;
    std::vector<Record> records_;
};

// The engine's way for dispatcher = alltoall: rows in expert-major order, slots as large as they can get, NCCL between
// them, rows out of the slots and sorted by expert.
class Slots {
public:
    Slots(const PeerRanks& ranks, const Members& members)
        : ranks_(ranks), members_(members), type_(ranks.sizes().type) {
        const TokenShape& s = ranks.sizes().shape;
        const auto row = s.cols * static_cast<std::int64_t>(size_of(type_));
        sent_ = s.tokens * s.top_k;
        slot_rows_ = std::min(sent_, s.capacity);
        for (int r = 0; r < ranks.count(); ++r) {
            CUDA_CHECK(cudaSetDevice(ranks[r].device));
            Buffers b;
            const std::pair<char**, std::int64_t> wanted[] = {{&b.permuted, sent_},
                                                              {&b.out, slot_rows_ * ranks.count()},
                                                              {&b.in, slot_rows_ * ranks.count()},
                                                              {&b.arrived, s.capacity}};
            for (const auto& [at, rows] : wanted) {
                CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(at), static_cast<std::size_t>(rows * row)));
                CUDA_CHECK(cudaMemset(*at, 0, static_cast<std::size_t>(rows * row)));
            }
            buffers_.push_back(b);
        }
    }
    ~Slots() {
        for (const Buffers& b : buffers_)
            for (char* memory : {b.permuted, b.out, b.in, b.arrived}) cudaFree(memory);
    }
    Slots(const Slots&) = delete;
    Slots& operator=(const Slots&) = delete;

    void dispatch(int r) const {
        const Kernels& k = *cuda_kernels();
        const PeerRank& rank = ranks_[r];
        const Buffers& b = buffers_[static_cast<std::size_t>(r)];
        k.permute(permutation(), {rank.x, type_}, rank.row_of, {b.permuted, type_}, rank.stream);
        k.rows_to_slots(shape(r, RowParts::sent), {b.permuted, type_}, rank.all_counts, {b.out, type_}, rank.stream);
        exchange(r);
        k.slots_to_rows(shape(r, RowParts::arriving), {b.in, type_}, rank.all_counts, {b.arrived, type_}, rank.stream);
        k.sort_rows(order(r), {b.arrived, type_}, rank.all_counts, {rank.rows, type_}, rank.stream);
    }
    void combine(int r) const {
        const Kernels& k = *cuda_kernels();
        const PeerRank& rank = ranks_[r];
        const Buffers& b = buffers_[static_cast<std::size_t>(r)];
        k.unsort_rows(order(r), {rank.rows, type_}, rank.all_counts, {b.arrived, type_}, rank.stream);
        k.rows_to_slots(shape(r, RowParts::arriving), {b.arrived, type_}, rank.all_counts, {b.out, type_}, rank.stream);
        exchange(r);
        k.slots_to_rows(shape(r, RowParts::sent), {b.in, type_}, rank.all_counts, {b.permuted, type_}, rank.stream);
        k.unpermute(permutation(), {b.permuted, type_}, rank.row_of, {rank.y, type_}, rank.stream);
    }

private:
    struct Buffers {
        char *permuted = nullptr, *out = nullptr, *in = nullptr, *arrived = nullptr;
    };
    PermuteShape permutation() const {
        const TokenShape& s = ranks_.sizes().shape;
        return {s.tokens, s.cols, s.top_k, false, 0};
    }
    RowsShape order(int r) const {
        const TokenShape& s = ranks_.sizes().shape;
        const int local = s.experts / ranks_.count();
        return {s.cols, s.capacity, s.experts, ranks_.count(), 1, r * local, local};
    }
    SlotShape shape(int r, RowParts parts) const {
        const TokenShape& s = ranks_.sizes().shape;
        SlotShape out;
        out.parts = parts;
        out.cols = s.cols;
        out.slot_rows = slot_rows_;
        out.capacity = parts == RowParts::sent ? sent_ : s.capacity;
        out.experts = s.experts;
        out.ep = ranks_.count();
        out.rank = r;
        return out;
    }
    void exchange(int r) const {
        const Buffers& b = buffers_[static_cast<std::size_t>(r)];
        exchange_slots(members_[static_cast<std::size_t>(r)], ranks_.count(), b.out, b.in,
                       slot_rows_ * ranks_.sizes().shape.cols * static_cast<std::int64_t>(size_of(type_)),
                       ranks_[r].stream);
    }

    const PeerRanks& ranks_;
    const Members& members_;
    Type type_;
    std::int64_t sent_ = 0, slot_rows_ = 0;
    std::vector<Buffers> buffers_;
};

Members join_nccl(int ranks) {
    const comm::MeetingPoint point = backends::nccl_library().meeting_point();
    Members members(static_cast<std::size_t>(ranks));
    on_threads(ranks, [&](int r) {
        CUDA_CHECK(cudaSetDevice(r));
        const comm::CollectiveLibrary& nccl = backends::nccl_library();
        const comm::CollectiveLibrary::Member me = nccl.join(point, ranks, r, 0);
        // Connections are made at the first use, for which both ends must come.
        char* memory = nullptr;
        CUDA_CHECK(cudaMalloc(reinterpret_cast<void**>(&memory), 8 * static_cast<std::size_t>(ranks)));
        nccl.begin_group();
        for (int m = 0; m < ranks; ++m) {
            nccl.send(me, memory + 8 * m, 4, m, nullptr);
            nccl.recv(me, memory + 8 * m + 4, 4, m, nullptr);
        }
        nccl.end_group();
        CUDA_CHECK(cudaDeviceSynchronize());
        CUDA_CHECK(cudaFree(memory));
        members[static_cast<std::size_t>(r)] = me;
    });
    return members;
}

// Windows of all members for slots of so many bytes; none, with a line that says why, where one cannot have it.
Windows open_windows(const Members& members, std::int64_t slots_bytes) {
    Windows windows(members.size());
    std::vector<std::string> why(members.size());
    const auto each = [&](auto job) {
        on_threads(static_cast<int>(members.size()), [&](int r) {
            CUDA_CHECK(cudaSetDevice(r));
            job(static_cast<std::size_t>(r));
        });
        const auto reason = std::find_if(why.begin(), why.end(), [](const std::string& w) { return !w.empty(); });
        if (reason == why.end()) return true;
        std::printf("no chunks: %s\n", reason->c_str());
        return false;
    };
    const auto make = [&](std::size_t r) {
        windows[r] = backends::nccl_library().slot_window(members[r], slots_bytes, program::peer_blocks_beside, why[r]);
    };
    if (!each(make) || !each([&](std::size_t r) { why[r] = windows[r]->open(); })) windows.clear();
    return windows;
}

// Rows that the busiest rank sends to others, one per token and rank; and rows that the busiest rank gets, each copy.
struct Moved {
    std::int64_t sent = 0, delivered = 0;
};
Moved moved_rows(const PeerRanks& ranks, const std::vector<Choices>& choices) {
    const TokenShape& s = ranks.sizes().shape;
    const int local = s.experts / ranks.count();
    Moved out;
    std::vector<std::int64_t> delivered(static_cast<std::size_t>(ranks.count()));
    for (int r = 0; r < ranks.count(); ++r) {
        std::int64_t sent = 0;
        for (std::int64_t t = 0; t < s.tokens; ++t) {
            std::set<int> to;
            for (int k = 0; k < s.top_k; ++k) {
                const int at = choices[static_cast<std::size_t>(r)][static_cast<std::size_t>(t * s.top_k + k)] / local;
                to.insert(at);
                ++delivered[static_cast<std::size_t>(at)];
            }
            sent += static_cast<std::int64_t>(to.size() - to.count(r));
        }
        out.sent = std::max(out.sent, sent);
    }
    out.delivered = *std::max_element(delivered.begin(), delivered.end());
    return out;
}

double peer_copy(const PeerRanks& ranks, bool both) {
    const TokenShape& s = ranks.sizes().shape;
    const std::int64_t bytes = s.capacity * s.cols * static_cast<std::int64_t>(size_of(ranks.sizes().type));
    const Timer timer(ranks, [&](int r) {
        const int to = (r + 1) % ranks.count();
        if (r == 0 || both)
            CUDA_CHECK(cudaMemcpyAsync(ranks[to].rows, ranks[r].rows, static_cast<std::size_t>(bytes),
                                       cudaMemcpyDefault, ranks[r].stream));
    });
    return static_cast<double>(bytes) / timer.seconds();
}

void measure(const PeerCase& sizes, double skew, const std::vector<int>& limits, const Members& members,
             const Windows& windows) {
    std::vector<Choices> choices;
    for (int r = 0; r < sizes.ranks; ++r)
        choices.push_back(draw_choices(sizes.shape, skew, std::uint64_t{1} + static_cast<std::uint64_t>(r)));
    // The rates of one way; rows as they travel, scales included.
    const auto rates = [&](const PeerCase& as, const Moved& moved, double seconds) {
        const auto rate = [&](std::int64_t rows) {
            return 1e-9 * static_cast<double>(rows * (as.row_bytes() + as.scale_bytes())) / seconds;
        };
        return fmt::format("{:8.1f} us {:6.1f} link {:7.1f} rows", 1e6 * seconds, rate(moved.sent),
                           rate(moved.delivered));
    };
    const auto line = [&](const char* who, int blocks, const std::string& out, const std::string& back) {
        fmt::print("{:6} {:5} {:2}/{:<3} {:4.1f}  {:<7} {:3} | {} | {}\n", sizes.shape.tokens, sizes.shape.cols,
                   sizes.shape.top_k, sizes.shape.experts, skew, who, blocks, out, back);
        std::fflush(stdout);
    };
    Moved moved;
    for (const int blocks : limits) {
        PeerCase limited = sizes;
        limited.blocks = blocks;
        const PeerRanks ranks(limited, choices, sizes.ranks);
        moved = moved_rows(ranks, choices);
        const double out = Timer(ranks, [&](int r) { ranks.dispatch(r, true); }).seconds();
        const double back = Timer(ranks, [&](int r) { ranks.combine(r, false); }).seconds();
        line("peers", blocks, rates(limited, moved, out), rates(limited, moved, back));
        limited.quantized = true;
        const PeerRanks low(limited, choices, sizes.ranks);
        line("E4M3", blocks, rates(limited, moved, Timer(low, [&](int r) { low.dispatch(r, true); }).seconds()), "");
    }
    if (members.empty()) return;
    const PeerRanks ranks(sizes, choices, sizes.ranks);
    const Slots slots(ranks, members);
    const double out = Timer(ranks, [&](int r) { slots.dispatch(r); }).seconds();
    const double back = Timer(ranks, [&](int r) { slots.combine(r); }).seconds();
    line("NCCL", 0, rates(sizes, moved, out), rates(sizes, moved, back));
    const DomainRanks domains(ranks, members, windows, choices);
    for (const bool chunks : {false, true}) {
        if (chunks && windows.empty()) continue;
        const double there = Timer(ranks, [&](int r) { domains.dispatch(r, chunks); }).seconds();
        const double home = Timer(ranks, [&](int r) { domains.combine(r, chunks); }).seconds();
        line(chunks ? "chunks" : "domains", chunks ? program::peer_blocks_beside : 0, rates(sizes, moved, there),
             rates(sizes, moved, home));
    }
}

int run(int count, char** words) {
    int devices = 0;
    CUDA_CHECK(cudaGetDeviceCount(&devices));
    const int ranks = devices >= 8 ? 8 : devices >= 4 ? 4 : devices;
    if (ranks < 2) {
        std::printf("skipped: needs 2 GPUs, this machine has %d\n", devices);
        return 77;
    }
    std::vector<int> limits;
    bool nccl = true;
    for (int i = 1; i < count; ++i)
        if (std::string_view(words[i]) == "--peers")
            nccl = false;
        else
            limits.push_back(std::atoi(words[i]));
    if (limits.empty()) limits = {24};
    {
        PeerCase sizes{ranks, {16384, 4096, 0, 2, 8}, Type::bf16};
        const PeerRanks buffers(sizes, std::vector<Choices>(static_cast<std::size_t>(ranks), Choices(32768, 0)), ranks);
        std::printf("%d GPUs; peer copy 0 to 1: %.1f GB/s, all to the next at once: %.1f\n", ranks,
                    1e-9 * peer_copy(buffers, false), 1e-9 * peer_copy(buffers, true));
    }
    const Members members = nccl ? join_nccl(ranks) : Members();
    Windows windows = nccl ? open_windows(members, ranks * std::int64_t{16384} * 7168 * 2) : Windows();
    std::printf("tokens width top/of skew          | dispatch                              | combine\n");
    for (const std::int64_t cols : {2048, 7168})
        for (const std::int64_t tokens : {1024, 4096, 16384})
            measure({ranks, {tokens, cols, 0, 8, 128}, Type::bf16}, 0.0, limits, members, windows);
    for (const double skew : {0.5, 1.0})
        measure({ranks, {4096, 2048, 0, 8, 128}, Type::bf16}, skew, limits, members, windows);
    for (const int top_k : {1, 2})
        measure({ranks, {16384, 4096, 0, top_k, 8}, Type::bf16}, 0.0, limits, members, windows);
    on_threads(static_cast<int>(members.size()), [&](int r) {
        CUDA_CHECK(cudaSetDevice(r));
        if (!windows.empty()) windows[static_cast<std::size_t>(r)].reset();
        backends::nccl_library().leave(members[static_cast<std::size_t>(r)]);
    });
    return 0;
}

} // namespace

int main(int count, char** words) {
    try {
        return run(count, words);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "bench-dispatch: %s\n", error.what());
        return 1;
    }
}
