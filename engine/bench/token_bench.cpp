// Times dispatch and combine of balanced tokens, and gathers of their counts, alone and with the few multiprocessors
// that they have beside compute.
#include "engine/bench/token_bench.hpp"

#include "engine/bench/bench_ends.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/measured.hpp"
#include "planner/program/peer_blocks.hpp"
#include "planner/program/program.hpp"

#include <algorithm>

namespace moe::bench {

namespace {

constexpr plan::Group experts_group{plan::Domain::expert, plan::axis::expert};
constexpr std::int64_t most_tokens = 20480;

struct TokenSize {
    std::int64_t cols;
    int top_k, experts;
};
// These are sizes of no published model, between those of many.
constexpr TokenSize widths[] = {{1024, 2, 8},  {1024, 8, 64}, {1536, 4, 32}, {2560, 8, 64},
                                {3072, 2, 16}, {4096, 4, 32}, {5120, 8, 64}};
constexpr std::int64_t token_counts[] = {640, 2560, 5120, 10240, most_tokens};

struct Case {
    TokenSize size;
    std::int64_t tokens;
    std::int64_t copies() const { return tokens * size.top_k; }
    std::int64_t row_bytes() const { return 2 * size.cols; }
    std::int64_t rows_bytes() const { return copies() * row_bytes(); }
};

std::vector<Case> cases(std::int64_t most_bytes) {
    std::vector<Case> all;
    for (const TokenSize& size : widths)
        for (const std::int64_t tokens : token_counts)
            if (const Case c{size, tokens}; c.rows_bytes() <= most_bytes) all.push_back(c);
    return all;
}

// Operands in the memory of an end, at the same place for every end. Calls have their rows at several places, and all
// the rest once.
struct TokenRoom {
    std::int32_t *all_counts, *row_of, *places;
    float *weight, *probs, *by_copy;
    char *x, *rows, *y, *parts;
    std::int64_t bytes = 0; // bytes of all operands, with rows at one place

    TokenRoom(char* memory, std::int64_t size, const Case& c, int n, std::size_t call = 0) {
        const auto take = [&](std::int64_t count) {
            char* const at = memory + bytes;
            bytes += (count + 255) / 256 * 256;
            return at;
        };
        const auto ints = [&](std::int64_t count) { return reinterpret_cast<std::int32_t*>(take(4 * count)); };
        const auto floats = [&](std::int64_t count) { return reinterpret_cast<float*>(take(4 * count)); };
        all_counts = ints(n * c.size.experts);
        row_of = ints(c.copies());
        places = ints(n * c.copies());
        weight = floats(c.copies());
        probs = floats(c.copies());
        by_copy = floats(c.copies());
        const std::int64_t before = bytes;
        x = take(c.tokens * c.row_bytes());
        y = take(c.tokens * c.row_bytes());
        rows = take(c.rows_bytes());
        parts = take(c.tokens * std::min(c.size.top_k, n) * c.row_bytes());
        const std::int64_t each = bytes - before;
        const auto place = static_cast<std::int64_t>(call) % std::max<std::int64_t>(1, (size - before) / each) * each;
        for (char** operand : {&x, &y, &rows, &parts}) *operand += place;
    }
};

std::int64_t room_bytes(const std::vector<Case>& cases, int n) {
    std::int64_t most = 0;
    for (const Case& c : cases) most = std::max(most, TokenRoom(nullptr, 0, c, n).bytes);
    return most;
}

// A token's choices are spread over all experts, and tokens take turns: as a forced router chooses.
void write_choices(const BenchEnd& end, const TokenRoom& room, const Case& c, int n) {
    const int k = c.size.top_k, experts = c.size.experts;
    std::vector<std::int32_t> counts(static_cast<std::size_t>(experts)), row_of;
    const auto expert = [&](std::int64_t copy) {
        return static_cast<std::size_t>((copy / k + copy % k * (experts / k)) % experts);
    };
    for (std::int64_t copy = 0; copy < c.copies(); ++copy) ++counts[expert(copy)];
    std::vector<std::int32_t> next(counts.size());
    for (std::size_t e = 1; e < next.size(); ++e) next[e] = next[e - 1] + counts[e - 1];
    for (std::int64_t copy = 0; copy < c.copies(); ++copy) row_of.push_back(next[expert(copy)]++);
    std::vector<std::int32_t> all;
    for (int r = 0; r < n; ++r) all.insert(all.end(), counts.begin(), counts.end());
    end.device->write(room.all_counts, all.data(), all.size() * sizeof all[0]);
    end.device->write(room.row_of, row_of.data(), row_of.size() * sizeof row_of[0]);
    end.device->queue()->wait();
}

// One of the four calls of a layer's step: there or back, with a value per copy or without.
struct TokenKind {
    bool combine, values;
};
constexpr TokenKind kinds[] = {{false, true}, {false, false}, {true, false}, {true, true}};

// Makes the op as layers/dispatch makes it.
program::Op op_of(const TokenKind& k, const Case& c, int n, program::Program& program) {
    const auto tensor = [&](program::Dtype dtype, std::int64_t rows, std::int64_t cols) {
        program::Tensor t;
        t.dtype = dtype;
        t.rows = rows;
        t.cols = cols;
        t.expected_rows = static_cast<double>(rows);
        program.tensors.push_back(t);
        return static_cast<program::TensorId>(program.tensors.size() - 1);
    };
    program::Op op;
    op.kind = k.combine ? program::OpKind::combine_tokens : program::OpKind::dispatch_tokens;
    op.stream = program::Stream::expert;
    op.group = experts_group;
    op.attr = program::RowsAttr{c.size.cols, c.copies(), c.size.experts, n, 1, k.combine};
    op.bytes = static_cast<double>(c.rows_bytes());
    const program::TensorId tokens = tensor(program::Dtype::bf16, c.tokens, c.size.cols),
                            rows = tensor(program::Dtype::bf16, c.copies(), c.size.cols),
                            counts = tensor(program::Dtype::i32, n, c.size.experts),
                            row_of = tensor(program::Dtype::i32, c.copies(), 1),
                            places = tensor(program::Dtype::i32, n * c.tokens, c.size.top_k),
                            values = k.values ? tensor(program::Dtype::f32, c.copies(), 1) : program::no_tensor;
    if (k.combine) {
        op.in = {rows, counts, row_of, places, values};
        op.out = {tokens};
    } else {
        op.in = {tokens, counts, row_of, values};
        op.out = {rows};
    }
    return op;
}

comm::TokenOperands operands(const TokenKind& k, const Case& c, const TokenRoom& room, bool beside) {
    comm::TokenOperands t;
    t.beside = beside;
    t.tokens = c.tokens;
    t.top_k = c.size.top_k;
    t.dtype = program::Dtype::bf16;
    t.all_counts = room.all_counts;
    t.row_of = room.row_of;
    if (k.combine) {
        t.in = room.rows;
        t.out = room.y;
        t.parts = room.parts;
        t.places = room.places;
        t.values = k.values ? room.probs : nullptr;
        t.values_out = k.values ? room.by_copy : nullptr;
    } else {
        t.in = room.x;
        t.out = room.rows;
        t.values = k.values ? room.weight : nullptr;
        t.values_out = k.values ? room.probs : nullptr;
        t.places_out = room.places;
    }
    return t;
}

// A dispatch with values comes first: it writes the places that the others read. size: bytes of an end's memory.
// beside: on the few multiprocessors that products leave.
void measure(std::vector<BenchEnd>& ends, std::int64_t size, const Case& c, bool beside,
             std::map<std::string, std::vector<machine::MeasuredCall>>& measured) {
    const int n = static_cast<int>(ends.size());
    for (const TokenKind& k : kinds) {
        program::Program program;
        const program::Op op = op_of(k, c, n, program);
        const auto& attr = std::get<program::RowsAttr>(op.attr);
        std::vector<double> seconds(ends.size());
        at_every(ends, [&](BenchEnd& end, int rank) {
            if (!k.combine && k.values) write_choices(end, TokenRoom(end.memory, size, c, n), c, n);
            seconds[static_cast<std::size_t>(rank)] = seconds_of_call(
                end, program::Stream::expert, c.rows_bytes() > (64 << 20) ? 6 : 16, [&](std::size_t call) {
                    const TokenRoom room(end.memory, size, c, n, call);
                    end.communicator->exchange_tokens(experts_group, attr, operands(k, c, room, beside));
                });
        });
        const program::CostPoint at = program::cost_point(op, program);
        measured[program::group_key(
                     program::tokens_key(op, beside ? program::peer_blocks_beside : program::peer_blocks_alone), n)]
            .push_back({at.work, *std::max_element(seconds.begin(), seconds.end()), at.sides});
    }
}

// Counts of experts, as they are exchanged before a dispatch.
void measure_gathers(std::vector<BenchEnd>& ends, std::map<std::string, std::vector<machine::MeasuredCall>>& measured) {
    const int n = static_cast<int>(ends.size());
    for (std::int64_t bytes = 64; n * bytes <= program::most_gathered_over_peers; bytes *= 8) {
        std::vector<double> seconds(ends.size());
        at_every(ends, [&](BenchEnd& end, int rank) {
            seconds[static_cast<std::size_t>(rank)] =
                seconds_of_call(end, program::Stream::expert, 20, [&](std::size_t) {
                    end.communicator->all_gather(experts_group, end.memory,
                                                 end.memory + program::most_gathered_over_peers, bytes);
                });
        });
        measured[program::group_key(program::peer_gather_key, n)].push_back(
            {static_cast<double>(n * bytes), *std::max_element(seconds.begin(), seconds.end()), {}});
    }
}

// The part of a Program that the communicator reads: the largest dispatch.
program::Program largest(int n) {
    program::Program program;
    const program::Op op = op_of(kinds[0], {widths[0], most_tokens}, n, program);
    program.templates.resize(1);
    program.templates[0].ops.push_back(op);
    program.slots.push_back({});
    return program;
}

} // namespace

void measure_tokens(const ops::Backend& backend, int ranks, std::int64_t most_bytes,
                    std::map<std::string, std::vector<machine::MeasuredCall>>& measured) {
    plan::Plan plan;
    plan.gpus = plan.dp = plan.ep = ranks;
    const plan::Mesh mesh(plan);
    const std::vector<Case> all = cases(most_bytes);
    const std::int64_t bytes = room_bytes(all, ranks);
    std::vector<BenchEnd> ends = open_ends(backend, ranks, bytes);
    const program::Program program = largest(ranks);
    const std::unique_ptr<comm::QueuedFabric> fabric = join_ends(backend, mesh, program, ends);
    at_every(ends, [&](BenchEnd& end, int) { end.communicator->reach_peers(backend.peers(), end.memory, bytes); });
    for (const Case& c : all)
        for (const bool beside : {false, true}) measure(ends, bytes, c, beside, measured);
    measure_gathers(ends, measured);
    leave(ends);
    release(ends);
    for (auto& [key, calls] : measured)
        std::stable_sort(calls.begin(), calls.end(), [](const auto& a, const auto& b) { return a.work < b.work; });
}

} // namespace moe::bench
