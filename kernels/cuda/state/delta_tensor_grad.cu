// The gradients of the gated delta rule on the tensor cores: those of the states from the last chunk to the first.
//
// Floor: W, the scores, q, k and do in, of each chunk and head the gradients of its state and of V' out. Formulas:
// kernels/cpu/delta_rule.cpp.
#include "kernels/cuda/state/delta_tensor_grad.cuh"

namespace moe::cuda::delta {
namespace {

using Slice = Tile<slice, false>;

struct Stage { // shared memory
    static constexpr int keys = Tall::bytes(rows), queries = keys + Wide::bytes(rows),
                         scores = queries + Wide::bytes(rows), grads = scores + Square::bytes(rows),
                         vectors = grads + Slice::bytes(rows),
                         bytes = vectors + ceil_div(Kept::factors * 4, 128) * 128;                  // W, then these
    static constexpr unsigned coming = Tall::bytes(rows) + Square::bytes(rows) + Kept::factors * 4; // by the engine
    static_assert(bytes % 128 == 0);
};
constexpr int stages = 2, takers = 2 * passing;
using Stages = Ring<stages, Stage::bytes, takers>;
using Handed = Handing<pieces + key_pieces>;

__device__ void write_line(unsigned place, int line, const float (&x)[4]) {
    ptx::write_shared(place + static_cast<unsigned>(line * Handed::line),
                      {__float_as_int(x[0]), __float_as_int(x[1]), __float_as_int(x[2]), __float_as_int(x[3])});
}
// x by + the line.
__device__ void add_line(unsigned place, int line, float by, float (&x)[4]) {
    const int4 four = ptx::read_shared(place + static_cast<unsigned>(line * Handed::line));
    x[0] = x[0] * by + __int_as_float(four.x), x[1] = x[1] * by + __int_as_float(four.y);
    x[2] = x[2] * by + __int_as_float(four.z), x[3] = x[3] * by + __int_as_float(four.w);
}

// The gradient of the state behind each chunk, and that of V'. A block has `slice` columns of a head's states, each of
// its first warps 16 of them in registers; as many others compute ahead what waits for no state.
__global__ void __launch_bounds__((takers + 1) * warp_size, 1) dstates_kernel(Rule r, Src dout) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ __align__(8) std::uint64_t barriers[2 * stages], handing[Handed::barriers];
    const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size,
              b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y),
              from = static_cast<int>(blockIdx.x) * slice, mine = warp % passing, first = from + mine * 16;
    Handed handed(memory + Stages::bytes, handing, mine);
    Stages ring(memory, barriers);
    if (warp == takers) {
        for (std::int64_t chunk = r.chunks - 1; chunk >= 0; --chunk, ring.next()) {
            const Kept z(r, b, h, chunk);
            const unsigned stage = ring.to_fill(Stage::coming), full = ring.filling();
            if (lane == 0) {
                ptx::load_bytes(stage, z.w(), Tall::bytes(rows), full);
                ptx::load_bytes(stage + Stage::scores, z.scores(), Square::bytes(rows), full);
                ptx::load_bytes(stage + Stage::vectors, z.vectors(), Kept::factors * 4, full);
            }
            bring_rows<widest>(stage + Stage::keys, elements(r.c) + z.k(0), z.step(), z.n);
            bring_rows<slice>(stage + Stage::grads, elements(dout) + z.o(0) + from, z.step_of_o(), z.n);
            bring_rows<widest>(stage + Stage::queries, elements(r.c) + z.q(0), z.step(), z.n);
            ring.brought();
        }
        return;
    }
    unsigned of_rows[pieces / 2][4];
    if (warp >= passing) { // do^T by the scores, and (e q)^T do turned
        for (std::int64_t chunk = r.chunks - 1; chunk >= 0; --chunk, ring.next()) {
            const unsigned stage = ring.filled();
            float dfresh[pieces][4] = {};
#pragma unroll
            for (int block = 0; block < pieces / 2; ++block) {
                unsigned(&grad)[4] = of_rows[block];
                Slice::left_across(stage + Stage::grads, mine, block, grad);
#pragma unroll
                for (int j = 0; j <= block; ++j) {
                    unsigned x[4];
                    Square::right_across(stage + Stage::scores, j, block, x);
                    multiply(dfresh[2 * j], dfresh[2 * j + 1], grad, x);
                }
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const float2 by =
                        factors_of(stage + Stage::vectors, Kept::from_before, block * 16 + part / 2 * 8 + lane % 4 * 2);
                    grad[part] = both(low_of(grad[part]) * by.x, high_of(grad[part]) * by.y);
                }
            }
            Passed s;
            s.add<Wide>(of_rows, stage + Stage::queries);
            ring.let_go();
            const unsigned place = handed.to_fill();
#pragma unroll
            for (int j = 0; j < pieces; ++j) write_line(place, j, dfresh[j]);
#pragma unroll
            for (int c = 0; c < key_pieces; ++c) write_line(place, pieces + c, s.sum[c]);
            handed.hand();
        }
        return;
    }
    Passed s;
    for (std::int64_t chunk = r.chunks - 1; chunk >= 0; --chunk, ring.next()) {
        const Kept z(r, b, h, chunk);
        const unsigned stage = ring.filled(), vectors = stage + Stage::vectors;
        float dfresh[pieces][4] = {}; // dV'^T
        {
            unsigned state[key_pieces / 2][4];
            s.round(state);
            store_left<Tall>(z.dstate(), first, state);
            with_rows<Wide>(dfresh, state, stage + Stage::keys);
        }
        scale(dfresh, vectors, Kept::to_behind);
        const unsigned place = handed.filled();
#pragma unroll
        for (int j = 0; j < pieces; ++j) add_line(place, j, 1.0f, dfresh[j]);
        const float carried = factors_of(vectors, Kept::carried, 0).x;
#pragma unroll
        for (int c = 0; c < key_pieces; ++c) add_line(place, pieces + c, carried, s.sum[c]);
        handed.let_go();
#pragma unroll
        for (int j = 0; j < pieces / 2; ++j) left_of(dfresh[2 * j], dfresh[2 * j + 1], of_rows[j]);
        store_left<Turned>(z.dfresh(), first, of_rows);
        s.add<Tall>(of_rows, stage); // -W
        ring.let_go();
    }
}

} // namespace

void run_tensor_grads(const Rule& r, Src dout, Dst dc, Dst dp, cudaStream_t stream) {
    constexpr int bytes = Stages::bytes + Handed::bytes;
    allow(dstates_kernel, bytes);
    dstates_kernel<<<dim3(widest / slice, static_cast<unsigned>(r.s.value_heads), static_cast<unsigned>(r.s.batch)),
                     (takers + 1) * warp_size, bytes, stream>>>(r, dout);
    CUDA_CHECK(cudaGetLastError());
    run_tensor_chunks(r, dout, dc, dp, stream);
}

} // namespace moe::cuda::delta
