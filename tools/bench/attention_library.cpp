// Attention of the CUDA table as C functions, so that a script can time it beside another library's.
#include "kernels/cuda/cuda_kernels.hpp"

#include <cstdint>
#include <cstdio>
#include <exception>

namespace {

constexpr moe::Src bf16(const void* data) { return {data, moe::Type::bf16}; }
constexpr moe::Dst bf16(void* data) { return {data, moe::Type::bf16}; }

template <class Call>
int guarded(bool plain, Call call) {
    try {
        const moe::Kernels* table = plain ? moe::cuda_plain_kernels() : moe::cuda_kernels();
        if (table == nullptr) {
            std::fprintf(stderr, "the CUDA kernels do not run on this machine\n");
            return 1;
        }
        call(*table);
        return 0;
    } catch (const std::exception& problem) {
        std::fprintf(stderr, "%s\n", problem.what());
        return 1;
    }
}

moe::AttentionShape shape_of(const std::int64_t* sizes, double scale) {
    moe::AttentionShape s;
    s.batch = sizes[0], s.seq_q = s.seq_k = sizes[1];
    s.heads = static_cast<int>(sizes[2]), s.kv_heads = static_cast<int>(sizes[3]);
    s.qk_dim = static_cast<int>(sizes[4]), s.v_dim = static_cast<int>(sizes[5]);
    s.window = sizes[6], s.causal = sizes[7] != 0, s.scale = scale, s.deterministic = sizes[8] != 0;
    return s;
}

} // namespace

// BF16 operands as kernels.hpp has them; sizes: batch, sequence, heads, key heads, widths of keys and values, window,
// causal, deterministic. 0, or 1 with a line on stderr.
extern "C" int moe_attention(int plain, const std::int64_t* sizes, double scale, const void* q, const void* k,
                             const void* v, const float* sinks, void* o, float* lse, void* stream) {
    return guarded(plain != 0, [&](const moe::Kernels& table) {
        table.attention(shape_of(sizes, scale), bf16(q), bf16(k), bf16(v), {sinks, moe::Type::f32}, bf16(o), lse,
                        stream);
    });
}

extern "C" int moe_attention_grad(int plain, const std::int64_t* sizes, double scale, const void* dout, const void* q,
                                  const void* k, const void* v, const void* o, const float* lse, void* dq, void* dk,
                                  void* dv, void* stream) {
    return guarded(plain != 0, [&](const moe::Kernels& table) {
        table.attention_grad(shape_of(sizes, scale), bf16(dout), bf16(q), bf16(k), bf16(v), bf16(o), lse, {}, bf16(dq),
                             bf16(dk), bf16(dv), nullptr, stream);
    });
}

extern "C" std::int64_t moe_attention_scratch() { return moe::cuda_library_workspace_bytes(); }
extern "C" void moe_attention_library() { std::printf("ours: %s\n", moe::cuda_attention_library().c_str()); }
