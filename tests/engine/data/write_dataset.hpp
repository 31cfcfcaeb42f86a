// Indexed datasets of any element type, written from the format's table.
#pragma once

#include "planner/base/files.hpp"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

template <class T>
void put(std::string& out, T value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out.append(bytes, sizeof value);
}

// A dataset of one document per sequence, written from the format's table; gap: unused elements between sequences.
template <class T>
void write_dataset(const std::string& prefix, std::uint8_t type, const std::vector<std::vector<T>>& sequences,
                   int gap = 0) {
    std::string index("MMIDIDX\0\0", 9), tokens;
    put<std::uint64_t>(index, 1);
    put(index, type);
    put<std::uint64_t>(index, sequences.size());
    put<std::uint64_t>(index, sequences.size() + 1);
    for (const auto& sequence : sequences) put(index, static_cast<std::int32_t>(sequence.size()));
    for (const auto& sequence : sequences) {
        put(index, static_cast<std::int64_t>(tokens.size()));
        for (const T token : sequence) put(tokens, token);
        for (int i = 0; i < gap; ++i) put(tokens, T{0});
    }
    for (std::size_t i = 0; i <= sequences.size(); ++i) put(index, static_cast<std::int64_t>(i));
    moe::write_file(prefix + ".bin", tokens);
    moe::write_file(prefix + ".idx", index);
}
