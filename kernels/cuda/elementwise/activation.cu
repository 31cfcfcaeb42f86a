// Gated and plain activations with the routing probability, forward and backward.
#include "kernels/cuda/elementwise/activation.cuh"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/precision/fp8.cuh"

namespace moe::cuda {
namespace {

// The results of a kernel besides dprobs: y, dx and E4M3 of its main result, each of them only where it is asked for.
struct Results {
    Dst y, dx;
    Fp8Rows q;
    float* dprobs = nullptr;
};

// A warp waits for the counts, for its row and for its block's largest in turn: what hides that is other warps, so that
// registers are kept to what four or three blocks of a multiprocessor can have.
//
// `more`: results beyond the one that every call has. Values that become E4M3 are rounded to BF16 first.
template <class A, bool swiglu, bool more>
__global__ void __launch_bounds__(row_threads, 4) activation_kernel(ActivationShape s, Operands in, Results out) {
    constexpr int W = A::width;
    const Kind<swiglu> kind(s);
    struct Both {
        typename A::Held gate, up;
    };
    for_each_row(in.counts, s.groups, s.rows, [&](std::int64_t row) {
        const float p = in.probs != nullptr ? in.probs[row] : 1.0f;
        const std::int64_t start = row * (kind.gated ? 2 * s.ffn : s.ffn);
        for_packs_of_warp<3>(
            static_cast<int>(s.ffn / W),
            [&](int i) {
                Both held;
                held.gate = A::take(in.x, start + i * W);
                if (kind.gated) held.up = A::take(in.x, start + s.ffn + i * W);
                return held;
            },
            [&](int i, const Both& held, bool within) {
                float value[W];
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    const Gated at(kind.curve, held.gate[j], kind.gated ? held.up[j] : 1.0f, kind.limit, kind.behind);
                    value[j] = at.curve.value * at.up * p;
                }
                if (within && (!more || out.y.data != nullptr)) A::put(out.y, row * s.ffn + i * W, value);
                if constexpr (more) {
                    put_quantized(out.q, row, s.ffn, i, within, Access<__nv_bfloat16, W>::pack(value));
                }
            });
    });
}

template <class A, bool swiglu, bool more>
__global__ void __launch_bounds__(row_threads, 3)
    activation_grad_kernel(ActivationShape s, Operands in, Src dy, Results out) {
    constexpr int W = A::width;
    const Kind<swiglu> kind(s);
    struct All {
        typename A::Held gate, up, dy;
    };
    const std::int64_t width = kind.gated ? 2 * s.ffn : s.ffn;
    const int packs = static_cast<int>(s.ffn / W);
    for_each_row(in.counts, s.groups, s.rows, [&](std::int64_t row) {
        const float p = in.probs != nullptr ? in.probs[row] : 1.0f;
        float along = 0.0f;
        const auto put = [&](int pack, bool within, float(&value)[W]) {
            if (within) A::put(out.dx, row * width + pack * W, value);
            if constexpr (more) {
                if (out.q.data == nullptr) return;
                put_quantized(out.q, row, width, pack, within, Access<__nv_bfloat16, W>::pack(value));
            }
        };
        for_packs_of_warp<3>( // Both inputs are read before both outputs are written, as dx may be x.
            packs,
            [&](int i) {
                All held;
                held.gate = A::take(in.x, row * width + i * W);
                if (kind.gated) held.up = A::take(in.x, row * width + s.ffn + i * W);
                held.dy = A::take(dy, row * s.ffn + i * W);
                return held;
            },
            [&](int i, const All& held, bool within) {
                float value[W], dgate[W], dup[W];
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    const Slopes at = slopes_of(kind, held.gate[j], held.up[j], held.dy[j], p);
                    value[j] = at.y, dgate[j] = at.gate, dup[j] = at.up;
                    if (within) along += at.along;
                }
                if (more && within && out.y.data != nullptr) A::put(out.y, row * s.ffn + i * W, value);
                put(i, within, dgate);
                if (kind.gated) put(packs + i, within, dup);
            });
        if (out.dprobs == nullptr) return;
        along = warp_sum(along);
        if (lane_of_warp() == 0) out.dprobs[row] = along;
    });
}

// Calls run(access, swiglu, more) with what a call needs compiled in; `more` takes packs of 16 bytes of one type.
template <class Run>
void with_kind(const char* name, const ActivationShape& s, std::initializer_list<Src> operands, bool more, Run run) {
    const auto with_more = [&](auto access, auto with) {
        if (is_swiglu(s)) {
            run(access, std::true_type{}, with);
        } else {
            run(access, std::false_type{}, with);
        }
    };
    if (!more) return with_access(operands, {s.ffn}, [&](auto access) { with_more(access, std::false_type{}); });
    const Type type = operands.begin()->type;
    if (!whole_packs(type, operands, {s.ffn}))
        throw std::runtime_error(std::string(name) +
                                 ": operands to quantize are not of one type in whole packs of 16 bytes");
    with_storage(type,
                 [&](auto element) { with_more(Access<decltype(element), 16 / sizeof(element)>{}, std::true_type{}); });
}

void activation(const ActivationShape& s, Src x, const float* probs, const std::int32_t* counts, Dst y, Fp8Rows q,
                void* stream) {
    const Operands in{x, probs, counts};
    with_kind("activation", s, {x, y}, q.data != nullptr, [&](auto access, auto swiglu, auto more) {
        launch_rows<activation_kernel<decltype(access), swiglu(), more()>>(s.rows, stream, s, in, Results{y, {}, q});
    });
}

void activation_grad(const ActivationShape& s, Src dy, Src x, const float* probs, const std::int32_t* counts, Dst dx,
                     float* dprobs, Dst y, Fp8Rows q, void* stream) {
    const Operands in{x, probs, counts};
    const bool more = y.data != nullptr || q.data != nullptr;
    with_kind("activation_grad", s, {x, dy, dx, y}, more, [&](auto access, auto swiglu, auto further) {
        launch_rows<activation_grad_kernel<decltype(access), swiglu(), further()>>(s.rows, stream, s, in, dy,
                                                                                   Results{y, dx, q, dprobs});
    });
}

} // namespace

void add_activation(Kernels& table) {
    table.activation = activation;
    table.activation_grad = activation_grad;
}

} // namespace moe::cuda
