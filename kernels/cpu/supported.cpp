// The check whether this processor has the instructions of the CPU kernels; compiled for the plainest processor, to be
// safe to ask.
#include "kernels/kernels.hpp"

namespace moe {

bool cpu_supported(std::string& why) {
    why.clear();
#if defined(__x86_64__)
    const auto need = [&why](bool present, const char* name) {
        if (present) return;
        why += why.empty() ? "" : ", ";
        why += name;
    };
    __builtin_cpu_init();
    need(__builtin_cpu_supports("avx2") != 0, "AVX2");
    need(__builtin_cpu_supports("fma") != 0, "FMA");
    need(__builtin_cpu_supports("bmi") != 0, "BMI1");
    need(__builtin_cpu_supports("bmi2") != 0, "BMI2");
    if (!why.empty()) why = "this processor lacks " + why + ", which the CPU kernels are compiled for (x86-64-v3)";
#endif
    return why.empty();
}

} // namespace moe
