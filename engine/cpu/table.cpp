// The CPU back end: the CPU kernels, memory of this process, any number of ranks.
#include "engine/cpu/table.hpp"

#include "planner/error.hpp"

namespace moe {

namespace {

Backend make() {
    std::string why;
    if (!cpu_supported(why)) fail("the cpu back end cannot run here: {}", why);
    Backend b;
    b.name = "cpu";
    b.kernels = &cpu_kernels();
    b.open = [](bool) { return open_host(); };
    add_kernels(b);
    add_communication(b);
    return b;
}

} // namespace

const Backend& cpu_backend() {
    static const Backend backend = make();
    return backend;
}

} // namespace moe
