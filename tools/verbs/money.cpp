// Checks the options on money, time and failures.
#include "tools/verbs/money.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <charconv>
#include <cmath>

namespace moe::tools {
namespace {

// In `scale` of what the option counts in.
std::optional<double> positive(const char* option, const std::optional<double>& value, const char* what,
                               double scale = 1.0) {
    if (value && !(std::isfinite(*value) && *value > 0.0)) refuse("{} {}: must be {} above 0", option, *value, what);
    return value ? std::optional(*value * scale) : std::nullopt;
}

std::optional<double> tokens_of(const std::string& text) {
    if (text.empty()) return std::nullopt;
    double number = 0.0;
    const char* end = text.data() + text.size();
    const auto [last, error] = std::from_chars(text.data(), end, number);
    double unit = last == end ? 1.0 : 0.0;
    if (last + 1 == end)
        for (const auto& [sign, value] : {std::pair{'K', 1e3}, {'M', 1e6}, {'B', 1e9}, {'T', 1e12}})
            if (*last == sign) unit = value;
    const double tokens = number * unit;
    if (error != std::errc{} || !(std::isfinite(tokens) && tokens >= 1.0))
        refuse("--tokens {}: must be a number of tokens, such as 15e12 or 15T", shown(text));
    return tokens;
}

} // namespace

goodput::Terms terms_of(const MoneyOptions& options) {
    constexpr double minutes = 60.0, gigabytes = 1e9;
    goodput::Terms terms;
    terms.price = positive("--price", options.price, "dollars per GPU-hour");
    terms.mtbf_hours = positive("--mtbf", options.mtbf, "hours");
    terms.tokens = tokens_of(options.tokens);
    terms.deadline_hours = positive("--deadline", options.deadline, "hours");
    if (terms.deadline_hours && !terms.tokens)
        refuse("--deadline {}: of how many tokens is not said: add --tokens", *options.deadline);
    const auto needs_failures = [&](const char* option, const std::optional<double>& value) {
        if (value && !terms.mtbf_hours)
            refuse("{} {}: counts with failures alone, which are left out: add --mtbf", option, *value);
    };
    needs_failures("--storage-bandwidth", options.storage_bandwidth);
    needs_failures("--restart", options.restart);
    needs_failures("--checkpoint-interval", options.checkpoint_interval);
    if (const auto value = positive("--storage-bandwidth", options.storage_bandwidth, "GB/s", gigabytes))
        terms.storage_bandwidth = *value;
    if (const auto value = positive("--restart", options.restart, "minutes", minutes)) terms.restart_seconds = *value;
    terms.interval_seconds = positive("--checkpoint-interval", options.checkpoint_interval, "minutes", minutes);
    return terms;
}

} // namespace moe::tools
