// Device copies of tracked buffers, captured launches, and the table that is made of them.
#include "tests/kernels/cuda_staging.hpp"

#include "kernels/cuda/check.hpp"
#include "kernels/cuda/cuda_kernels.hpp"
#include "tests/kernels/tracked.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

namespace moe::test {
namespace {

constexpr std::size_t guard_bytes = 256; // keeps cudaMalloc's alignment
constexpr int guard_value = 0xff;        // NaN in FP32 and BF16

struct Stream {
    cudaStream_t handle = nullptr;
    Stream() { CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
    ~Stream() { cudaStreamDestroy(handle); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
};
cudaStream_t test_stream() {
    static const Stream stream; // one for all: the back end keeps a little scratch per stream
    return stream.handle;
}

// The device copy of one tracked buffer, guards on both sides.
class Mirror {
public:
    explicit Mirror(Extent host) : host_(host) {
        CUDA_CHECK(cudaMalloc(&device_, host.bytes + 2 * guard_bytes));
        CUDA_CHECK(cudaMemset(device_, guard_value, host.bytes + 2 * guard_bytes));
        CUDA_CHECK(cudaMemcpy(data(), host.start, host.bytes, cudaMemcpyHostToDevice));
    }
    ~Mirror() { cudaFree(device_); }
    Mirror(const Mirror&) = delete;
    Mirror& operator=(const Mirror&) = delete;

    unsigned char* data() const { return static_cast<unsigned char*>(device_) + guard_bytes; }
    void bring_back() const {
        CUDA_CHECK(cudaMemcpy(host_.start, data(), host_.bytes, cudaMemcpyDeviceToHost));
        check_guard(data() - guard_bytes, "before");
        check_guard(data() + host_.bytes, "behind");
    }

private:
    void check_guard(const unsigned char* guard, const char* where) const {
        unsigned char bytes[guard_bytes];
        CUDA_CHECK(cudaMemcpy(bytes, guard, guard_bytes, cudaMemcpyDeviceToHost));
        for (const unsigned char byte : bytes) {
            if (byte == guard_value) continue;
            throw std::runtime_error(std::string("a kernel wrote ") + where + " an operand of " +
                                     std::to_string(host_.bytes) + " bytes");
        }
    }

    Extent host_;
    void* device_ = nullptr;
};

class Mirrors {
public:
    // The argument for the device: pointers into tracked buffers become pointers into their copies, the stream (the
    // only null pointer to void) the test's own; all else stays.
    template <class T>
    auto device(const T& argument) {
        if constexpr (std::is_same_v<T, void*>) {
            return static_cast<void*>(test_stream());
        } else if constexpr (std::is_same_v<T, Src> || std::is_same_v<T, Dst>) {
            return T{translate(argument.data), argument.type};
        } else if constexpr (std::is_same_v<T, Fp8Rows> || std::is_same_v<T, Fp8Columns>) {
            return T{static_cast<std::uint8_t*>(translate(argument.data)),
                     static_cast<float*>(translate(argument.scale))};
        } else if constexpr (std::is_same_v<T, AttentionShape> || std::is_same_v<T, StateShape>) {
            T shape = argument;
            shape.document_start = static_cast<const std::int32_t*>(translate(shape.document_start));
            if constexpr (std::is_same_v<T, AttentionShape>)
                shape.largest = static_cast<float*>(translate(shape.largest));
            return shape;
        } else if constexpr (std::is_same_v<T, RoundShape>) {
            T shape = argument;
            shape.window = static_cast<const float*>(translate(shape.window));
            shape.codes = device(shape.codes);
            return shape;
        } else if constexpr (std::is_same_v<T, QuantizedWeights>) {
            T shape = argument;
            shape.window = static_cast<const float*>(translate(shape.window));
            shape.largest = static_cast<float*>(translate(shape.largest));
            return shape;
        } else if constexpr (std::is_same_v<T, PickedKeys>) {
            T keys = argument;
            keys.document_start = static_cast<const std::int32_t*>(translate(keys.document_start));
            keys.positions = static_cast<const std::int32_t*>(translate(keys.positions));
            return keys;
        } else if constexpr (std::is_same_v<T, IndexShape> || std::is_same_v<T, LatentShape>) {
            T shape = argument;
            shape.keys = device(shape.keys);
            return shape;
        } else if constexpr (std::is_same_v<T, IndexLossShape>) {
            T shape = argument;
            shape.index = device(shape.index);
            shape.core = device(shape.core);
            return shape;
        } else if constexpr (std::is_same_v<T, GivenChoice>) {
            return T{static_cast<const std::int32_t*>(translate(argument.positions)),
                     static_cast<const std::int32_t*>(translate(argument.recorded))};
        } else if constexpr (std::is_same_v<T, LossShape>) {
            T shape = argument;
            shape.share = static_cast<const float*>(translate(shape.share));
            return shape;
        } else if constexpr (std::is_pointer_v<T>) {
            return static_cast<T>(translate(argument));
        } else {
            return argument;
        }
    }
    void bring_back() const {
        for (const auto& [start, mirror] : mirrors_) mirror->bring_back();
    }

private:
    void* translate(const void* p) {
        if (p == nullptr) return nullptr;
        const Extent extent = extent_of(p);
        if (extent.start == nullptr) throw std::runtime_error("an operand does not lie in a tracked buffer");
        auto& mirror = mirrors_[extent.start];
        if (mirror == nullptr) mirror = std::make_unique<Mirror>(extent);
        return mirror->data() + (static_cast<const unsigned char*>(p) - static_cast<unsigned char*>(extent.start));
    }

    std::map<void*, std::unique_ptr<Mirror>> mirrors_;
};

struct Graph {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t runnable = nullptr;
    Graph() = default;
    ~Graph() {
        if (runnable != nullptr) cudaGraphExecDestroy(runnable);
        if (graph != nullptr) cudaGraphDestroy(graph);
    }
    Graph(const Graph&) = delete;
    Graph& operator=(const Graph&) = delete;

    void check_nodes() const {
        std::size_t count = 0;
        CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &count));
        std::vector<cudaGraphNode_t> nodes(count);
        if (count > 0) CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &count));
        for (cudaGraphNode_t node : nodes) {
            cudaGraphNodeType type{};
            CUDA_CHECK(cudaGraphNodeGetType(node, &type));
            if (type != cudaGraphNodeTypeKernel && type != cudaGraphNodeTypeMemset) {
                throw std::runtime_error("a call put a graph node of type " + std::to_string(type) +
                                         " where kernels and memsets belong");
            }
        }
    }
};

double milliseconds_of(cudaGraphExec_t runnable) {
    cudaEvent_t start = nullptr, end = nullptr;
    CUDA_CHECK(cudaEventCreate(&start));
    CUDA_CHECK(cudaEventCreate(&end));
    CUDA_CHECK(cudaEventRecord(start, test_stream()));
    CUDA_CHECK(cudaGraphLaunch(runnable, test_stream()));
    CUDA_CHECK(cudaEventRecord(end, test_stream()));
    CUDA_CHECK(cudaEventSynchronize(end));
    float milliseconds = 0.0f;
    CUDA_CHECK(cudaEventElapsedTime(&milliseconds, start, end));
    CUDA_CHECK(cudaEventDestroy(start));
    CUDA_CHECK(cudaEventDestroy(end));
    return static_cast<double>(milliseconds);
}

template <class Launch>
void run(Launch launch) {
    CUDA_CHECK(cudaDeviceSynchronize()); // the operands' copies may still be on their way on the default stream
    Graph g;
    CUDA_CHECK(cudaStreamBeginCapture(test_stream(), cudaStreamCaptureModeGlobal));
    launch();
    CUDA_CHECK(cudaStreamEndCapture(test_stream(), &g.graph));
    g.check_nodes();
    CUDA_CHECK(cudaGraphInstantiate(&g.runnable, g.graph, 0));
    if (stopwatch().runs == 0) {
        CUDA_CHECK(cudaGraphLaunch(g.runnable, test_stream()));
        CUDA_CHECK(cudaStreamSynchronize(test_stream()));
        return;
    }
    std::vector<double> times;
    milliseconds_of(g.runnable); // the first run fills the caches
    for (int i = 0; i < stopwatch().runs; ++i) times.push_back(milliseconds_of(g.runnable));
    std::nth_element(times.begin(), times.begin() + stopwatch().runs / 2, times.end());
    stopwatch().seconds += times[times.size() / 2] * 1e-3;
}

const Kernels* launched() { return staged_plain() ? cuda_plain_kernels() : cuda_kernels(); }

template <auto member>
struct Staged;
template <class... Arguments, void (*Kernels::*member)(Arguments...)>
struct Staged<member> {
    static void call(Arguments... arguments) {
        Mirrors mirrors;
        const auto on_device = std::make_tuple(mirrors.device(arguments)...);
        run([&] { std::apply(launched()->*member, on_device); });
        mirrors.bring_back();
    }
};

// The list of sources is itself no operand: it stays on the host, its pointers are translated.
template <auto member>
void reduce(Dst dst, const void* const* srcs, int sources, std::int64_t n, Type type, void* stream) {
    Mirrors mirrors;
    std::vector<const void*> on_device;
    for (int s = 0; s < sources; ++s) on_device.push_back(mirrors.device(Src{srcs[s], type}).data);
    const Dst to = mirrors.device(dst);
    run([&] { (launched()->*member)(to, on_device.data(), sources, n, type, mirrors.device(stream)); });
    mirrors.bring_back();
}

template <auto... members>
void stage(Kernels& table) {
    ((table.*members = Staged<members>::call), ...);
}

} // namespace

bool& staged_plain() {
    static bool plain = false;
    return plain;
}

Stopwatch& stopwatch() {
    static Stopwatch watch;
    return watch;
}

const Kernels& staged_kernels() {
    using K = Kernels;
    static const Kernels table = [] {
        cuda_kernels(); // opens the libraries, which no capture allows
        Kernels t{};
        t.name = "cuda, staged";
        stage<&K::embedding, &K::embedding_grad, &K::rmsnorm, &K::rmsnorm_grad, &K::layernorm, &K::layernorm_grad,
              &K::heads_squares, &K::heads_norm, &K::heads_along, &K::heads_norm_grad, &K::value_norm,
              &K::value_norm_grad, &K::scale, &K::clip, &K::expert_scale, &K::expert_scale_grad, &K::short_conv,
              &K::short_conv_grad, &K::delta_rule, &K::delta_rule_grad, &K::ssd, &K::ssd_grad, &K::ssd_cached,
              &K::gated_norm, &K::gated_norm_grad, &K::delta_cached, &K::clip_grad, &K::add, &K::bias_add,
              &K::copy_columns, &K::bias_grad, &K::gemm, &K::rope, &K::rope_grad, &K::mla_rope, &K::mla_rope_grad,
              &K::latent_rope, &K::latent_rope_grad, &K::pick_keys, &K::pick_keys_grad, &K::xlogx, &K::attention_picked,
              &K::attention_picked_grad, &K::cache_rows, &K::attention, &K::attention_cached, &K::attention_grad,
              &K::activation, &K::activation_grad, &K::activation_grad_columns, &K::sigmoid_scale,
              &K::sigmoid_scale_grad, &K::scale_rows, &K::scale_rows_grad, &K::jitter, &K::sinkhorn, &K::router,
              &K::router_grad, &K::router_load, &K::router_loss, &K::router_loss_grad, &K::add_counts, &K::drop_copies,
              &K::local_experts, &K::token_domains, &K::domain_experts, &K::expert_bias, &K::permute_map, &K::permute,
              &K::permute_columns, &K::unpermute, &K::expert_counts, &K::fit_rows, &K::sort_rows, &K::unsort_rows,
              &K::rows_to_slots, &K::slots_to_rows, &K::split_columns, &K::join_columns, &K::grouped_gemm,
              &K::scaled_gemm, &K::scaled_wgrad, &K::quantize_rows, &K::quantize_columns, &K::requantize_columns,
              &K::dequantize_rows, &K::quantize_weights, &K::round_operand, &K::grouped_bias_add, &K::grouped_bias_grad,
              &K::ce_max, &K::ce_sum, &K::ce_loss, &K::ce_grad, &K::cross_entropy, &K::zero, &K::draw_normal,
              &K::sum_squares, &K::adamw, &K::adamw_mxfp8, &K::momentum, &K::unit, &K::orthogonal_step, &K::cast>(t);
        t.reduce_sum = reduce<&K::reduce_sum>;
        t.reduce_max = reduce<&K::reduce_max>;
        return t;
    }();
    return table;
}

} // namespace moe::test
