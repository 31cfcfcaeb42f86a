// Display and edit distance of names, for error messages that suggest what was meant.
#include "planner/base/names.hpp"

#include <algorithm>
#include <cctype>
#include <numeric>

namespace moe {

std::string shown(std::string_view text) {
    constexpr std::size_t longest = 80;
    std::string line(text.substr(0, longest));
    for (char& letter : line) {
        const auto code = static_cast<unsigned char>(letter);
        if (code < 0x20 || code == 0x7f) letter = '?';
    }
    return text.size() > longest ? line + "..." : line;
}

int edit_distance(std::string_view a, std::string_view b) {
    const auto same = [](char x, char y) {
        return std::tolower(static_cast<unsigned char>(x)) == std::tolower(static_cast<unsigned char>(y));
    };
    std::vector<int> row(b.size() + 1);
    std::iota(row.begin(), row.end(), 0);
    for (std::size_t i = 0; i < a.size(); ++i) {
        int diagonal = row[0];
        row[0] = static_cast<int>(i) + 1;
        for (std::size_t j = 0; j < b.size(); ++j) {
            const int replaced = diagonal + (same(a[i], b[j]) ? 0 : 1);
            diagonal = row[j + 1];
            row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
        }
    }
    return row[b.size()];
}

std::string nearest_name(std::string_view name, const std::vector<std::string>& known) {
    constexpr std::size_t longest = 64; // Nothing longer is a name, and the distance is quadratic.
    if (name.empty() || name.size() > longest) return {};
    constexpr std::size_t telling = 3; // letters of a beginning that says enough
    for (const std::string& candidate : known) {
        if (name.size() >= telling && edit_distance(name, std::string_view(candidate).substr(0, name.size())) == 0)
            return candidate;
    }
    const std::string* best = nullptr;
    int best_distance = 0;
    for (const std::string& candidate : known) {
        const int distance = edit_distance(name, candidate);
        if (best == nullptr || distance < best_distance) {
            best = &candidate;
            best_distance = distance;
        }
    }
    if (best == nullptr || best_distance * 3 > static_cast<int>(std::max(best->size(), std::size_t{3}))) return {};
    return *best;
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& known) {
    const std::string nearest = nearest_name(name, known);
    return nearest.empty() ? std::string{} : ": did you mean " + nearest + "?";
}

} // namespace moe
