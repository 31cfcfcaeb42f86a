// Energy and clocks of a GPU, asked of the driver's management library (NVML), which this build does not link: it comes
// with the driver, and where it is missing nothing is known.
#include "engine/backends/cuda/backend.hpp"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <array>
#include <type_traits>

namespace moe::backends {

namespace {

// The library's own names and numbers: https://docs.nvidia.com/deploy/nvml-api
using Handle = void*;
constexpr int success = 0, clock_of_multiprocessors = 1;

struct Library {
    int (*init)() = nullptr;
    int (*by_place)(const char* bus, Handle* device) = nullptr;
    int (*energy)(Handle device, unsigned long long* millijoules) = nullptr;
    int (*limit)(Handle device, unsigned* milliwatts) = nullptr;
    int (*clock)(Handle device, int which, unsigned* megahertz) = nullptr;
    int (*top_clock)(Handle device, int which, unsigned* megahertz) = nullptr;
    bool here = false;
};

Library open_library() {
    Library library;
    void* file = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) return library;
    bool all = true;
    const auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(file, name));
        all = all && function != nullptr;
    };
    find(library.init, "nvmlInit_v2");
    find(library.by_place, "nvmlDeviceGetHandleByPciBusId_v2");
    find(library.energy, "nvmlDeviceGetTotalEnergyConsumption");
    find(library.limit, "nvmlDeviceGetEnforcedPowerLimit");
    find(library.clock, "nvmlDeviceGetClockInfo");
    find(library.top_clock, "nvmlDeviceGetMaxClockInfo");
    library.here = all && library.init() == success;
    return library;
}

} // namespace

device::PowerSample cuda_draw(int device) {
    static const Library library = open_library();
    std::array<char, 32> place{};
    Handle handle = nullptr;
    if (!library.here || cudaDeviceGetPCIBusId(place.data(), static_cast<int>(place.size()), device) != cudaSuccess ||
        library.by_place(place.data(), &handle) != success)
        return {};
    unsigned long long energy = 0;
    unsigned limit = 0, clock = 0, top = 0;
    const bool known = library.energy(handle, &energy) == success && library.limit(handle, &limit) == success &&
                       library.clock(handle, clock_of_multiprocessors, &clock) == success &&
                       library.top_clock(handle, clock_of_multiprocessors, &top) == success;
    if (!known) return {};
    return {1e-3 * static_cast<double>(energy), 1e-3 * limit, 1e6 * clock, 1e6 * top};
}

} // namespace moe::backends
