// The JSON documents of compare --log and compare --profile.
#pragma once

#include "tools/report/log_comparison.hpp"
#include "tools/report/profile_comparison.hpp"

#include <string>

namespace moe::tools {

std::string log_comparison_document(const LogComparison& comparison);

// Which ranks of the plan a profile is compared with, and how its kernels were told apart.
struct ProfileSubject {
    int rank = 0;            // of the profile, or as said
    bool rank_known = false; // the profile or the user said it; else rank 0 is taken
    int pipeline_rank = 0;
    int represents = 1; // ranks of the job that run the same
    std::string table;  // the kernel table's name
    double predicted_tflops = 0.0;
    std::vector<std::string> warnings; // profile_warnings()
};
// names: at most 100 of the unmatched ones, without bytes that are no ASCII.
std::string profile_comparison_document(const ProfileComparison& comparison, const ProfileSubject& subject,
                                        const DeviceProfile& profile, const ProfiledSteps& steps);

// predicted * seconds ratio: the model TFLOPS/GPU that a measured step means, by the plan's own FLOPs.
double measured_tflops(const ProfileComparison& comparison, const ProfileSubject& subject);

} // namespace moe::tools
