// Protocol Buffers' wire format, as far as a writer needs it: a message is its fields, one behind the other.
//
// Source: https://protobuf.dev/programming-guides/encoding (varints, length-delimited fields, fixed 64-bit values).
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>

namespace moe::tools {

class ProtobufMessage {
public:
    const std::string& bytes() const { return bytes_; }
    void clear() { bytes_.clear(); }

    // uint64, int64, enumerations and booleans. A negative value takes ten bytes, as in every int64 of the format.
    void number(int field, std::uint64_t value) {
        key(field, 0);
        varint(value);
    }
    void fixed64(int field, std::uint64_t value) {
        key(field, 1);
        for (int byte = 0; byte < 8; ++byte) bytes_ += static_cast<char>(value >> (8 * byte) & 0xff);
    }
    void real(int field, double value) { fixed64(field, std::bit_cast<std::uint64_t>(value)); }
    void text(int field, std::string_view value) {
        key(field, 2);
        varint(value.size());
        bytes_ += value;
    }
    void message(int field, const ProtobufMessage& inner) { text(field, inner.bytes_); }

private:
    void key(int field, unsigned type) { varint(static_cast<std::uint64_t>(field) << 3 | type); }
    void varint(std::uint64_t value) {
        for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>((value & 0x7f) | 0x80);
        bytes_ += static_cast<char>(value);
    }
    std::string bytes_;
};

} // namespace moe::tools
