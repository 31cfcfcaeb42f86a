// The text of a choice of low-rank adapters: RANK:ALPHA:TARGETS.
#include "planner/plan/lora.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <vector>

namespace moe::plan {
namespace {

constexpr std::array<const char*, 3> names{"attention", "dense", "experts"};
constexpr int most_rank = 4096;
constexpr double usual_alpha = 32.0;

std::vector<std::string> split(const std::string& text, char at) {
    std::vector<std::string> parts;
    for (std::size_t from = 0; from <= text.size();) {
        const std::size_t end = std::min(text.find(at, from), text.size());
        parts.push_back(text.substr(from, end - from));
        from = end + 1;
    }
    return parts;
}

template <class Number>
bool parsed(const std::string& text, Number& number) {
    const char* end = text.data() + text.size();
    const auto [last, error] = std::from_chars(text.data(), end, number);
    return error == std::errc{} && last == end;
}

} // namespace

namespace adapted {

std::string to_string(unsigned set) {
    std::string text;
    for (std::size_t i = 0; i < names.size(); ++i) {
        if ((set >> i & 1U) == 0) continue;
        if (!text.empty()) text += '+';
        text += names[i];
    }
    return text;
}

unsigned from_string(const std::string& text) {
    unsigned set = 0;
    for (const std::string& part : split(text, '+')) {
        std::size_t i = 0;
        while (i < names.size() && part != names[i]) ++i;
        if (i == names.size())
            refuse("lora target '{}' is unknown{}; known are {}", shown(part),
                   did_you_mean(part, {names.begin(), names.end()}), fmt::join(names, ", "));
        set |= 1U << i;
    }
    return set;
}

} // namespace adapted

std::string to_string(const Lora& lora) {
    return lora.on() ? fmt::format("{}:{}:{}", lora.rank, lora.alpha, adapted::to_string(lora.targets)) : "none";
}

Lora lora_from_string(const std::string& text) {
    if (text == "none") return {};
    const std::vector<std::string> parts = split(text, ':');
    Lora lora{0, usual_alpha, adapted::all};
    if (parts.size() > 3 || !parsed(parts[0], lora.rank))
        refuse("lora={}: must be none or RANK[:ALPHA[:TARGETS]] such as 16:32:attention+dense", shown(text));
    if (lora.rank < 1 || lora.rank > most_rank)
        refuse("lora={}: the rank must be a whole number from 1 to {}", shown(text), most_rank);
    if (parts.size() > 1 && (!parsed(parts[1], lora.alpha) || !std::isfinite(lora.alpha) || !(lora.alpha > 0.0)))
        refuse("lora={}: alpha must be a number above 0", shown(text));
    if (parts.size() > 2) lora.targets = adapted::from_string(parts[2]);
    return lora;
}

} // namespace moe::plan
