// The communication of a step that nothing hides, and the time in which anything runs.
#pragma once

#include "planner/program/timeline.hpp"

#include <vector>

namespace moe::tools {

// What runs on a device from start to end: work of its own, communication, or a copy from or to the host, which neither
// hides communication nor is any.
enum class SpanSort : unsigned char { work, communication, copy };
struct BusySpan {
    double start = 0.0, end = 0.0; // seconds
    SpanSort sort = SpanSort::work;
};

// Seconds in which spans of communication run and none of work; and those in which any span runs.
struct SpanTotals {
    double exposed = 0.0, busy = 0.0;
};
SpanTotals totals_of(const std::vector<BusySpan>& spans);

// Seconds of the step in which a rank communicates, or waits to, and no other op of it runs; mean over ranks.
double exposed_communication(const program::Timeline& timeline);

} // namespace moe::tools
