// Stacked areas over time, one colour per class, with a legend and the values of each moment on hover.
#include "tools/report/memory_svg.hpp"

#include "tools/print/table.hpp"
#include "tools/report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

namespace moe::tools {

namespace {

constexpr int height = 320, top = 44, bottom = 290, left = 84, right = 1150;

struct Layer {
    const char* name;
    int index; // of MemoryClass, -1 = outside of the arena
};
// Layers go from the bottom: what never moves first.
constexpr std::array<Layer, 7> layers{{{"context and communicators", -1},
                                       {"weights", static_cast<int>(memory::MemoryClass::weights)},
                                       {"optimizer", static_cast<int>(memory::MemoryClass::optimizer)},
                                       {"gradients", static_cast<int>(memory::MemoryClass::gradients)},
                                       {"inputs", static_cast<int>(memory::MemoryClass::inputs)},
                                       {"saved activations", static_cast<int>(memory::MemoryClass::saved)},
                                       {"workspace", static_cast<int>(memory::MemoryClass::transient)}}};

double value_of(const memory::MemoryUse& use, const Layer& layer, double rest) {
    return layer.index < 0 ? rest : use.bytes[static_cast<std::size_t>(layer.index)];
}

// One class as a closed path over the sums of the classes below it, which `floor` holds and takes up.
std::string area(const std::vector<memory::MemoryUse>& uses, std::size_t k, double rest, const Axis& time,
                 const Axis& bytes, std::vector<double>& floor) {
    std::string upper, lower;
    double most = 0.0;
    for (std::size_t i = 0; i < uses.size(); ++i) {
        const double value = value_of(uses[i], layers[k], rest), above = floor[i] + value;
        most = std::max(most, value);
        for (const double t : {uses[i].from, uses[i].to}) {
            fmt::format_to(std::back_inserter(upper), "{}{:.1f},{:.1f} ", upper.empty() ? "M" : "L", time.at(t),
                           bytes.at(above));
            lower.insert(0, fmt::format("L{:.1f},{:.1f} ", time.at(t), bytes.at(floor[i])));
        }
        floor[i] = above;
    }
    if (most <= 0.0) return {};
    return fmt::format("<path class=\"m{}\" d=\"{}{}Z\"><title>{}: at most {} GiB</title></path>\n", k, upper, lower,
                       layers[k].name, gib_text(most));
}

std::string legend(const std::vector<memory::MemoryUse>& uses, double rest) {
    std::string out;
    double x = left;
    for (std::size_t k = 0; k < layers.size(); ++k) {
        double most = 0.0;
        for (const memory::MemoryUse& use : uses) most = std::max(most, value_of(use, layers[k], rest));
        if (most <= 0.0) continue;
        const std::string text = fmt::format("{} {}", layers[k].name, gib_text(most));
        out += fmt::format("<rect class=\"m{}\" x=\"{:.0f}\" y=\"4\" width=\"11\" height=\"11\"/><text x=\"{:.0f}\" "
                           "y=\"14\">{}</text>\n",
                           k, x, x + 15, text);
        x += 34.0 + 6.3 * static_cast<double>(text.size());
    }
    return out;
}

std::string line(const char* name, double value, const Axis& bytes, bool above) {
    return fmt::format("<line class=\"mark\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/><text x=\"{1}\" "
                       "y=\"{3:.1f}\" text-anchor=\"end\">{4} {5} GiB</text>\n",
                       left, right, bytes.at(value), bytes.at(value) + (above ? -4.0 : 13.0), name, gib_text(value));
}

// Columns that show the figures of their moment.
std::string hover(const std::vector<memory::MemoryUse>& uses, double rest, const Axis& time) {
    std::string out;
    const std::size_t step = std::max<std::size_t>(1, uses.size() / 116);
    for (std::size_t i = 0; i < uses.size(); i += step) {
        const memory::MemoryUse& last = uses[std::min(i + step, uses.size()) - 1];
        std::string text = seconds_text(uses[i].from);
        double sum = 0.0;
        for (const Layer& layer : layers) {
            const double value = value_of(uses[i], layer, rest);
            sum += value;
            if (value > 0.0) text += fmt::format("\n{} {} GiB", layer.name, gib_text(value));
        }
        out += fmt::format(
            "<rect class=\"hover\" x=\"{:.1f}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\"><title>{}\ntotal {} "
            "GiB</title></rect>\n",
            time.at(uses[i].from), top, time.at(last.to) - time.at(uses[i].from), bottom - top, text, gib_text(sum));
    }
    return out;
}

} // namespace

std::string memory_svg(const std::vector<memory::MemoryUse>& uses, double rest, double planned, double limit) {
    if (uses.empty()) return {};
    const Axis time{0.0, uses.back().to, left, right};
    // A machine with far more memory than the plan needs would press the picture to the ground.
    const bool show_limit = limit > 0.0 && limit < 4.0 * planned;
    const Axis bytes{0.0, 1.06 * (show_limit ? std::max(limit, planned) : planned), bottom, top};
    std::string out = svg_open(height, "memory in use over the step by class");
    const Axis in_gib{0.0, gib(bytes.to), bytes.begin, bytes.end};
    for (const double tick : in_gib.ticks(5))
        out += fmt::format("<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/><text x=\"{3}\" "
                           "y=\"{4:.1f}\" text-anchor=\"end\">{5:g} GiB</text>\n",
                           left, right, in_gib.at(tick), left - 6, in_gib.at(tick) + 4, tick);
    std::vector<double> floor(uses.size(), 0.0);
    for (std::size_t k = 0; k < layers.size(); ++k) out += area(uses, k, rest, time, bytes, floor);
    for (const double tick : time.ticks(8))
        out +=
            fmt::format("<line class=\"grid\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\"/><text x=\"{0:.1f}\" "
                        "y=\"{3}\" text-anchor=\"middle\">{4}</text>\n",
                        time.at(tick), bottom, bottom + 5, bottom + 18, tick_seconds(tick, time.to));
    out += line("planned", planned, bytes, !show_limit || planned >= limit);
    if (show_limit) out += line("machine", limit, bytes, limit > planned);
    return out + legend(uses, rest) + hover(uses, rest, time) + "</svg>\n";
}

} // namespace moe::tools
