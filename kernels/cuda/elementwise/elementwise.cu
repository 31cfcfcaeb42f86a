// Flat vector kernels: sums, casts, zero, and the reductions of in-process collectives.
#include "kernels/cuda/clear.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/flat.cuh"

namespace moe::cuda {
namespace {

constexpr int max_sources = 64;

template <class T>
struct Add {
    Src a, b;
    Dst y;
    template <int W>
    struct Held {
        Pack<T, W> a, b;
    };
    template <int W>
    __device__ Held<W> read(std::int64_t i) const {
        return {Access<T, W>::take(a, i), Access<T, W>::take(b, i)};
    }
    template <int W>
    __device__ void write(std::int64_t i, const Held<W>& held) const {
        float sum[W];
#pragma unroll
        for (int j = 0; j < W; ++j) sum[j] = held.a[j] + held.b[j];
        Access<T, W>::put(y, i, sum);
    }
};

template <class T>
struct Scale {
    Src x, w; // [w[1]]: a further factor
    Dst y;
    float factor;
    template <int W>
    __device__ Pack<T, W> read(std::int64_t i) const {
        return Access<T, W>::take(x, i);
    }
    template <int W>
    __device__ void write(std::int64_t i, const Pack<T, W>& held) const {
        float value[W];
        const float by = w.data != nullptr ? factor * load(w, 0) : factor;
#pragma unroll
        for (int j = 0; j < W; ++j) value[j] = held[j] * by;
        Access<T, W>::put(y, i, value);
    }
};

// x cut at both limits, hard or soft, or, with dy, dy times the slope of that.
template <class T>
struct Clip {
    Src x, dy;
    Dst y;
    float limit;
    bool soft;
    template <int W>
    struct Held {
        Pack<T, W> x, dy;
    };
    template <int W>
    __device__ Held<W> read(std::int64_t i) const {
        Held<W> held;
        held.x = Access<T, W>::take(x, i);
        if (dy.data != nullptr) held.dy = Access<T, W>::take(dy, i);
        return held;
    }
    template <int W>
    __device__ void write(std::int64_t i, const Held<W>& held) const {
        float value[W];
#pragma unroll
        for (int j = 0; j < W; ++j) {
            const float v = held.x[j];
            if (soft) {
                const float t = tanhf(v / limit);
                value[j] = dy.data != nullptr ? static_cast<float>(held.dy[j]) * (1.0f - t * t) : limit * t;
            } else if (dy.data != nullptr) {
                value[j] = fabsf(v) <= limit ? static_cast<float>(held.dy[j]) : 0.0f;
            } else {
                value[j] = fminf(fmaxf(v, -limit), limit);
            }
        }
        Access<T, W>::put(y, i, value);
    }
};

template <class X, class Y>
struct Cast {
    Src x;
    Dst y;
    template <int W>
    __device__ Pack<X, W> read(std::int64_t i) const {
        return Access<X, W>::take(x, i);
    }
    template <int W>
    __device__ void write(std::int64_t i, const Pack<X, W>& held) const {
        float value[W];
#pragma unroll
        for (int j = 0; j < W; ++j) value[j] = held[j];
        Access<Y, W>::put(y, i, value);
    }
};

// Rows of `cols` elements; wide where a pack lies in one row.
template <class T>
struct BiasAdd {
    Src x, b;
    Dst y;
    std::int64_t cols;
    template <int W>
    __device__ Pack<T, W> read(std::int64_t i) const {
        return Access<T, W>::take(x, i);
    }
    template <int W>
    __device__ void write(std::int64_t i, const Pack<T, W>& held) const {
        float value[W];
        take_small<W>(b, i % cols, value);
#pragma unroll
        for (int j = 0; j < W; ++j) value[j] += held[j];
        Access<T, W>::put(y, i, value);
    }
};

template <class T>
struct CopyColumns {
    ColumnsShape s;
    Src x;
    Dst y;
    template <int W>
    struct Held {
        Pack<T, W> x, y;
        std::int64_t at;
    };
    template <int W>
    __device__ Held<W> read(std::int64_t i) const {
        const std::int64_t row = i / s.cols, col = i - row * s.cols;
        Held<W> held;
        held.at = row * s.y_stride + s.to + col;
        held.x = Access<T, W>::take(x, row * s.x_stride + s.from + col);
        if (s.accumulate) held.y = Access<T, W>::take(read_back(y), held.at);
        return held;
    }
    template <int W>
    __device__ void write(std::int64_t, const Held<W>& held) const {
        float value[W];
#pragma unroll
        for (int j = 0; j < W; ++j) value[j] = held.x[j] + (s.accumulate ? held.y[j] : 0.0f);
        Access<T, W>::put(y, held.at, value);
    }
};

struct Sources {
    const void* data[max_sources];
};

// All sources before the result, which may be one of them; a few sources at a time in flight.
template <class T>
struct Reduce {
    Dst y;
    Sources from;
    int sources;
    Type type;
    bool largest;
    template <int W>
    struct Held {
        float value[W];
    };
    template <int W>
    __device__ Held<W> read(std::int64_t i) const {
        constexpr int together = 4;
        Held<W> held;
        for (int first = 0; first < sources; first += together) {
            Pack<T, W> next[together];
#pragma unroll
            for (int s = 0; s < together; ++s) {
                if (first + s < sources) next[s] = Access<T, W>::take(Src{from.data[first + s], type}, i);
            }
#pragma unroll
            for (int s = 0; s < together; ++s) {
                if (first + s >= sources) break;
#pragma unroll
                for (int j = 0; j < W; ++j) {
                    const float a = held.value[j], b = next[s][j];
                    held.value[j] = first + s == 0 ? b : largest ? fmaxf(a, b) : a + b;
                }
            }
        }
        return held;
    }
    template <int W>
    __device__ void write(std::int64_t i, const Held<W>& held) const {
        Access<T, W>::put(y, i, held.value);
    }
};

void scale(Src x, Src w, double factor, Dst y, std::int64_t n, void* stream) {
    with_access({x, y}, {}, [&](auto access) {
        using A = decltype(access);
        launch_flat<A::width>(Scale<typename A::Storage>{x, w, y, static_cast<float>(factor)}, n, stream);
    });
}

void clip_grad(Src dy, Src x, double limit, bool soft, Dst dx, std::int64_t n, void* stream) {
    with_access({x, dy, dx}, {}, [&](auto access) {
        using A = decltype(access);
        launch_flat<A::width>(Clip<typename A::Storage>{x, dy, dx, static_cast<float>(limit), soft}, n, stream);
    });
}

void clip(Src x, double limit, bool soft, Dst y, std::int64_t n, void* stream) {
    clip_grad({}, x, limit, soft, y, n, stream);
}

void add(Src a, Src b, Dst y, std::int64_t n, void* stream) {
    with_access({a, b, y}, {}, [&](auto access) {
        using A = decltype(access);
        launch_flat<A::width>(Add<typename A::Storage>{a, b, y}, n, stream);
    });
}

void bias_add(Src x, Src b, Dst y, std::int64_t rows, std::int64_t cols, void* stream) {
    with_access({x, y, Src{b.data, x.type}}, {cols}, [&](auto access) {
        using A = decltype(access);
        launch_flat<A::width>(BiasAdd<typename A::Storage>{x, b, y, cols}, rows * cols, stream);
    });
}

void copy_columns(const ColumnsShape& s, Src x, Dst y, void* stream) {
    with_access({x, y}, {s.cols, s.x_stride, s.from, s.y_stride, s.to}, [&](auto access) {
        using A = decltype(access);
        launch_flat<A::width>(CopyColumns<typename A::Storage>{s, x, y}, s.rows * s.cols, stream);
    });
}

void zero(Dst x, std::int64_t n, void* stream) {
    clear(x.data, n * static_cast<std::int64_t>(size_of(x.type)), stream_of(stream));
}

void cast(Src x, Dst y, std::int64_t n, void* stream) {
    if (x.type == y.type) {
        with_access({x, y}, {}, [&](auto access) {
            using A = decltype(access);
            launch_flat<A::width>(Cast<typename A::Storage, typename A::Storage>{x, y}, n, stream);
        });
    } else if (!all_aligned({x, y})) {
        launch_flat<1>(Cast<float, float>{x, y}, n, stream);
    } else if (x.type == Type::f32) {
        launch_flat<4>(Cast<float, __nv_bfloat16>{x, y}, n, stream);
    } else {
        launch_flat<4>(Cast<__nv_bfloat16, float>{x, y}, n, stream);
    }
}

void reduce(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, bool largest, void* stream) {
    if (sources <= 0) return;
    require(sources <= max_sources, "the number of sources of a reduction", sources, max_sources);
    Sources from{};
    bool whole = whole_packs(type, {dst}, {});
    for (int s = 0; s < sources; ++s) {
        from.data[s] = srcs[s];
        whole = whole && aligned(srcs[s]);
    }
    if (!whole) return launch_flat<1>(Reduce<float>{dst, from, sources, type, largest}, n, stream);
    with_access({dst}, {}, [&](auto access) {
        using A = decltype(access);
        launch_flat<A::width>(Reduce<typename A::Storage>{dst, from, sources, type, largest}, n, stream);
    });
}
void reduce_sum(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, void* stream) {
    reduce(dst, srcs, sources, n, type, false, stream);
}
void reduce_max(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, void* stream) {
    reduce(dst, srcs, sources, n, type, true, stream);
}

} // namespace

void add_elementwise(Kernels& table) {
    table.scale = scale;
    table.clip = clip;
    table.clip_grad = clip_grad;
    table.add = add;
    table.bias_add = bias_add;
    table.copy_columns = copy_columns;
    table.zero = zero;
    table.cast = cast;
    table.reduce_sum = reduce_sum;
    table.reduce_max = reduce_max;
}

} // namespace moe::cuda
