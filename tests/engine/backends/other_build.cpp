// A shared module with the door of a CUDA engine, of another build.

extern "C" const char* moe_plan_cuda_stamp() { return "0.0.1 gcc-4.9 feed"; }
