// Patterns over weights' names, and the parts of a shard that follow from them.
#include "engine/train/weight_rules.hpp"

#include "planner/base/digit.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/plan/plan.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace moe::train {

namespace {

bool begins_part(std::string_view text, std::size_t at) { return at == 0 || text[at - 1] == '.'; }

// The number at the front of text[at..], and the place behind it; false where there is none that fits.
bool take_number(std::string_view text, std::size_t& at, std::int64_t& number) {
    const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), number);
    if (at >= text.size() || !is_digit(text[at]) || error != std::errc()) return false;
    at = static_cast<std::size_t>(end - text.data());
    return true;
}

// FIRST-LAST as a whole part of the pattern; `at` moves behind it.
bool take_range(std::string_view pattern, std::size_t& at, std::int64_t& first, std::int64_t& last) {
    std::size_t end = at;
    if (!begins_part(pattern, at) || !take_number(pattern, end, first)) return false;
    if (end >= pattern.size() || pattern[end] != '-') return false;
    if (!take_number(pattern, ++end, last)) return false;
    if (end < pattern.size() && pattern[end] != '.' && pattern[end] != '*') return false;
    at = end;
    return true;
}

// Whether pattern[p..] fits name[n..] up to the end of a part.
bool fits(std::string_view pattern, std::size_t p, std::string_view name, std::size_t n) {
    for (; p < pattern.size(); ++p) {
        if (pattern[p] == '*') {
            while (p < pattern.size() && pattern[p] == '*') ++p;
            for (; n <= name.size(); ++n)
                if (fits(pattern, p, name, n)) return true;
            return false;
        }
        std::int64_t first = 0, last = 0, number = 0;
        if (take_range(pattern, p, first, last)) {
            if (!begins_part(name, n) || !take_number(name, n, number) || number < first || number > last) return false;
            if (n < name.size() && name[n] != '.') return false;
            --p; // The loop goes on behind the range.
            continue;
        }
        if (n >= name.size() || name[n] != pattern[p]) return false;
        ++n;
    }
    return n == name.size() || name[n] == '.';
}

bool fits_somewhere(std::string_view pattern, std::string_view name) {
    for (std::size_t n = 0; n < name.size(); ++n)
        if (begins_part(name, n) && fits(pattern, 0, name, n)) return true;
    return false;
}

// The pattern behind a '!'.
std::string_view said(std::string_view pattern) { return pattern.substr(pattern.starts_with('!') ? 1 : 0); }

} // namespace

bool matches(std::string_view pattern, std::string_view name) {
    if (fits_somewhere(pattern, name)) return true;
    constexpr std::string_view gate = ".gate.";
    const std::size_t at = name.find(gate);
    if (at == std::string_view::npos) return false;
    return fits_somewhere(pattern,
                          std::string(name.substr(0, at)) + ".router." + std::string(name.substr(at + gate.size())));
}

RateGroup rate_group(const std::string& text) {
    const auto number = [&](std::string_view part) {
        double value = -1.0;
        const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), value);
        if (error != std::errc() || end != part.data() + part.size() || !std::isfinite(value) || value < 0.0)
            refuse("--lr-group {}: {} must be a number that is 0 or more", shown(text), shown(part));
        return value;
    };
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos || equals == 0)
        refuse("--lr-group {}: must be PATTERN=FACTOR or PATTERN=FACTOR,decay=W", shown(text));
    const std::string_view values = std::string_view(text).substr(equals + 1);
    constexpr std::string_view decay = ",decay=";
    const std::size_t comma = values.find(',');
    RateGroup group{text.substr(0, equals), number(values.substr(0, comma)), -1.0};
    if (comma == std::string_view::npos) return group;
    if (values.substr(comma, decay.size()) != decay)
        refuse("--lr-group {}: what follows the factor must be decay=W", shown(text));
    group.decay = number(values.substr(comma + decay.size()));
    return group;
}

ops::ShardPart WeightRules::of(std::string_view name) const {
    ops::ShardPart part;
    part.frozen = std::any_of(freeze.begin(), freeze.end(), [&](const std::string& pattern) {
        return matches(said(pattern), name) != pattern.starts_with('!');
    });
    for (const RateGroup& group : groups)
        if (matches(group.pattern, name)) {
            part.rate = static_cast<float>(group.rate);
            part.decay = static_cast<float>(group.decay);
        }
    return part;
}

std::vector<std::string> WeightRules::group_texts() const {
    std::vector<std::string> texts;
    for (const RateGroup& group : groups) {
        texts.push_back(fmt::format("{}={}", group.pattern, group.rate));
        if (group.decay >= 0.0) texts.back() += fmt::format(",decay={}", group.decay);
    }
    return texts;
}

void check_rules(const WeightRules& rules, const std::vector<std::string>& names) {
    const auto check = [&](const char* option, const std::string& pattern) {
        if (std::none_of(names.begin(), names.end(), [&](const std::string& name) { return matches(pattern, name); }))
            refuse("{} {}: matches no weight of the model, such as {}", option, shown(pattern), names.front());
    };
    for (const std::string& pattern : rules.freeze) check("--freeze", std::string(said(pattern)));
    for (const RateGroup& group : rules.groups) check("--lr-group", group.pattern);
    if (!rules.freeze.empty() &&
        std::all_of(names.begin(), names.end(), [&](const std::string& name) { return rules.of(name).frozen; }))
        refuse("--freeze {}: leaves no weight to train", shown(fmt::format("{}", fmt::join(rules.freeze, " "))));
}

void check_moments(const WeightRules& rules, const plan::Plan& plan) {
    if (rules.empty() || plan.optimizer.moments != plan::Moments::fp8) return;
    refuse("{}: optimizer = {} keeps moments in blocks that several weights share, which must move alike: use "
           "--optimizer adamw+bf16_moments",
           rules.freeze.empty() ? "--lr-group" : "--freeze", plan::to_string(plan.optimizer));
}

std::vector<ops::ShardPart> parts_of(const WeightRules& rules, const std::vector<weights::LocalParameter>& parameters,
                                     int bucket, std::int64_t elements) {
    std::vector<ops::ShardPart> held; // what names say, without the padding between
    for (const weights::LocalParameter& p : parameters) {
        if (p.bucket != bucket) continue;
        ops::ShardPart part = rules.of(p.name);
        for (const weights::Piece& piece : p.pieces) {
            part.first = piece.shard;
            part.count = piece.count;
            held.push_back(part);
        }
    }
    std::sort(held.begin(), held.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<ops::ShardPart> parts;
    for (const ops::ShardPart& part : held) {
        if (parts.empty() || !parts.back().alike(part)) parts.push_back(part);
        parts.back().count = part.first + part.count - parts.back().first;
    }
    if (parts.empty()) return {};
    // Padding has no gradient, and goes with what lies before it.
    parts.front().count += parts.front().first;
    parts.front().first = 0;
    for (std::size_t i = 0; i < parts.size(); ++i)
        parts[i].count = (i + 1 < parts.size() ? parts[i + 1].first : elements) - parts[i].first;
    if (parts.size() == 1 && parts.front().alike({})) return {};
    return parts;
}

} // namespace moe::train
