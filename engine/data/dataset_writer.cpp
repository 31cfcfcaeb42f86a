// Tokens to a .bin as they come, then the index.
#include "engine/data/dataset_writer.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"

#include <cstdio>
#include <cstring>
#include <limits>

namespace moe::data {

namespace {

constexpr std::uint8_t u8_elements = 1, i32_elements = 4, u16_elements = 8;

template <class T>
void append(std::string& out, T value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out.append(bytes, sizeof value);
}

std::string index_of(const std::vector<std::int64_t>& lengths, std::uint8_t type) {
    const std::int64_t width = type == i32_elements ? 4 : type == u16_elements ? 2 : 1;
    std::string out("MMIDIDX\0\0", 9);
    append<std::uint64_t>(out, 1);
    append(out, type);
    append<std::uint64_t>(out, lengths.size());
    append<std::uint64_t>(out, lengths.size() + 1);
    for (const std::int64_t length : lengths) append(out, static_cast<std::int32_t>(length));
    std::int64_t offset = 0;
    for (const std::int64_t length : lengths) {
        append(out, offset);
        offset += width * length;
    }
    for (std::size_t document = 0; document <= lengths.size(); ++document)
        append(out, static_cast<std::int64_t>(document));
    return out;
}

} // namespace

void DatasetWriter::add(const std::vector<std::int32_t>& ids, const std::string& place, bool counts) {
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    count_ += static_cast<std::int64_t>(ids.size());
    if (count_ > most) refuse("{}: makes more tokens than one document can hold ({}); split the file", place, most);
    bytes_.clear();
    for (const std::int32_t id : ids) {
        if (wide_)
            append(bytes_, id);
        else
            append(bytes_, static_cast<std::uint16_t>(id));
    }
    write_(bytes_);
    if (masked_) mask_.append(ids.size(), counts ? '\1' : '\0');
}

void DatasetWriter::end_document() {
    lengths_.push_back(count_);
    count_ = 0;
}

TokenizeResult write_dataset(const std::string& prefix, bool wide, bool masked,
                             const std::function<void(DatasetWriter&)>& fill) {
    TokenizeResult result;
    std::vector<std::int64_t> lengths;
    std::string mask;
    write_file(prefix + ".bin", [&](const std::function<void(std::string_view)>& write) {
        DatasetWriter writer(wide, masked, write);
        fill(writer);
        lengths = std::move(writer.lengths_);
        mask = std::move(writer.mask_);
    });
    std::remove((prefix + ".loss.idx").c_str());
    std::remove((prefix + ".loss.bin").c_str());
    try {
        if (masked) {
            write_file(prefix + ".loss.bin", mask);
            write_file(prefix + ".loss.idx", index_of(lengths, u8_elements));
        }
        write_file(prefix + ".idx", index_of(lengths, wide ? i32_elements : u16_elements));
    } catch (...) {
        // A .bin without its index, or with an older one, would be a trap.
        for (const char* end : {".bin", ".loss.bin", ".loss.idx"}) std::remove((prefix + end).c_str());
        throw;
    }
    for (const std::int64_t length : lengths) result.tokens += length;
    result.documents = static_cast<std::int64_t>(lengths.size());
    return result;
}

} // namespace moe::data
