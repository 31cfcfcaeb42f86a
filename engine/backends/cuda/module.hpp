// The door of the CUDA engine's shared module: what a program looks up in it, and what it gives the module.
//
// The module holds its own copies of all that it uses, the C++ runtime of a portable build among it. What crosses the
// border are tables of functions, objects with virtual functions and exceptions, whose layouts are those of one build:
// the stamp says which.
#pragma once

#include "engine/ops/backend.hpp"

#include <cxxabi.h>
#include <unwind.h>

namespace moe::backends {

inline constexpr const char* cuda_module_file = "moe-plan-cuda.so";

// Of the build that holds this code: the version, the compiler and its options that change layouts, and a hash of the
// headers and of the CUDA engine's sources.
const char* build_stamp();
// The folder of the module in an installation, as seen from that of the programs.
const char* modules_folder();

// The program's own exceptions, by the functions of the Itanium C++ ABI that C++ takes for them
// (https://itanium-cxx-abi.github.io/cxx-abi/abi-eh.html). Two static copies of the runtime could not pass an exception
// to each other: each counts those of a thread for itself, and walks the stack by tables that it fills when it throws.
struct CudaHost {
    decltype(&abi::__cxa_get_globals) exceptions = nullptr;
    decltype(&_Unwind_RaiseException) raise = nullptr;
    decltype(&_Unwind_Resume_or_Rethrow) rethrow = nullptr;
    decltype(&_Unwind_Resume) resume = nullptr;
    decltype(&_Unwind_DeleteException) drop = nullptr;
    decltype(&_Unwind_GetLanguageSpecificData) tables = nullptr;
    decltype(&_Unwind_GetRegionStart) start = nullptr;
    decltype(&_Unwind_GetIPInfo) place = nullptr;
    decltype(&_Unwind_GetDataRelBase) data_base = nullptr;
    decltype(&_Unwind_GetTextRelBase) text_base = nullptr;
    decltype(&_Unwind_SetGR) set_register = nullptr;
    decltype(&_Unwind_SetIP) set_place = nullptr;
};

// What the module exports, by these names.
inline constexpr const char* cuda_stamp_name = "moe_plan_cuda_stamp";
inline constexpr const char* cuda_engine_name = "moe_plan_cuda_engine";
using CudaStamp = const char* (*)();
// Fills in a back end, except for the ops that are the same for every back end. Throws as fill_cuda() does.
using CudaEngine = void (*)(const CudaHost& host, ops::Backend& backend);

} // namespace moe::backends
