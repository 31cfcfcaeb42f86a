// Bytes of messages beside those of Protocol Buffers' own description of its wire format, and a timeline's trace.
#include "tools/report/protobuf.hpp"

#include "tools/report/perfetto.hpp"

#include <doctest/doctest.h>

#include <string>

namespace {

using namespace moe::tools;

std::string hex(const std::string& bytes) {
    constexpr const char* digits = "0123456789abcdef";
    std::string out;
    for (const char c : bytes) {
        const auto byte = static_cast<unsigned char>(c);
        out += {digits[byte >> 4], digits[byte & 15]};
    }
    return out;
}

} // namespace

// https://protobuf.dev/programming-guides/encoding: the messages there are 089601, 120774657374696e67 and 1a03089601.
TEST_CASE("messages of protocol buffers have the bytes of the format's description") {
    ProtobufMessage number, text, outer;
    number.number(1, 150);
    CHECK(hex(number.bytes()) == "089601");
    text.text(2, "testing");
    CHECK(hex(text.bytes()) == "120774657374696e67");
    outer.message(3, number);
    CHECK(hex(outer.bytes()) == "1a03089601");
}

TEST_CASE("numbers of protocol buffers: none, the largest, fixed ones, and fields beyond 15") {
    ProtobufMessage m;
    m.number(1, 0);
    m.number(1, ~std::uint64_t{0});
    CHECK(hex(m.bytes()) == "080008ffffffffffffffffff01");
    m.clear();
    m.fixed64(47, 0x0102030405060708);
    CHECK(hex(m.bytes()) == "f9020807060504030201");
    m.clear();
    m.real(44, 1.0); // IEEE 754: 3ff0000000000000
    CHECK(hex(m.bytes()) == "e102000000000000f03f");
}

TEST_CASE("a trace is Perfetto's by its name") {
    CHECK(is_perfetto("runs/t.pftrace"));
    CHECK_FALSE(is_perfetto("t.json"));
    CHECK_FALSE(is_perfetto("t.pftrace.json"));
}
