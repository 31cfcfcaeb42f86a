// Drawing aids of the report's charts: axes with round ticks, text that is safe in HTML.
#pragma once

#include <string>
#include <vector>

namespace moe::tools {

// `text` with the characters that HTML gives a meaning replaced.
std::string escape(const std::string& text);

// A scale from values to pixels.
struct Axis {
    double from = 0.0, to = 1.0;   // values
    double begin = 0.0, end = 1.0; // pixels; begin > end for an axis that grows upwards
    double at(double value) const { return begin + (value - from) / (to - from) * (end - begin); }
    // Round values inside [from, to], about `count` of them.
    std::vector<double> ticks(int count) const;
};

// A tick of a time axis that ends at `most` seconds, in the unit that suits the axis: "2 s", "50 ms".
std::string tick_seconds(double value, double most);

// An opening svg element of width 1160 with what a screen reader says of it.
std::string svg_open(int height, const std::string& label);

} // namespace moe::tools
