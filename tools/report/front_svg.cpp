// Points joined by steps: between two plans of the front there is none that has the memory of one and the rate of the
// other.
#include "tools/report/front_svg.hpp"

#include "tools/print/table.hpp"
#include "tools/report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moe::tools {

namespace {

constexpr int height = 330, top = 16, bottom = 284, left = 84, right = 1130;

// Labels that were placed, so that the next one can stay clear of them.
class Labels {
public:
    // A label beside (x, y), on the side where there is room, moved up or down where another one stands.
    std::string place(const std::string& text, double x, double y) {
        constexpr double letter = 6.2, line = 14.0; // pixels at the chart's size of type
        const bool turn = x > 800.0;
        const double wide = letter * static_cast<double>(text.size()), from = turn ? x - 10.0 - wide : x + 10.0;
        double at = y + 4.0;
        for (const double shift : {0.0, -line, line, -2.0 * line, 2.0 * line}) {
            at = y + 4.0 + shift;
            const bool clear = std::none_of(taken_.begin(), taken_.end(), [&](const Box& box) {
                return from < box.to && box.from < from + wide && std::abs(at - box.y) < line;
            });
            if (clear) break;
        }
        taken_.push_back({from, from + wide, at});
        return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", turn ? x - 10.0 : x + 10.0,
                           at, turn ? "end" : "start", escape(text));
    }

private:
    struct Box {
        double from, to, y;
    };
    std::vector<Box> taken_;
};

std::string point(const search::FrontPoint& p, double x, double y, Labels& labels) {
    const search::Estimate& e = p.estimate;
    const char* look = p.changes.empty() ? "here" : e.fits ? "point" : "over";
    const std::string text = changes_text(p.changes);
    return fmt::format(
        "<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{}\"><title>{}\n{:.4g} TFLOPS/GPU, step {}, "
        "{} GiB{}</title></circle>{}",
        look, x, y, p.changes.empty() ? 7 : 5, escape(text), e.tflops_per_gpu, seconds_text(e.step_seconds),
        gib_text(e.memory_bytes), e.fits ? "" : " (does not fit)", labels.place(text, x, y));
}

} // namespace

std::string changes_text(const std::vector<plan::FieldChange>& changes) {
    std::string text;
    for (const plan::FieldChange& c : changes)
        text += fmt::format("{}{} {} \u2192 {}", text.empty() ? "" : ", ", c.field, c.from, c.to);
    return text.empty() ? "this plan" : text;
}

std::string front_svg(const std::vector<search::FrontPoint>& front, const search::Estimate& base, double limit) {
    if (front.size() < 2) return {};
    const search::FrontPoint &first = front.front(), &last = front.back();
    double low = gib(first.estimate.memory_bytes), high = gib(last.estimate.memory_bytes);
    if (gib(limit) < 1.5 * high && gib(limit) > low) high = std::max(high, gib(limit));
    const double slow = std::min(first.estimate.tflops_per_gpu, base.tflops_per_gpu),
                 fast = std::max(last.estimate.tflops_per_gpu, base.tflops_per_gpu);
    const double wide = 0.06 * (high - low), tall = std::max(0.08 * (fast - slow), 1e-6 * fast);
    const Axis memory{low - wide, high + wide, left, right}, rate{slow - tall, fast + tall, bottom, top};
    std::string out = svg_open(height, "memory against throughput");
    for (const double tick : memory.ticks(8))
        out +=
            fmt::format("<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/><text x=\"{0:.1f}\" "
                        "y=\"{3}\" text-anchor=\"middle\">{4:g}</text>\n",
                        memory.at(tick), top, bottom, bottom + 16, tick);
    for (const double tick : rate.ticks(5))
        out += fmt::format("<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/><text x=\"{3}\" "
                           "y=\"{4:.1f}\" text-anchor=\"end\">{5:g}</text>\n",
                           left, right, rate.at(tick), left - 6, rate.at(tick) + 4, tick);
    out += fmt::format(
        "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">peak memory per GPU, GiB</text><text x=\"{}\" y=\"10\">"
        "TFLOPS/GPU</text>\n",
        right, bottom + 34, 4);
    if (gib(limit) >= memory.from && gib(limit) <= memory.to)
        out +=
            fmt::format("<line class=\"mark\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/><text x=\"{3:.1f}\" "
                        "y=\"{4}\" text-anchor=\"end\">the machine has {5} GiB</text>\n",
                        memory.at(gib(limit)), top, bottom, memory.at(gib(limit)) - 5, top + 10, gib_text(limit));
    std::string path;
    for (const search::FrontPoint& p : front) {
        const double x = memory.at(gib(p.estimate.memory_bytes)), y = rate.at(p.estimate.tflops_per_gpu);
        path += path.empty() ? fmt::format("M{:.1f},{:.1f}", x, y) : fmt::format(" H{:.1f} V{:.1f}", x, y);
    }
    out += fmt::format("<path class=\"front\" d=\"{}\"/>\n", path);
    Labels labels;
    bool here = false;
    for (const search::FrontPoint& p : front) {
        out += point(p, memory.at(gib(p.estimate.memory_bytes)), rate.at(p.estimate.tflops_per_gpu), labels);
        here = here || p.changes.empty();
    }
    if (!here && gib(base.memory_bytes) <= memory.to)
        out += point({{}, {}, base}, memory.at(gib(base.memory_bytes)), rate.at(base.tflops_per_gpu), labels);
    return out + "</svg>\n";
}

} // namespace moe::tools
