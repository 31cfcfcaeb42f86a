// A profile of another engine beside the predicted timeline of the plan that it ran, kind by kind.
#pragma once

#include "planner/program/timeline.hpp"
#include "tools/measured/device_profile.hpp"
#include "tools/measured/kernel_table.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::tools {

// A row holds op kinds that the names of the profile's kernels do not tell apart, often one. All figures are of one
// step of one rank.
struct ProfileRow {
    std::string name; // the kind's, or what several are together
    std::vector<program::OpKind> kinds;
    bool communication = false;
    std::int64_t count = 0;      // predicted ops
    double kernels = 0.0;        // measured kernels, copies and fills
    double predicted = 0.0;      // busy seconds
    double predicted_wait = 0.0; // seconds in which these ops wait for peers, beside the busy ones
    double measured = 0.0;       // seconds; of communication with the wait for peers, which NCCL's kernels contain
};
struct UnmatchedKernel {
    std::string name;
    double kernels = 0.0, seconds = 0.0, share = 0.0; // of one step; share of the measured kernels' seconds
};
struct StreamUse {
    std::string device;
    std::int32_t stream = 0;
    double kernels = 0.0, seconds = 0.0, communication = 0.0; // of one step
};
struct SideTotals { // of one step, seconds
    double step = 0.0;
    double exposed = 0.0; // communication beside which no kernel computes
    double idle = 0.0;    // nothing runs on the device
};

struct ProfileComparison {
    SideTotals predicted, measured;
    std::vector<ProfileRow> rows;                         // most measured seconds first
    std::vector<UnmatchedKernel> unmatched;               // most seconds first
    std::vector<StreamUse> streams;                       // most seconds first
    double unmatched_seconds = 0.0, kernel_seconds = 0.0; // of one step; kernel_seconds: of all that ran
    std::size_t devices = 0;
};

// representative: the rank of the predicted timeline whose rows count.
ProfileComparison compare_profile(const program::Timeline& predicted, int representative, const DeviceProfile& profile,
                                  const ProfiledSteps& steps, const KernelTable& table);

} // namespace moe::tools
