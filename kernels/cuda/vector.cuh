// Packs of neighbouring elements: 16 bytes at a time where types and addresses allow, one element elsewhere.
//
// A kernel is written once over Access<T, W>: W elements of storage T, or, with W = 1, one element of a type that is
// known at run time only. The host chooses: with_access() for operands of one type, with_storage() for each type by
// itself.
#pragma once

#include "kernels/cuda/device.cuh"

#include <atomic>
#include <initializer_list>

namespace moe::cuda {

// W elements as they lie in memory: widened when they are used, so that loads in flight hold few registers.
template <class T, int W>
struct Pack {
    static constexpr int words = W * static_cast<int>(sizeof(T)) / 4;
    static_assert(words == 2 || words % 4 == 0, "accesses of 8 or 16 bytes");
    unsigned word[words];

    __device__ float operator[](int i) const {
        if constexpr (sizeof(T) == 4) return __uint_as_float(word[i]);
        return __uint_as_float(i % 2 == 0 ? word[i / 2] << 16 : word[i / 2] & 0xffff0000u);
    }
};
template <class T>
struct Pack<T, 1> {
    float value;
    __device__ float operator[](int) const { return value; }
};

template <class T, int W>
struct Access {
    using Storage = T;
    using Held = Pack<T, W>;
    static constexpr int width = W;

    // Elements [i, i + W).
    static __device__ Held take(Src x, std::int64_t i) {
        Held out;
        if constexpr (W == 1) {
            out.value = load(x, i);
        } else {
            const T* at = static_cast<const T*>(x.data) + i;
            if constexpr (Held::words == 2) {
                const uint2 two = *reinterpret_cast<const uint2*>(at);
                out.word[0] = two.x, out.word[1] = two.y;
            } else {
#pragma unroll
                for (int part = 0; part < Held::words / 4; ++part) {
                    const uint4 four = reinterpret_cast<const uint4*>(at)[part];
                    out.word[4 * part] = four.x, out.word[4 * part + 1] = four.y;
                    out.word[4 * part + 2] = four.z, out.word[4 * part + 3] = four.w;
                }
            }
        }
        return out;
    }
    static __device__ void put(Dst y, std::int64_t i, const float (&value)[W]) {
        if constexpr (W == 1) {
            store(y, i, value[0]);
        } else {
            put(y, i, pack(value));
        }
    }
    static __device__ void put(Dst y, std::int64_t i, const Held& held) {
        if constexpr (W == 1) {
            store(y, i, held.value);
        } else {
            T* at = static_cast<T*>(y.data) + i;
            // The store is written by hand: the compiler takes assignments of vectors apart and stores words as they
            // are ready, which halves what the memory takes.
            if constexpr (Held::words == 2) {
                asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(held.word[0]), "r"(held.word[1])
                             : "memory");
            } else {
#pragma unroll
                for (int part = 0; part < Held::words / 4; ++part) {
                    const unsigned* const word = held.word + 4 * part;
                    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at + part * 16 / sizeof(T)),
                                 "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                                 : "memory");
                }
            }
        }
    }

    static __device__ Held pack(const float (&value)[W]) {
        Held out;
#pragma unroll
        for (int w = 0; w < Held::words; ++w) {
            if constexpr (sizeof(T) == 4) {
                out.word[w] = __float_as_uint(value[w]);
            } else {
                const __nv_bfloat162 two = __floats2bfloat162_rn(value[2 * w], value[2 * w + 1]);
                out.word[w] = *reinterpret_cast<const unsigned*>(&two);
            }
        }
        return out;
    }
};

// 16 bytes from global to shared memory behind the thread's back; copies of one group arrive together.
__device__ inline void copy_async(void* shared, const void* global) {
    const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}
__device__ inline void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending> // pending: groups that may still be on their way
__device__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Elements [i, i + W) of a small operand of either type that stays in the caches, such as a norm's weights.
template <int W>
__device__ void take_small(Src x, std::int64_t i, float (&out)[W]) {
    if constexpr (W == 1) {
        out[0] = load(x, i);
    } else if (x.type == Type::f32) {
        const auto held = Access<float, W>::take(x, i);
#pragma unroll
        for (int j = 0; j < W; ++j) out[j] = held[j];
    } else {
        const auto held = Access<__nv_bfloat16, W>::take(x, i);
#pragma unroll
        for (int j = 0; j < W; ++j) out[j] = held[j];
    }
}

inline bool aligned(Src x) { return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0; }
inline bool aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 == 0; }
inline bool all_aligned(std::initializer_list<Src> operands) {
    for (const Src x : operands) {
        if (!aligned(x)) return false;
    }
    return true;
}

// Calls run(T{}) with the storage of a type.
template <class Run>
void with_storage(Type type, Run run) {
    if (type == Type::f32) {
        run(float{});
    } else {
        run(__nv_bfloat16{});
    }
}

// True where accesses of 16 bytes serve operands of `type` whose rows begin at multiples of each of `extents` elements.
inline bool whole_packs(Type type, std::initializer_list<Src> operands, std::initializer_list<std::int64_t> extents) {
    if (!all_aligned(operands)) return false;
    for (const Src x : operands) {
        if (x.data != nullptr && x.type != type) return false;
    }
    for (const std::int64_t n : extents) {
        if (n * static_cast<std::int64_t>(size_of(type)) % 16 != 0) return false;
    }
    return true;
}

// run(Access<T, 16 bytes>{}) where whole_packs() holds for the type of the first operand, run(Access<float, 1>{})
// elsewhere. Null operands are left out.
template <class Run>
void with_access(std::initializer_list<Src> operands, std::initializer_list<std::int64_t> extents, Run run) {
    const Type type = operands.begin()->type;
    if (!whole_packs(type, operands, extents)) {
        run(Access<float, 1>{});
    } else if (type == Type::f32) {
        run(Access<float, 4>{});
    } else {
        run(Access<__nv_bfloat16, 8>{});
    }
}

inline int multiprocessors() {
    static const int count = [] { // The devices of one process are of one kind.
        int device = 0, found = 0;
        CUDA_CHECK(cudaGetDevice(&device));
        CUDA_CHECK(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device));
        return found;
    }();
    return count;
}

// The number of blocks that the device holds at once, if there is work for them: a grid that steps through `items`, a
// block `each` at a time.
template <auto kernel>
unsigned resident_blocks(int threads, std::int64_t items, std::int64_t each, std::size_t shared = 0) {
    if (shared > 12 * 1024) // 48 KiB are allowed unasked, static arrays included; every device is asked by itself
        CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
    // The known counts by warps of a block, which determine its shared memory; asking costs more than a launch.
    static std::atomic<int> known[1024 / warp_size + 1];
    std::atomic<int>& per_multiprocessor = known[threads / warp_size];
    if (per_multiprocessor == 0) {
        int found = 0;
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&found, kernel, threads, shared));
        per_multiprocessor = found > 0 ? found : 1;
    }
    return blocks_for(items, each, std::int64_t{multiprocessors()} * per_multiprocessor);
}

} // namespace moe::cuda
