// The gradients of the gated delta rule on the tensor cores: those of the states from the last chunk to the first.
//
// Floor: W, the scores, q, k and do in, of each chunk and head the gradients of its state and of V' out. Formulas:
// kernels/cpu/delta_rule.cpp.
#include "kernels/cuda/delta_tensor_grad.cuh"

namespace moe::cuda::delta {
namespace {

using Slice = Tile<slice, false>;

struct Stage { // shared memory
    static constexpr int keys = Tall::bytes(rows), queries = keys + Wide::bytes(rows),
                         scores = queries + Wide::bytes(rows), grads = scores + Square::bytes(rows),
                         vectors = grads + Slice::bytes(rows),
                         bytes = vectors + ceil_div(Kept::factors * 4, 128) * 128; // W, then these
    static constexpr unsigned coming =
        Tall::bytes(rows) + 2 * rows * widest * 2 + Square::bytes(rows) + rows * slice * 2 + Kept::factors * 4;
    static_assert(bytes % 128 == 0);
};
constexpr int stages = 3;

// The gradient of the state behind each chunk, and that of V'. A block has `slice` columns of a head's states, each
// warp 16 of them in registers.
__global__ void __launch_bounds__((passing + 1) * warp_size, 1) dstates_kernel(Rule r, Src dout) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ __align__(8) std::uint64_t barriers[2 * stages];
    Ring<stages, Stage::bytes> ring(memory, barriers);
    const int warp = static_cast<int>(threadIdx.x) / warp_size, lane = static_cast<int>(threadIdx.x) % warp_size,
              b = static_cast<int>(blockIdx.z), h = static_cast<int>(blockIdx.y),
              from = static_cast<int>(blockIdx.x) * slice;
    if (warp == passing) {
        for (std::int64_t chunk = r.chunks - 1; chunk >= 0; --chunk, ring.next()) {
            const Kept z(r, b, h, chunk);
            const unsigned stage = ring.to_fill(Stage::coming), full = ring.filling();
            if (lane == 0) {
                ptx::load_bytes(stage, z.w(), Tall::bytes(rows), full);
                ptx::load_bytes(stage + Stage::scores, z.scores(), Square::bytes(rows), full);
                ptx::load_bytes(stage + Stage::vectors, z.vectors(), Kept::factors * 4, full);
            }
            bring_rows<widest>(stage + Stage::keys, elements(r.c) + z.k(0), z.step(), z.n, full);
            bring_rows<slice>(stage + Stage::grads, elements(dout) + z.o(0) + from, z.step_of_o(), z.n, full);
            bring_rows<widest>(stage + Stage::queries, elements(r.c) + z.q(0), z.step(), z.n, full);
        }
        return;
    }
    Passed s;
    const int first = from + warp * 16;
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
        s.times(factors_of(vectors, Kept::carried, 0).x);
        unsigned of_rows[pieces / 2][4];
#pragma unroll
        for (int block = 0; block < pieces / 2; ++block) {
            unsigned(&grad)[4] = of_rows[block];
            Slice::left_across(stage + Stage::grads, warp, block, grad);
#pragma unroll
            for (int j = 0; j <= block; ++j) {
                unsigned x[4];
                Square::right_across(stage + Stage::scores, j, block, x);
                multiply(dfresh[2 * j], dfresh[2 * j + 1], grad, x);
            }
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const float2 by = factors_of(vectors, Kept::from_before, block * 16 + part / 2 * 8 + lane % 4 * 2);
                grad[part] = both(low_of(grad[part]) * by.x, high_of(grad[part]) * by.y);
            }
        }
        s.add<Wide>(of_rows, stage + Stage::queries);
#pragma unroll
        for (int j = 0; j < pieces / 2; ++j) left_of(dfresh[2 * j], dfresh[2 * j + 1], of_rows[j]);
        store_left<Turned>(z.dfresh(), first, of_rows);
        s.add<Tall>(of_rows, stage); // -W
        ring.let_go();
    }
}

} // namespace

void run_tensor_grads(const Rule& r, Src dout, Dst dc, Dst dp, cudaStream_t stream) {
    constexpr int bytes = Ring<stages, Stage::bytes>::bytes;
    allow(dstates_kernel, bytes);
    dstates_kernel<<<dim3(widest / slice, static_cast<unsigned>(r.s.value_heads), static_cast<unsigned>(r.s.batch)),
                     (passing + 1) * warp_size, bytes, stream>>>(r, dout);
    CUDA_CHECK(cudaGetLastError());
    run_tensor_chunks(r, dout, dc, dp, stream);
}

} // namespace moe::cuda::delta
