// Random draws that are the same for the same seed on every machine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <vector>

// SplitMix64: the standard distributions differ between libraries.
class Dice {
public:
    explicit Dice(std::uint64_t seed) : state_(seed) {}
    std::uint64_t next() {
        state_ += 0x9e3779b97f4a7c15ULL;
        std::uint64_t z = state_;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
        return z ^ (z >> 31);
    }
    int below(int n) { return static_cast<int>(next() % static_cast<std::uint64_t>(n)); }
    bool one_in(int n) { return below(n) == 0; }
    template <class T>
    T of(std::initializer_list<T> list) {
        return list.begin()[below(static_cast<int>(list.size()))];
    }
    template <class T, std::size_t N>
    const T& of(const T (&list)[N]) {
        return list[next() % N];
    }
    template <class T>
    const T& of(const std::vector<T>& list) {
        return list[next() % list.size()];
    }
    // Dice for what is drawn beside the rest, which they leave as it was.
    Dice aside() const { return Dice(~state_); }
    int divisor(int n) {
        std::vector<int> all;
        for (int d = 1; d <= n; ++d)
            if (n % d == 0) all.push_back(d);
        return all[static_cast<std::size_t>(below(static_cast<int>(all.size())))];
    }

private:
    std::uint64_t state_;
};
