// The CPU back end's table, and the scratch buffers of a thread.
#include "kernels/cpu/rows.hpp"

#include <memory>
#include <new>

namespace moe {
namespace cpu {

namespace {

// Aligned for the widest vectors: where Eigen starts its packets, and with that the last bit of a sum or an
// exponential, depends on the address, and the same call shall give the same bits.
constexpr std::align_val_t alignment{64};

struct Free {
    void operator()(void* memory) const { ::operator delete(memory, alignment); }
};

template <class T>
struct Buffer {
    std::unique_ptr<T, Free> data;
    std::int64_t capacity = 0;

    T* at_least(std::int64_t elements) {
        if (capacity < elements) {
            data.reset(); // The old contents go before new memory is taken, as nobody wants them.
            capacity = 0;
            data.reset(static_cast<T*>(::operator new(static_cast<std::size_t>(elements) * sizeof(T), alignment)));
            capacity = elements;
        }
        return data.get();
    }
};

} // namespace

float* scratch(Slot slot, std::int64_t elements) {
    thread_local Buffer<float> buffers[static_cast<int>(Slot::count)];
    return buffers[static_cast<int>(slot)].at_least(elements);
}

std::int32_t* index_scratch(std::int64_t elements) {
    thread_local Buffer<std::int32_t> buffer;
    return buffer.at_least(elements);
}

} // namespace cpu

const Kernels& cpu_kernels() {
    static const Kernels table = [] {
        Kernels t{};
        t.name = "cpu";
        cpu::add_activation(t);
        cpu::add_attention(t);
        cpu::add_attention_cached(t);
        cpu::add_balance(t);
        cpu::add_delta_conv(t);
        cpu::add_delta_rule(t);
        cpu::add_deviate(t);
        cpu::add_domains(t);
        cpu::add_embedding(t);
        cpu::add_gemm(t);
        cpu::add_layer_norm(t);
        cpu::add_loss(t);
        cpu::add_muon(t);
        cpu::add_norm(t);
        cpu::add_optimizer(t);
        cpu::add_permute(t);
        cpu::add_quantize(t);
        cpu::add_rope(t);
        cpu::add_round(t);
        cpu::add_router(t);
        cpu::add_scaled_gemm(t);
        cpu::add_scaled_wgrad(t);
        cpu::add_sinkhorn(t);
        cpu::add_slots(t);
        cpu::add_sparse(t);
        cpu::add_ssd(t);
        return t;
    }();
    return table;
}

} // namespace moe
