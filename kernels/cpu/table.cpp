// The CPU back end's table, and the scratch buffers of a thread.
#include "kernels/cpu/rows.hpp"

#include <memory>

namespace moe {
namespace cpu {

namespace {

template <class T>
struct Buffer {
    std::unique_ptr<T[]> data;
    std::int64_t capacity = 0;

    T* at_least(std::int64_t elements) {
        if (capacity < elements) {
            data.reset(); // before the new one is taken: the old contents are not wanted
            capacity = 0;
            data.reset(new T[static_cast<std::size_t>(elements)]);
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
        cpu::add_embedding(t);
        cpu::add_gemm(t);
        cpu::add_loss(t);
        cpu::add_norm(t);
        cpu::add_optimizer(t);
        cpu::add_permute(t);
        cpu::add_rope(t);
        cpu::add_router(t);
        return t;
    }();
    return table;
}

} // namespace moe
