// Reads recorded token counts by layer and expert from CSV or JSON.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "simulator/routing/routing.hpp"

#include <nlohmann/json.hpp>

#include <charconv>
#include <cmath>

namespace moe::routing {
namespace {

using Counts = std::vector<std::vector<double>>;
using Json = nlohmann::json;

// The counts of one line; empty when a cell is no number.
std::vector<double> cells_of(const std::string& line) {
    std::vector<double> cells;
    for (std::size_t at = 0; at <= line.size();) {
        const std::size_t comma = std::min(line.find(',', at), line.size());
        double value = 0.0;
        const char *first = line.data() + at, *last = line.data() + comma;
        while (first < last && *first == ' ') ++first;
        const auto [end, error] = std::from_chars(first, last, value);
        if (error != std::errc{} || end != last) return {};
        cells.push_back(value);
        at = comma + 1;
    }
    return cells;
}

Counts from_csv(const std::string& text, const std::string& path) {
    Counts counts;
    int number = 0;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find('\n', at), text.size());
        std::string line = text.substr(at, end - at);
        at = end + 1;
        ++number;
        if (!line.empty() && line.back() == '\r') line.pop_back();
        if (line.empty()) continue;
        std::vector<double> cells = cells_of(line);
        if (cells.empty() && number == 1) continue; // The first line names the columns.
        if (cells.empty())
            refuse("{}: line {}: must be token counts separated by commas: {}", path, number, shown(line));
        counts.push_back(std::move(cells));
    }
    return counts;
}

Counts from_json(const std::string& text, const std::string& path) {
    Json json = parse_json<Json>(text, path);
    if (json.is_object() && json.contains("counts")) json = Json(json["counts"]);
    Counts counts;
    if (!json.is_array()) refuse("{}: must be a list of lists of token counts, or hold one as \"counts\"", path);
    for (const Json& row : json) {
        counts.emplace_back();
        if (!row.is_array()) refuse("{}: layer {}: must be a list of token counts", path, counts.size());
        for (const Json& cell : row) {
            if (!cell.is_number()) refuse("{}: layer {}: {} is no token count", path, counts.size(), shown_json(cell));
            counts.back().push_back(cell.get<double>());
        }
    }
    return counts;
}

} // namespace

std::vector<std::vector<double>> load_histogram(const std::string& path) {
    const std::string text = read_file(path);
    Counts counts = path.ends_with(".json") ? from_json(text, path) : from_csv(text, path);
    if (counts.empty()) refuse("{}: holds no token counts", path);
    for (std::size_t layer = 0; layer < counts.size(); ++layer) {
        double sum = 0.0;
        for (const double count : counts[layer]) {
            if (!std::isfinite(count) || count < 0.0)
                refuse("{}: layer {}: token count {} must be 0 or more", path, layer + 1, count);
            sum += count;
        }
        if (counts[layer].size() != counts[0].size())
            refuse("{}: layer {} has {} experts, but the first one has {}", path, layer + 1, counts[layer].size(),
                   counts[0].size());
        if (!(sum > 0.0)) refuse("{}: layer {}: all token counts are 0", path, layer + 1);
    }
    return counts;
}

} // namespace moe::routing
