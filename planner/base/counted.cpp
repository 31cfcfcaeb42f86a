// Counts for people: digits in groups of three, and the noun in the number that the count asks for.
#include "planner/base/counted.hpp"

#include <fmt/format.h>

namespace moe {

std::string plural(std::string_view noun) {
    const auto ends = [&](std::string_view ending) { return noun.ends_with(ending); };
    if (ends("s") || ends("x") || ends("ch") || ends("sh")) return fmt::format("{}es", noun);
    const bool vowel = ends("ay") || ends("ey") || ends("oy") || ends("uy");
    if (ends("y") && !vowel) return fmt::format("{}ies", noun.substr(0, noun.size() - 1));
    return fmt::format("{}s", noun);
}

std::string counted(std::int64_t count) {
    std::string digits = fmt::format("{}", count);
    const std::size_t first = count < 0 ? 1 : 0; // behind the sign
    for (std::size_t at = digits.size(); at > first + 3;) digits.insert(at -= 3, 1, ',');
    return digits;
}

std::string counted(std::int64_t count, std::string_view noun) {
    return fmt::format("{} {}", counted(count), count == 1 ? std::string(noun) : plural(noun));
}

} // namespace moe
