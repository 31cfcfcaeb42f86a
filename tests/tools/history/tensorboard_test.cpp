// Event files: framing with checksums, and values where TensorBoard's schema has them.
#include "engine/base/crc32c.hpp"
#include "tests/tools/verbs/command.hpp"
#include "tools/history/tensorboard.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

using moe::test::Folder;

namespace {

template <class T>
T number_at(const std::string& bytes, std::size_t at) {
    T value;
    REQUIRE(at + sizeof(T) <= bytes.size());
    std::memcpy(&value, bytes.data() + at, sizeof(T));
    return value;
}

std::uint32_t unmasked(std::uint32_t crc) { return std::rotl(crc - 0xa282ead8U, 15); }

// The events of a file, each record checked against both of its checksums.
std::vector<std::string> events_of(const std::string& file) {
    std::vector<std::string> events;
    for (std::size_t at = 0; at < file.size();) {
        const auto size = number_at<std::uint64_t>(file, at);
        CHECK(unmasked(number_at<std::uint32_t>(file, at + 8)) == moe::engine::crc32c(std::span(file.data() + at, 8)));
        events.push_back(file.substr(at + 12, size));
        CHECK(unmasked(number_at<std::uint32_t>(file, at + 12 + size)) ==
              moe::engine::crc32c(std::span(file.data() + at + 12, size)));
        at += size + 16;
    }
    return events;
}

} // namespace

TEST_CASE("a record of TensorFlow's own is made to the byte") {
    // tensorflow.io.TFRecordWriter of the three bytes "abc".
    const std::string record = moe::tools::event_record("abc");
    REQUIRE(record.size() == 19);
    CHECK(number_at<std::uint64_t>(record, 0) == 3);
    CHECK(record.substr(12, 3) == "abc");
    CHECK(moe::engine::crc32c(std::span("123456789", 9)) == 0xe3069283U); // the checksum's own known value
    CHECK(events_of(record) == std::vector<std::string>{"abc"});
}

TEST_CASE("an event file: version, start of a session, scalars") {
    const Folder folder;
    moe::tools::EventFile file(folder.path(), 1.5, 7);
    file.add(2.5, 300, {{"train/loss", 0.75}});
    CHECK(std::filesystem::path(file.path()).filename().string().rfind("events.out.tfevents.0000000002.", 0) == 0);
    const std::vector<std::string> events =
        events_of(folder.read(std::filesystem::path(file.path()).filename().string()));
    REQUIRE(events.size() == 3);
    // wall_time is field 1 (tag 0x09, 8 bytes), step field 2 (tag 0x10, a varint).
    CHECK(number_at<double>(events[0], 1) == 1.5);
    CHECK(events[0].substr(9) == std::string("\x10\x00\x1a\x0d"
                                             "brain.Event:2",
                                             17));
    CHECK(events[1].substr(9) == std::string("\x10\x07\x3a\x02\x08\x01", 6));
    CHECK(number_at<double>(events[2], 1) == 2.5);
    // 300 = 0xac 0x02; summary (0x2a) of one value (0x0a) with its tag (0x0a) and a float (0x15).
    CHECK(events[2].substr(9, 9) == std::string("\x10\xac\x02\x2a\x13\x0a\x11\x0a\x0a", 9));
    CHECK(events[2].substr(18, 11) == "train/loss\x15");
    CHECK(number_at<float>(events[2], 29) == 0.75F);
    CHECK(events[2].size() == 33);
}
