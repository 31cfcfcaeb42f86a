// The closed forms of Young and Daly.
#include "simulator/goodput/goodput.hpp"

#include <cmath>

namespace moe::goodput {

double job_mtbf(double per_gpu, int gpus) { return per_gpu / gpus; }

double young_interval(const Failures& f) { return std::sqrt(2.0 * f.write * f.mtbf); }

double daly_interval(const Failures& f) {
    if (f.write >= 2.0 * f.mtbf) return f.mtbf;
    const double x = std::sqrt(f.write / (2.0 * f.mtbf));
    return young_interval(f) * (1.0 + x / 3.0 + x * x / 9.0) - f.write;
}

double goodput(const Failures& f, double interval) {
    return interval / (f.mtbf * std::exp(f.restart / f.mtbf) * std::expm1((interval + f.write) / f.mtbf));
}

} // namespace moe::goodput
