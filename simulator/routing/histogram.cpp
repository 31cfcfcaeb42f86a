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

// Counts by layer and expert, and where each layer's stand, for messages.
struct Layers {
    std::vector<std::vector<double>> counts;
    std::vector<std::string> places;
};
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

Layers from_csv(const std::string& text, const std::string& path) {
    Layers layers;
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
        layers.counts.push_back(std::move(cells));
        layers.places.push_back(fmt::format("{}: line {}", path, number));
    }
    return layers;
}

Layers from_json(const std::string& text, std::string place) {
    Json json = parse_json<Json>(text, place);
    if (json.is_object() && json.contains("counts")) {
        json = Json(json["counts"]);
        place += ": counts";
    }
    Layers layers;
    if (!json.is_array()) refuse("{}: must be a list of lists of token counts, or hold one as \"counts\"", place);
    for (const Json& row : json) {
        std::vector<double>& counts = layers.counts.emplace_back();
        const std::string& at = layers.places.emplace_back(fmt::format("{}: layer {}", place, layers.counts.size()));
        if (!row.is_array()) refuse("{}: must be a list of token counts", at);
        for (const Json& cell : row) {
            if (!cell.is_number()) refuse("{}: {} is no token count", at, shown_json(cell));
            counts.push_back(cell.get<double>());
        }
    }
    return layers;
}

} // namespace

std::vector<std::vector<double>> load_histogram(const std::string& path) {
    const std::string text = read_file(path);
    Layers layers = path.ends_with(".json") ? from_json(text, path) : from_csv(text, path);
    if (layers.counts.empty()) refuse("{}: holds no token counts", path);
    const std::size_t experts = layers.counts[0].size();
    for (std::size_t layer = 0; layer < layers.counts.size(); ++layer) {
        const std::string& place = layers.places[layer];
        double sum = 0.0;
        for (const double count : layers.counts[layer]) {
            if (!std::isfinite(count) || count < 0.0) refuse("{}: token count {} must be 0 or more", place, count);
            sum += count;
        }
        if (layers.counts[layer].size() != experts)
            refuse("{}: has {} experts, but the first layer has {}", place, layers.counts[layer].size(), experts);
        if (!(sum > 0.0)) refuse("{}: all token counts are 0", place);
    }
    return layers.counts;
}

} // namespace moe::routing
