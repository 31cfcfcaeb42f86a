// Protocol buffers of events, by hand: field numbers are those of event.proto and summary.proto.
#include "tools/history/tensorboard.hpp"

#include "engine/base/crc32c.hpp"
#include "planner/base/error.hpp"

#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <filesystem>
#include <span>
#include <system_error>

namespace moe::tools {
namespace {

enum class Wire : std::uint8_t { varint = 0, eight_bytes = 1, bytes = 2, four_bytes = 5 };

template <class Unsigned>
void append_little_endian(std::string& out, Unsigned value) {
    for (std::size_t i = 0; i < sizeof(Unsigned); ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xff));
}

void append_varint(std::string& out, std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) out.push_back(static_cast<char>((value & 0x7f) | 0x80));
    out.push_back(static_cast<char>(value));
}

void append_key(std::string& out, unsigned field, Wire wire) {
    append_varint(out, std::uint64_t{field} << 3 | static_cast<std::uint64_t>(wire));
}

void append_varint_field(std::string& out, unsigned field, std::uint64_t value) {
    append_key(out, field, Wire::varint);
    append_varint(out, value);
}

void append_bytes(std::string& out, unsigned field, std::string_view bytes) {
    append_key(out, field, Wire::bytes);
    append_varint(out, bytes.size());
    out += bytes;
}

// Event: wall_time = 1, step = 2.
std::string event_of(double wall_seconds, std::int64_t step) {
    std::string event;
    append_key(event, 1, Wire::eight_bytes);
    append_little_endian(event, std::bit_cast<std::uint64_t>(wall_seconds));
    append_varint_field(event, 2, static_cast<std::uint64_t>(step));
    return event;
}

// A record's own checksum is not among the bytes that it is computed of: rotated, plus a constant.
std::uint32_t masked_crc(std::string_view bytes) {
    const std::uint32_t crc = engine::crc32c(std::span(bytes.data(), bytes.size()));
    return std::rotr(crc, 15) + 0xa282ead8U;
}

} // namespace

std::string event_record(std::string_view bytes) {
    std::string record;
    append_little_endian(record, std::uint64_t{bytes.size()});
    append_little_endian(record, masked_crc(record));
    record += bytes;
    append_little_endian(record, masked_crc(bytes));
    return record;
}

EventFile::EventFile(const std::string& folder, double wall_seconds, std::int64_t first)
    : path_((std::filesystem::path(folder) /
             fmt::format("events.out.tfevents.{:010.0f}.moe-plan.{}", wall_seconds, ::getpid()))
                .string()) {
    file_.reset(std::fopen(path_.c_str(), "wbxe"));
    if (!file_) fail("cannot write {}: {}", path_, std::generic_category().message(errno));
    std::string version = event_of(wall_seconds, 0);
    append_bytes(version, 3, "brain.Event:2"); // file_version
    write(version);
    std::string session, start = event_of(wall_seconds, first);
    append_varint_field(session, 1, 1); // SessionLog.status = START
    append_bytes(start, 7, session);    // session_log
    write(start);
}

void EventFile::add(double wall_seconds, std::int64_t step, const Scalars& scalars) {
    std::string summary, event = event_of(wall_seconds, step);
    for (const auto& [tag, number] : scalars) {
        std::string value;
        append_bytes(value, 1, tag);            // Summary.Value.tag
        append_key(value, 2, Wire::four_bytes); // simple_value
        append_little_endian(value, std::bit_cast<std::uint32_t>(static_cast<float>(number)));
        append_bytes(summary, 1, value); // Summary.value
    }
    append_bytes(event, 5, summary); // summary
    write(event);
}

void EventFile::write(const std::string& event) {
    const std::string record = event_record(event);
    if (std::fwrite(record.data(), 1, record.size(), file_.get()) != record.size() || std::fflush(file_.get()) != 0)
        fail("cannot write {}: {}", path_, std::generic_category().message(errno));
}

} // namespace moe::tools
