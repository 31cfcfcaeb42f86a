// The door of the CUDA engine's shared module, from within.
#include "engine/backends/cuda/module.hpp"

#include "engine/backends/cuda/backend.hpp"

namespace {

moe::backends::CudaHost program; // set before anything here can throw

} // namespace

extern "C" {

const char* moe_plan_cuda_stamp() { return moe::backends::build_stamp(); }

void moe_plan_cuda_engine(const moe::backends::CudaHost& host, moe::ops::Backend& backend) {
    program = host;
    moe::backends::fill_cuda(backend);
}

} // extern "C"

// In the place of the runtime's own: exceptions of the module are the program's.

namespace __cxxabiv1 { // NOLINT: its name
extern "C" {
__cxa_eh_globals* __cxa_get_globals() noexcept { return program.exceptions(); }
__cxa_eh_globals* __cxa_get_globals_fast() noexcept { return program.exceptions(); }
}
} // namespace __cxxabiv1

extern "C" {
_Unwind_Reason_Code _Unwind_RaiseException(_Unwind_Exception* e) { return program.raise(e); }
_Unwind_Reason_Code _Unwind_Resume_or_Rethrow(_Unwind_Exception* e) { return program.rethrow(e); }
void _Unwind_DeleteException(_Unwind_Exception* e) { program.drop(e); }
void _Unwind_Resume(_Unwind_Exception* e) {
    program.resume(e);
    __builtin_unreachable();
}

void* _Unwind_GetLanguageSpecificData(_Unwind_Context* c) { return program.tables(c); }
_Unwind_Ptr _Unwind_GetRegionStart(_Unwind_Context* c) { return program.start(c); }
_Unwind_Ptr _Unwind_GetIPInfo(_Unwind_Context* c, int* before) { return program.place(c, before); }
_Unwind_Ptr _Unwind_GetDataRelBase(_Unwind_Context* c) { return program.data_base(c); }
_Unwind_Ptr _Unwind_GetTextRelBase(_Unwind_Context* c) { return program.text_base(c); }
void _Unwind_SetGR(_Unwind_Context* c, int number, _Unwind_Word value) { program.set_register(c, number, value); }
void _Unwind_SetIP(_Unwind_Context* c, _Unwind_Ptr place) { program.set_place(c, place); }
}
