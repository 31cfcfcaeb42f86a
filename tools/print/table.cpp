// Lays out text tables and formats numbers.
#include "tools/print/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moe::tools {

Table::Table(std::vector<std::string> headings) {
    for (std::string& heading : headings) {
        left_.push_back(!heading.empty() && heading.front() == '<');
        if (left_.back()) heading.erase(0, 1);
    }
    rows_.push_back(std::move(headings));
}

void Table::add(std::vector<std::string> cells) {
    cells.resize(left_.size());
    rows_.push_back(std::move(cells));
}

std::string Table::text(int indent) const {
    std::vector<std::size_t> widths(left_.size(), 0);
    for (const auto& row : rows_)
        for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
    std::string out;
    for (const auto& row : rows_) {
        if (!out.empty()) out += '\n';
        std::string line(static_cast<std::size_t>(indent), ' ');
        for (std::size_t i = 0; i < row.size(); ++i) {
            if (i > 0) line += "  ";
            line += left_[i] ? fmt::format("{:<{}}", row[i], widths[i]) : fmt::format("{:>{}}", row[i], widths[i]);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        out += line;
    }
    return out;
}

double gib(double bytes) { return bytes / 1073741824.0; }

std::string gib_text(double bytes) {
    const double value = gib(bytes);
    return std::abs(value) < 1.0 ? fmt::format("{:.3f}", value) : fmt::format("{:.1f}", value);
}

std::string signed_gib_text(double bytes) { return fmt::format("{}{}", bytes < 0.0 ? "" : "+", gib_text(bytes)); }

std::string seconds_text(double seconds) {
    const double size = std::abs(seconds);
    if (size >= 1.0 || size == 0.0) return fmt::format("{:.3f} s", seconds);
    if (size >= 1e-3) return fmt::format("{:.2f} ms", seconds * 1e3);
    return fmt::format("{:.2f} us", seconds * 1e6);
}

std::string count_text(double count) {
    std::string digits = fmt::format("{:.0f}", std::abs(count));
    for (int at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3)
        digits.insert(static_cast<std::size_t>(at), 1, ',');
    return (count < 0.0 ? "-" : "") + digits;
}

std::string percent_text(double fraction) { return fmt::format("{:.1f}%", fraction * 100.0); }

} // namespace moe::tools
