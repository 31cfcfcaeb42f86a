// Looks for the CUDA engine's shared module, holds it to this build, and takes its back end.
#include "engine/backends/cuda_module.hpp"

#include "planner/base/error.hpp"

#include <dlfcn.h>
#include <fmt/ranges.h>

#include <cstdlib>
#include <filesystem>
#include <string_view>

namespace moe::backends {

namespace fs = std::filesystem;

namespace {

// The function of that name, which has type Function.
template <class Function>
Function found(void* module, const char* name, const std::string& path) {
    void* symbol = ::dlsym(module, name);
    if (symbol == nullptr) refuse("--backend cuda: {} is no CUDA engine of moe-plan: it has no {}", path, name);
    return reinterpret_cast<Function>(symbol);
}

ops::Backend make_of_module() {
    ops::Backend backend;
    open_cuda_module(cuda_module_places())(cuda_host(), backend);
    const auto own = backend.table;
    ops::add_kernels(backend);
    ops::add_communication(backend);
    for (std::size_t kind = 0; kind < own.size(); ++kind)
        if (own[kind] != nullptr) backend.table[kind] = own[kind];
    return backend;
}

} // namespace

CudaHost cuda_host() {
    return {abi::__cxa_get_globals, _Unwind_RaiseException,  _Unwind_Resume_or_Rethrow,
            _Unwind_Resume,         _Unwind_DeleteException, _Unwind_GetLanguageSpecificData,
            _Unwind_GetRegionStart, _Unwind_GetIPInfo,       _Unwind_GetDataRelBase,
            _Unwind_GetTextRelBase, _Unwind_SetGR,           _Unwind_SetIP};
}

std::vector<std::string> cuda_module_places() {
    if (const char* chosen = std::getenv("MOE_PLAN_CUDA"); chosen != nullptr && *chosen != '\0') return {chosen};
    std::error_code error;
    const fs::path folder = fs::read_symlink("/proc/self/exe", error).parent_path();
    if (error) fail("cannot find {}: /proc/self/exe: {}; set MOE_PLAN_CUDA", cuda_module_file, error.message());
    const fs::path installed = folder / modules_folder() / cuda_module_file;
    return {(folder / cuda_module_file).string(), installed.lexically_normal().string()};
}

CudaEngine open_cuda_module(const std::vector<std::string>& places) {
    std::error_code error;
    for (const std::string& path : places) {
        if (!fs::exists(path, error)) continue;
        void* module = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (module == nullptr) refuse("--backend cuda: {}; use --backend cpu", ::dlerror());
        const std::string_view stamp = found<CudaStamp>(module, cuda_stamp_name, path)();
        if (stamp != build_stamp())
            refuse("--backend cuda: {} is of another build ({}; this is {}): take both from one build", path, stamp,
                   build_stamp());
        return found<CudaEngine>(module, cuda_engine_name, path);
    }
    refuse(
        "--backend cuda: no CUDA engine at {}: it is built where nvcc is found, with -Dcuda=enabled; use --backend cpu",
        fmt::join(places, " or "));
}

const ops::Backend& cuda_backend() {
    static const ops::Backend backend = make_of_module();
    return backend;
}

} // namespace moe::backends
