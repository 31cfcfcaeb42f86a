// A count with its noun, as sentences for people have it: "1 rank", "1,024 ranks", "2 copies".
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace moe {

// The noun's plural: "ranks", "processes", "copies", "micro-batches", "keys".
std::string plural(std::string_view noun);
// The number with a comma between thousands: "1,234,567".
std::string counted(std::int64_t count);
// The number and the noun, which is given in the singular.
std::string counted(std::int64_t count, std::string_view noun);

template <std::integral N>
std::string counted(N count) {
    return counted(static_cast<std::int64_t>(count));
}
template <std::integral N>
std::string counted(N count, std::string_view noun) {
    return counted(static_cast<std::int64_t>(count), noun);
}

} // namespace moe
