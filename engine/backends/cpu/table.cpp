// The CPU back end: the CPU kernels, memory of this process, any number of ranks.
#include "engine/backends/cpu/table.hpp"

#include "engine/ops/op_context.hpp"
#include "planner/base/error.hpp"
#include "planner/program/op.hpp"

#include <cstring>

namespace moe::backends {

namespace {

// Offloaded tensors stay in this process' memory: the last inputs go to the outputs, one each.
void copy_bytes(const ops::OpContext& c) {
    const std::size_t count = c.op.out.size(), first = c.op.in.size() - count;
    for (std::size_t i = 0; i < count; ++i)
        std::memcpy(c.out[i], c.in[first + i], static_cast<std::size_t>(c.output(i).bytes()));
}

ops::Backend make() {
    std::string why;
    if (!cpu_supported(why)) fail("the cpu back end cannot run here: {}", why);
    ops::Backend b;
    b.name = "cpu";
    b.kernels = &cpu_kernels();
    b.open = [](bool, int) { return device::open_host(); };
    b.tells_logits = b.tells_picked_logits = true;
    ops::add_kernels(b);
    ops::add_communication(b);
    for (const program::OpKind kind : {program::OpKind::copy_to_host, program::OpKind::copy_from_host})
        b.table[static_cast<std::size_t>(kind)] = copy_bytes;
    return b;
}

} // namespace

const ops::Backend& cpu_backend() {
    static const ops::Backend backend = make();
    return backend;
}

} // namespace moe::backends
