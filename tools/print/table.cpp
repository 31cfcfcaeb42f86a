// Lays out text tables and formats numbers.
#include "tools/print/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

namespace moe::tools {

namespace {

constexpr std::size_t gap = 2;        // blanks between columns
constexpr std::size_t narrowest = 16; // fewest characters to which cells are wrapped

// The lines of one row, whose cells hold as many lines as they need.
std::string row_text(const std::vector<std::vector<std::string>>& cells, const std::vector<Column>& columns,
                     const std::vector<std::size_t>& widths, int indent) {
    std::size_t height = 1;
    for (const auto& cell : cells) height = std::max(height, cell.size());
    std::string out;
    for (std::size_t y = 0; y < height; ++y) {
        std::string line(static_cast<std::size_t>(indent), ' ');
        for (std::size_t x = 0; x < cells.size(); ++x) {
            if (x > 0) line.append(gap, ' ');
            const std::string& part = y < cells[x].size() ? cells[x][y] : std::string();
            line += columns[x].left ? fmt::format("{:<{}}", part, widths[x]) : fmt::format("{:>{}}", part, widths[x]);
        }
        line.erase(line.find_last_not_of(' ') + 1);
        if (y > 0) out += '\n';
        out += line;
    }
    return out;
}

std::size_t total_of(const std::vector<std::size_t>& widths, int indent) {
    std::size_t total = static_cast<std::size_t>(indent) + (widths.empty() ? 0 : gap * (widths.size() - 1));
    for (const std::size_t width : widths) total += width;
    return total;
}

} // namespace

Column::Column(std::string heading_text, int drop_rank) : heading(std::move(heading_text)), rank(drop_rank) {
    left = !heading.empty() && heading.front() == '<';
    if (left) heading.erase(0, 1);
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
    std::vector<std::string> headings;
    for (const Column& column : columns_) headings.push_back(column.heading);
    rows_.push_back(std::move(headings));
}

void Table::add(std::vector<std::string> cells) {
    cells.resize(columns_.size());
    rows_.push_back(std::move(cells));
}

std::size_t Table::width_of(std::size_t column) const {
    std::size_t width = 0;
    for (const auto& row : rows_) width = std::max(width, row[column].size());
    return width;
}

std::string Table::text(int indent) const { return fitted(std::numeric_limits<int>::max(), indent).text; }

Table::Fitted Table::fitted(int width, int indent) const {
    const auto limit = static_cast<std::size_t>(width);
    Fitted result;
    std::vector<std::size_t> kept(columns_.size());
    std::iota(kept.begin(), kept.end(), std::size_t{0});
    std::vector<std::size_t> widths;
    for (const std::size_t column : kept) widths.push_back(width_of(column));
    // Cells that can be wrapped count as their narrowest while columns are chosen: text wraps before figures go.
    const auto least = [&] {
        std::vector<std::size_t> narrow = widths;
        for (std::size_t i = 0; i < kept.size(); ++i)
            if (columns_[kept[i]].left && columns_[kept[i]].rank == 0) narrow[i] = std::min(narrow[i], 2 * narrowest);
        return total_of(narrow, indent);
    };
    while (least() > limit) {
        std::size_t worst = 0;
        for (std::size_t i = 1; i < kept.size(); ++i)
            if (columns_[kept[i]].rank >= columns_[kept[worst]].rank) worst = i;
        if (kept.empty() || columns_[kept[worst]].rank == 0) break;
        result.dropped.push_back(columns_[kept[worst]].heading);
        kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(worst));
        widths.erase(widths.begin() + static_cast<std::ptrdiff_t>(worst));
    }
    for (std::size_t total = total_of(widths, indent); total > limit; total = total_of(widths, indent)) {
        std::size_t widest = kept.size();
        for (std::size_t i = 0; i < kept.size(); ++i)
            if (columns_[kept[i]].left && (widest == kept.size() || widths[i] > widths[widest])) widest = i;
        if (widest == kept.size() || widths[widest] <= narrowest) break;
        --widths[widest]; // The widest shrink by turns, so that wide columns end alike.
    }
    std::vector<Column> columns;
    for (const std::size_t column : kept) columns.push_back(columns_[column]);
    for (const auto& row : rows_) {
        std::vector<std::vector<std::string>> cells;
        for (std::size_t i = 0; i < kept.size(); ++i) cells.push_back(wrapped(row[kept[i]], widths[i]));
        if (!result.text.empty()) result.text += '\n';
        result.text += row_text(cells, columns, widths, indent);
    }
    return result;
}

std::vector<std::string> wrapped(const std::string& text, std::size_t width) {
    std::vector<std::string> lines;
    std::string rest = text;
    while (width > 0 && rest.size() > width) {
        std::size_t end = rest.rfind(' ', width);
        if (end == std::string::npos || end == 0) {
            // A list such as "layernorm+moe_act" breaks behind a sign.
            const std::size_t sign = rest.find_last_of("+,|/", width - 1);
            end = sign == std::string::npos ? width : sign + 1;
        }
        lines.push_back(rest.substr(0, end));
        const std::size_t next = rest.find_first_not_of(' ', end);
        rest.erase(0, next == std::string::npos ? rest.size() : next);
    }
    if (!rest.empty() || lines.empty()) lines.push_back(rest);
    return lines;
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

std::string ratio_text(double predicted, double measured) {
    return measured > 0.0 ? fmt::format("{:.2f}", predicted / measured) : "-";
}

} // namespace moe::tools
