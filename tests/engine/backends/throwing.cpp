// A CUDA engine whose functions do nothing but throw: the program catches what comes through the module's door.
#include "engine/backends/cuda/backend.hpp"
#include "planner/base/error.hpp"
#include "planner/machine/gpu_properties.hpp"

#include <exception>
#include <stdexcept>
#include <utility>

namespace moe::backends {

namespace {

int counted = 0;
bool asked = false;

// A runtime counts exceptions for those who unwind: this destructor runs while one is on its way.
struct Unwound {
    ~Unwound() { counted = std::uncaught_exceptions(); }
};

int again() {
    try {
        const Unwound unwound;
        throw std::runtime_error("a kernel's limit");
    } catch (...) {
        throw;
    }
}

machine::GpuProperties words() { fail("exceptions on their way: {}", counted); }

} // namespace

void fill_cuda(ops::Backend& backend) {
    backend.name = "throwing";
    backend.devices = again;
    backend.properties = words;
    if (!std::exchange(asked, true)) refuse("--backend cuda: no CUDA device {}", 0);
}

} // namespace moe::backends
