// CRC-32C by tables, eight bytes at a time ("slicing by 8", Kounavis and Berry, 2005).
#include "engine/base/crc32c.hpp"

#include <array>
#include <cstddef>
#include <cstring>

namespace moe::engine {

namespace {

std::array<std::array<std::uint32_t, 256>, 8> crc_tables() {
    std::array<std::array<std::uint32_t, 256>, 8> tables{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
        tables[0][i] = crc;
    }
    for (std::size_t t = 1; t < 8; ++t)
        for (std::size_t i = 0; i < 256; ++i)
            tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xffu];
    return tables;
}

} // namespace

std::uint32_t crc32c(std::span<const char> bytes, std::uint32_t before) {
    static const auto tables = crc_tables();
    std::uint32_t crc = ~before;
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
    std::size_t i = 0;
    for (; i + 8 <= bytes.size(); i += 8) {
        std::uint32_t low = 0;
        std::memcpy(&low, bytes.data() + i, 4);
        low ^= crc;
        crc = tables[7][low & 0xffu] ^ tables[6][(low >> 8) & 0xffu] ^ tables[5][(low >> 16) & 0xffu] ^
              tables[4][low >> 24] ^ tables[3][byte(i + 4)] ^ tables[2][byte(i + 5)] ^ tables[1][byte(i + 6)] ^
              tables[0][byte(i + 7)];
    }
    for (; i < bytes.size(); ++i) crc = (crc >> 8) ^ tables[0][(crc ^ byte(i)) & 0xffu];
    return ~crc;
}

} // namespace moe::engine
