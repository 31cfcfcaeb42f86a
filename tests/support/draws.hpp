// The number of cases that a test draws: all of them in a plain build, a share under the sanitizers or where asked for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <utility>
#include <vector>

// AddressSanitizer's runtime; without it the linker leaves the weak name without an address.
extern "C" __attribute__((weak)) void __asan_init();

// True where the program is linked under AddressSanitizer, as libraries under test may be where the tests are not.
inline bool sanitized() { return __asan_init != nullptr; }

// The number in an environment variable, or `otherwise` where it is not set.
inline std::uint64_t environment(const char* name, std::uint64_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// One of so many alike cases is drawn. Under the sanitizers, which make each ten times as slow, one of sixteen: they
// look for wrong accesses on the way, for which a few cases do; the statistics of all are the plain build's to check.
// There MOE_PLAN_DRAW_SHARE says the number: `tools/check --fast` asks for one of four.
inline std::size_t draw_share() {
    static const std::uint64_t asked = environment("MOE_PLAN_DRAW_SHARE", 1);
    return sanitized() ? 16 : asked == 0 ? 1 : static_cast<std::size_t>(asked);
}

// That share of `count` alike cases, at least one.
inline std::size_t draws(std::size_t count) { return (count + draw_share() - 1) / draw_share(); }

// That share of a list of alike cases, from all over it: draws(list.size()) of them.
template <class T>
std::vector<T> thinned(std::vector<T> list) {
    const std::size_t share = draws(list.size());
    std::vector<T> kept;
    for (std::size_t i = 0; i < share; ++i) kept.push_back(std::move(list[i * list.size() / share]));
    return kept;
}
