// Attention on tensor cores by cuDNN where the machine has it; what it does not take is left to the plain kernels.
//
// A plan is made once per shape and kept, as is the scratch of each stream: a captured graph may hold both. Making one
// takes a good part of a second, for cuDNN compiles the kernel.
#include "kernels/cuda/attention/attention.cuh"
#include "kernels/cuda/attention/attention_graphs.hpp"
#include "kernels/cuda/attention/attention_library.hpp"
#include "kernels/cuda/attention/attention_ordered.hpp"
#include "kernels/cuda/attention/attention_pieces.hpp"
#include "kernels/cuda/cuda_kernels.hpp"
#include "kernels/cuda/families.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>

namespace moe::cuda {
namespace {

constexpr std::int64_t scratch_alignment = 256;

std::int64_t rounded(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }

// Lets this thread allocate and compile while a stream is being captured; nothing of it becomes part of the graph.
class Uncaptured {
public:
    Uncaptured() { CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&mode_)); }
    ~Uncaptured() { cudaThreadExchangeStreamCaptureMode(&mode_); }
    Uncaptured(const Uncaptured&) = delete;
    Uncaptured& operator=(const Uncaptured&) = delete;

private:
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// cuDNN reads 16 bytes at a time.
bool aligned(std::initializer_list<Src> operands) {
    return std::all_of(operands.begin(), operands.end(), [](const Src& x) {
        return x.type == Type::bf16 && reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0;
    });
}

std::optional<AttentionPlanShape> plan_shape(const AttentionCall& c, Src o) {
    const AttentionShape& s = c.s;
    const AttentionSizes z(s);
    constexpr std::int64_t step = 8; // elements in 16 bytes
    const bool whole = s.qk_dim % step == 0 && s.v_dim % step == 0 && z.q_stride % step == 0 &&
                       z.k_stride % step == 0 && z.v_stride % step == 0;
    // Some of more queries than keys see nothing, which cuDNN does not define.
    const bool blind = (s.causal || s.window > 0) && s.seq_q > s.seq_k;
    if (s.seq_k <= 0 || !whole || blind || !aligned({c.q, c.k, c.v, o})) return std::nullopt;
    AttentionPlanShape p;
    p.batch = p.interleaved = s.batch;
    p.heads = s.heads, p.kv_heads = s.kv_heads, p.seq_q = s.seq_q, p.seq_k = s.seq_k;
    p.qk_dim = s.qk_dim, p.v_dim = s.v_dim;
    p.q_batch = z.q_stride, p.k_batch = z.k_stride, p.v_batch = z.v_stride, p.o_batch = std::int64_t{s.heads} * s.v_dim;
    p.dq_batch = c.dq_stride != 0 ? c.dq_stride : z.q_stride;
    p.lse_head = c.lse_head;
    p.window = s.window, p.causal = s.causal, p.scale = static_cast<float>(s.scale);
    return p;
}

// cuDNN takes sinks in FP32 only: it finds an engine for BF16 ones, which reads them as FP32 (9.14 and 9.19).
__global__ void widen_kernel(Src x, float* y, int n) {
    for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) y[i] = load(x, i);
}

class Library {
public:
    Library() {
        const char* wanted = std::getenv("MOE_PLAN_CUDNN");
        std::string why = "MOE_PLAN_CUDNN=off";
        if ((wanted != nullptr && std::string(wanted) == "off") || !cudnn_.open(why)) {
            about_ = why + ": attention by plain kernels";
            return;
        }
        try {
            int device = 0;
            CUDA_CHECK(cudaGetDevice(&device));
            open(devices_[device]);
        } catch (const std::exception& error) {
            about_ = std::string(error.what()) + ": attention by plain kernels";
            return;
        }
        usable_ = true;
        const std::size_t version = cudnn_.version(); // 9.14.0 is 91400
        about_ = "cuDNN " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
                 std::to_string(version % 100);
    }

    const std::string& about() const { return about_; }

    bool forward(const AttentionCall& c, Src sinks, Dst o, float* lse, cudaStream_t stream) {
        std::optional<AttentionPlanShape> p = usable_ ? plan_shape(c, o) : std::nullopt;
        if (!p) return false;
        p->sinks = sinks.data != nullptr;
        Device& device = current();
        const std::lock_guard<std::mutex> lock(device.guard);
        const CudnnGraph* graph = planned(device, *p);
        if (graph == nullptr) return false;
        const std::int64_t own = rounded(graph->workspace_bytes(), scratch_alignment);
        char* memory = scratch(device, stream, own + (p->sinks ? p->heads * 4 : 0));
        Operands operands{{operand_q, address(c.q)},
                          {operand_k, address(c.k)},
                          {operand_v, address(c.v)},
                          {operand_o, o.data},
                          {operand_lse, lse}};
        if (p->sinks) {
            widen_kernel<<<1, 256, 0, stream>>>(sinks, reinterpret_cast<float*>(memory + own), c.s.heads);
            CUDA_CHECK(cudaGetLastError());
            operands.emplace_back(operand_sinks, memory + own);
        }
        graph->run(on(device, stream), operands, memory);
        return true;
    }

    bool backward(const AttentionCall& c, Src dout, Src o, const float* lse, Dst dq, Dst dk, Dst dv,
                  cudaStream_t stream) {
        std::optional<AttentionPlanShape> p = usable_ ? plan_shape(c, o) : std::nullopt;
        if (!p || !aligned({dout, dq, dk, dv})) return false;
        p->grad = true, p->deterministic = c.s.deterministic;
        const Gradients grads{c, dout, o, lse, dq, dk, dv};
        Device& device = current();
        const std::lock_guard<std::mutex> lock(device.guard);
        const std::int64_t ordered = p->deterministic ? ordered_attention_bytes(c) : 0;
        if (ordered > 0) {
            ordered_attention_grad(c, dout, o, lse, dq, dk, dv, scratch(device, stream, ordered), stream);
            return true;
        }
        const std::vector<AttentionPiece> pieces = attention_pieces(*p);
        std::vector<const CudnnGraph*> graphs;
        std::int64_t bytes = 0;
        for (const AttentionPiece& piece : pieces) {
            graphs.push_back(planned(device, shape_of(*p, piece)));
            if (graphs.back() == nullptr) return false;
            bytes = std::max(bytes, Layout(*p, piece, *graphs.back()).end);
        }
        if (pieces.empty()) return false;
        char* memory = scratch(device, stream, bytes);
        const cudnnHandle_t handle = on(device, stream);
        for (std::size_t i = 0; i < pieces.size(); ++i)
            run_piece(handle, *p, pieces[i], *graphs[i], grads, memory, stream);
        return true;
    }

    void forget(cudaStream_t stream) {
        std::vector<Device*> devices;
        {
            const std::lock_guard<std::mutex> lock(guard_);
            for (auto& [number, device] : devices_) devices.push_back(&device);
        }
        for (Device* device : devices) {
            const std::lock_guard<std::mutex> lock(device->guard);
            for (const Use use : {Use::within, Use::around}) {
                const auto at = device->scratch.find({stream, use});
                if (at == device->scratch.end()) continue;
                while (!at->second.empty()) release(at->second);
                device->scratch.erase(at);
            }
        }
    }

    char* around(cudaStream_t stream, std::int64_t bytes) {
        Device& device = current();
        const std::lock_guard<std::mutex> lock(device.guard);
        return scratch(device, stream, bytes, Use::around);
    }

    std::int64_t held() const { return held_; }

private:
    using Operands = std::vector<std::pair<std::int64_t, void*>>;
    struct Block {
        char* memory;
        std::int64_t bytes;
        bool captured = false; // whether a graph may hold it
    };
    enum class Use { within, around }; // inside or around a call
    struct Device {
        // The handle belongs to one call at a time. Each device has its own: to load a kernel or to free memory may
        // wait for the device, whose collectives may wait for what another rank's thread has yet to enqueue here.
        std::mutex guard;
        cudnnHandle_t handle = nullptr;
        CudnnDescriptor properties;
        std::map<AttentionPlanShape, std::unique_ptr<CudnnGraph>> plans;    // graphs by shape; null: cuDNN has none
        std::map<std::pair<cudaStream_t, Use>, std::vector<Block>> scratch; // scratch blocks, the largest last
    };

    struct Gradients {
        const AttentionCall& c;
        Src dout, o;
        const float* lse;
        Dst dq, dk, dv; // gradients at the call's first element
    };
    // Scratch of a piece, in bytes from its start. The sums of pieces that share keys lie in front, where every one of
    // them finds the same.
    struct Layout {
        std::int64_t dk_sums = 0, dv_sums = 0, library = 0, along = 0, dq_sums = 0, dk = 0, dv = 0, end = 0;

        Layout(const AttentionPlanShape& whole, const AttentionPiece& p, const CudnnGraph& graph) {
            const auto take = [&](std::int64_t& at, std::int64_t bytes) {
                at = end;
                end += rounded(bytes, scratch_alignment);
            };
            const std::int64_t queries = p.sequences * p.heads * p.queries,
                               keys = p.shared ? p.sequences * p.key_heads * p.keys : 0;
            take(dk_sums, 4 * key_sums(whole, p, whole.qk_dim));
            take(dv_sums, 4 * key_sums(whole, p, whole.v_dim));
            take(library, graph.workspace_bytes());
            take(along, 4 * queries);
            take(dq_sums, whole.deterministic ? 0 : 4 * queries * whole.qk_dim);
            take(dk, 2 * keys * whole.qk_dim);
            take(dv, 2 * keys * whole.v_dim);
        }
    };

    static void* address(Src x) { return const_cast<void*>(x.data); }

    static void run_piece(cudnnHandle_t handle, const AttentionPlanShape& w, const AttentionPiece& p,
                          const CudnnGraph& graph, const Gradients& g, char* memory, cudaStream_t stream) {
        const Layout at(w, p, graph);
        const std::int64_t row = p.query * w.interleaved + p.sequence, whole_row = p.sequence,
                           key_row = p.key * w.interleaved + p.sequence;
        const std::int64_t q_at = row * w.q_batch + p.head * w.qk_dim, o_at = row * w.o_batch + p.head * w.v_dim;
        const Dst dk = g.dk + (whole_row * w.k_batch + p.key_head * w.qk_dim),
                  dv = g.dv + (whole_row * w.v_batch + p.key_head * w.v_dim);
        Operands operands{{operand_q, address(g.c.q + q_at)},
                          {operand_k, address(g.c.k + (key_row * w.k_batch + p.key_head * w.qk_dim))},
                          {operand_v, address(g.c.v + (key_row * w.v_batch + p.key_head * w.v_dim))},
                          {operand_o, address(g.o + o_at)},
                          {operand_lse, const_cast<float*>(g.lse + (p.head * w.lse_head + row))},
                          {operand_dout, address(g.dout + o_at)},
                          {operand_dq, (g.dq + (row * w.dq_batch + p.head * w.qk_dim)).data},
                          {operand_dk, p.shared ? memory + at.dk : dk.data},
                          {operand_dv, p.shared ? memory + at.dv : dv.data},
                          {operand_along, memory + at.along}};
        if (!w.deterministic)
            operands.emplace_back(operand_dq_sums, memory + at.dq_sums); // cuDNN refuses unknown operands.
        graph.run(handle, operands, memory + at.library);
        if (!p.shared) return;
        const auto sums = [&](std::int64_t bytes) { return reinterpret_cast<float*>(memory + bytes); };
        sum_key_grads(w, p, memory + at.dk, w.qk_dim, sums(at.dk_sums), dk, w.k_batch, stream);
        sum_key_grads(w, p, memory + at.dv, w.v_dim, sums(at.dv_sums), dv, w.v_batch, stream);
    }

    void open(Device& device) {
        const Uncaptured uncaptured;
        cudnn_.check(cudnn_.create(&device.handle), "starting the library");
        device.properties = CudnnDescriptor(cudnn_, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
        device.properties.set(CUDNN_ATTR_DEVICEPROP_HANDLE, CUDNN_TYPE_HANDLE, device.handle);
        device.properties.finalize();
    }

    Device& current() {
        int number = 0;
        CUDA_CHECK(cudaGetDevice(&number));
        const std::lock_guard<std::mutex> lock(guard_);
        return devices_[number];
    }

    cudnnHandle_t on(Device& device, cudaStream_t stream) {
        cudnn_.check(cudnn_.set_stream(device.handle, stream), "choosing a stream");
        return device.handle;
    }

    const CudnnGraph* planned(Device& device, const AttentionPlanShape& shape) {
        auto [at, fresh] = device.plans.try_emplace(shape);
        if (!fresh) return at->second.get();
        const Uncaptured uncaptured;
        if (device.handle == nullptr) open(device);
        auto graph = std::make_unique<CudnnGraph>(cudnn_);
        (shape.grad ? describe_attention_grad : describe_attention)(*graph, shape);
        if (graph->plan(device.properties)) at->second = std::move(graph);
        return at->second.get();
    }

    // Grows by a further block where a graph may go on with the one it was captured with.
    char* scratch(Device& device, cudaStream_t stream, std::int64_t bytes, Use use = Use::within) {
        cudaStreamCaptureStatus capture{};
        CUDA_CHECK(cudaStreamIsCapturing(stream, &capture));
        const bool capturing = capture != cudaStreamCaptureStatusNone;
        std::vector<Block>& blocks = device.scratch[{stream, use}];
        if (blocks.empty() || blocks.back().bytes < bytes) {
            if (!blocks.empty() && !blocks.back().captured && !capturing) release(blocks); // release() synchronizes.
            blocks.push_back(allocated(std::max(bytes, scratch_alignment)));
        }
        blocks.back().captured |= capturing;
        return blocks.back().memory;
    }

    Block allocated(std::int64_t bytes) {
        const Uncaptured uncaptured;
        void* memory = nullptr;
        const cudaError_t status = cudaMalloc(&memory, static_cast<std::size_t>(bytes));
        if (status != cudaSuccess) {
            cudaGetLastError(); // The next launch's check must not find this failure.
            throw std::runtime_error("cuDNN's attention needs " + std::to_string(bytes >> 20) +
                                     " MiB of scratch beside the plan's memory: " + cudaGetErrorString(status));
        }
        held_ += bytes;
        return {static_cast<char*>(memory), bytes};
    }

    void release(std::vector<Block>& blocks) {
        cudaFree(blocks.back().memory);
        held_ -= blocks.back().bytes;
        blocks.pop_back();
    }

    Cudnn cudnn_;
    std::string about_;
    bool usable_ = false;
    std::mutex guard_; // The mutex guards the map.
    std::map<int, Device> devices_;
    std::atomic<std::int64_t> held_{0};
};

// Never closed: at exit cuDNN's own parts, loaded later, are gone before it.
Library& library() {
    static Library& opened = *new Library;
    return opened;
}

// The functions that the table held before the library came in front.
struct Fallback {
    decltype(Kernels::attention) attention = nullptr;
    decltype(Kernels::attention_grad) attention_grad = nullptr;
};
Fallback& fallback() {
    static Fallback plain;
    return plain;
}

std::atomic<std::int64_t> calls_of_library{0}, calls_of_plain{0};

bool counted(bool by_library) {
    ++(by_library ? calls_of_library : calls_of_plain);
    return by_library;
}

AttentionCall call_of(const AttentionShape& s, Src q, Src k, Src v) {
    return {s, q + s.q_offset, k + s.k_offset, v + s.v_offset, s.seq_q * s.batch};
}

void attention(const AttentionShape& s, Src q, Src k, Src v, Src sinks, Dst o, float* lse, void* stream) {
    if (s.seq_q <= 0 || s.batch <= 0 || s.heads <= 0) return;
    const bool plain = s.document_start != nullptr; // cuDNN knows no document's start that the device has.
    const bool done = plain      ? false
                      : s.spread ? spread_attention(s, q, k, v, sinks, o, lse, stream_of(stream))
                      : s.merge  ? false
                                 : library_attention(call_of(s, q, k, v), sinks, o, lse, stream_of(stream));
    if (!counted(done)) fallback().attention(s, q, k, v, sinks, o, lse, stream);
}

void attention_grad(const AttentionShape& s, Src dout, Src q, Src k, Src v, Src o, const float* lse, Src sinks, Dst dq,
                    Dst dk, Dst dv, float* dsinks, void* stream) {
    if (s.seq_q <= 0 || s.seq_k <= 0 || s.batch <= 0 || s.heads <= 0) return;
    const bool plain = s.document_start != nullptr;
    const bool done = plain      ? false
                      : s.spread ? spread_attention_grad(s, dout, q, k, v, o, lse, dq, dk, dv, stream_of(stream))
                      : s.merge  ? false
                                 : library_attention_grad(call_of(s, q, k, v), dout, o, lse, dq + s.q_offset,
                                                          dk + s.k_offset, dv + s.v_offset, stream_of(stream));
    if (!counted(done)) return fallback().attention_grad(s, dout, q, k, v, o, lse, sinks, dq, dk, dv, dsinks, stream);
    if (sinks.data != nullptr) attention_sink_grad(s, dout, o, lse, sinks, dsinks, stream); // lse counts the sink.
}

} // namespace

void add_library_attention(Kernels& table) {
    fallback() = {table.attention, table.attention_grad};
    table.attention = attention;
    table.attention_grad = attention_grad;
}

bool library_attention(const AttentionCall& call, Src sinks, Dst o, float* lse, cudaStream_t stream) {
    return library().forward(call, sinks, o, lse, stream);
}
bool library_attention_grad(const AttentionCall& call, Src dout, Src o, const float* lse, Dst dq, Dst dk, Dst dv,
                            cudaStream_t stream) {
    return library().backward(call, dout, o, lse, dq, dk, dv, stream);
}
char* library_scratch(cudaStream_t stream, std::int64_t bytes) { return library().around(stream, bytes); }
void forget_attention_stream(void* stream) { library().forget(stream_of(stream)); }

} // namespace moe::cuda

namespace moe {

std::string cuda_attention_library() { return cuda::library().about(); }
AttentionCalls cuda_attention_calls() { return {cuda::calls_of_library, cuda::calls_of_plain}; }
std::int64_t cuda_library_workspace_bytes() { return cuda::library().held(); }

} // namespace moe
