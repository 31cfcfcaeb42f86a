// Display and edit distance of names, for error messages that suggest what was meant.
#include "planner/base/names.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <numeric>

namespace moe {

std::size_t utf8_length(std::string_view text) {
    const auto byte = [&text](std::size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
    const auto more = [&byte](std::size_t i) { return (byte(i) & 0xC0U) == 0x80U; };
    const unsigned lead = byte(0), next = byte(1);
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead <= 0xDF) return more(1) ? 2 : 0;
    if (lead >= 0xE0 && lead <= 0xEF) {
        const bool shortest = lead != 0xE0 || next >= 0xA0, no_surrogate = lead != 0xED || next < 0xA0;
        return more(1) && more(2) && shortest && no_surrogate ? 3 : 0;
    }
    if (lead < 0xF0 || lead > 0xF4) return 0;
    const bool shortest = lead != 0xF0 || next >= 0x90, in_range = lead != 0xF4 || next < 0x90;
    return more(1) && more(2) && more(3) && shortest && in_range ? 4 : 0;
}

std::string printable(std::string_view text) {
    std::string out;
    while (!text.empty()) {
        const std::size_t length = utf8_length(text);
        const std::string_view one = text.substr(0, std::max(length, std::size_t{1}));
        const auto byte = [&one](std::size_t i) { return static_cast<unsigned char>(one[i]); };
        const bool control = length == 1 && (byte(0) < 0x20 || byte(0) == 0x7f);
        const bool late_control = length == 2 && byte(0) == 0xC2 && byte(1) < 0xA0;
        const bool turns = length == 3 && (one[0] == '\xE2') &&
                           ((byte(1) == 0x80 && byte(2) >= 0xAA && byte(2) <= 0xAE) ||
                            (byte(1) == 0x81 && byte(2) >= 0xA6 && byte(2) <= 0xA9));
        if (length == 0 || control || late_control || turns)
            out += '?';
        else
            out += one;
        text.remove_prefix(one.size());
    }
    return out;
}

std::string shown(std::string_view text) {
    constexpr std::size_t longest = 80;
    if (text.size() <= longest) return printable(text);
    std::size_t end = longest; // not within a character
    while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U && longest - end < 4) --end;
    return printable(text.substr(0, end)) + "...";
}

std::optional<double> number_of(std::string_view text) {
    double number = 0.0;
    const auto [last, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (text.empty() || error != std::errc{} || last != text.data() + text.size()) return std::nullopt;
    return number;
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
