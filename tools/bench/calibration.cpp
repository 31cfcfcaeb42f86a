// The errors of a profile's measured calls among themselves: every call predicted from the others of its family. Build
// target bench-calibration; bench-calibration PROFILE, by default h200-measured.
#include "planner/base/error.hpp"
#include "planner/machine/hardware.hpp"
#include "simulator/cost/measured.hpp"
#include "tools/print/table.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <exception>

namespace {

using namespace moe;

constexpr std::size_t fewest_calls = 12; // fewest calls of a family: fewer leave too little when one is taken away

// Logarithms of predicted over measured seconds.
std::vector<double> errors(const machine::Hardware& hardware, const std::string& key,
                           const std::vector<machine::MeasuredCall>& calls) {
    std::vector<double> out;
    for (std::size_t left = 0; left < calls.size(); ++left) {
        std::vector<machine::MeasuredCall> others = calls;
        others.erase(others.begin() + static_cast<std::ptrdiff_t>(left));
        const cost::MeasuredFamily family(hardware, key, others);
        out.push_back(std::log(family.seconds(calls[left].work, calls[left].sides) / calls[left].seconds));
    }
    return out;
}

void run(const std::string& profile) {
    const machine::Hardware hardware = machine::load_hardware(profile);
    tools::Table table({"<family", "calls", "mean", "root mean square", "90 % below", "worst"});
    for (const auto& [key, calls] : hardware.measured) {
        if (calls.size() < fewest_calls || calls.front().sides.empty()) continue;
        std::vector<double> off = errors(hardware, key, calls);
        double sum = 0.0, squares = 0.0;
        for (double& error : off) {
            sum += error;
            squares += error * error;
            error = std::abs(error);
        }
        std::sort(off.begin(), off.end());
        const auto count = static_cast<double>(off.size());
        table.add({key, tools::count_text(count), tools::percent_text(sum / count),
                   tools::percent_text(std::sqrt(squares / count)), tools::percent_text(off[off.size() * 9 / 10]),
                   tools::percent_text(off.back())});
    }
    fmt::print("{}\n", table.text());
}

} // namespace

int main(int count, char** arguments) {
    try {
        run(count > 1 ? arguments[1] : "h200-measured");
        return 0;
    } catch (const std::exception& error) {
        fmt::print(stderr, "{}\n", error.what());
        return 2;
    }
}
