// Ticks at 1, 2 or 5 times a power of ten, and the frame of a chart.
#include "tools/report/svg.hpp"

#include <fmt/format.h>

#include <cmath>

namespace moe::tools {

std::string escape(const std::string& text) {
    std::string out;
    for (const char c : text) switch (c) {
        case '&':
            out += "&amp;";
            break;
        case '<':
            out += "&lt;";
            break;
        case '>':
            out += "&gt;";
            break;
        case '"':
            out += "&quot;";
            break;
        default:
            out += c;
        }
    return out;
}

std::vector<double> Axis::ticks(int count) const {
    const double rough = (to - from) / count, power = std::pow(10.0, std::floor(std::log10(rough)));
    double step = 10.0 * power;
    for (const double nice : {1.0, 2.0, 5.0})
        if (nice * power >= rough * 0.999) {
            step = nice * power;
            break;
        }
    std::vector<double> values;
    for (double v = std::ceil(from / step - 1e-9) * step; v <= to + 1e-9 * step; v += step)
        values.push_back(std::abs(v) < 1e-9 * step ? 0.0 : v);
    return values;
}

std::string tick_seconds(double value, double most) {
    if (most >= 1.0) return fmt::format("{:g} s", value);
    return most >= 1e-3 ? fmt::format("{:g} ms", value * 1e3) : fmt::format("{:g} us", value * 1e6);
}

std::string svg_open(int height, const std::string& label) {
    return fmt::format("<svg viewBox=\"0 0 1160 {}\" role=\"img\" aria-label=\"{}\">\n", height, escape(label));
}

} // namespace moe::tools
