// Checked reading of Megatron's indexed datasets.
#include "engine/data/data.hpp"

#include "engine/base/crc32c.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <cstring>

namespace moe::data {

namespace {

constexpr std::size_t header_bytes = 34;

template <class T>
T load(const engine::MappedFile& file, std::size_t offset) {
    T value;
    std::memcpy(&value, file.at(offset), sizeof value);
    return value;
}

std::size_t element_width(int type) {
    switch (type) {
    case 1:
    case 2:
        return 1;
    case 3:
    case 8:
        return 2;
    case 4:
        return 4;
    case 5:
        return 8;
    default:
        return 0;
    }
}

} // namespace

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix), index_(prefix + ".idx"), data_(prefix + ".bin") {
    const std::string& path = index_.path();
    if (index_.size() < header_bytes)
        refuse("{}: {} bytes are too few for a dataset index (the header has {})", path, index_.size(), header_bytes);
    if (std::memcmp(index_.at(0), "MMIDIDX\0\0", 9) != 0)
        refuse("{}: not a Megatron dataset index (it does not begin with MMIDIDX)", path);
    const auto version = load<std::uint64_t>(index_, 9);
    if (version != 1) refuse("{}: version {} of the dataset index is not known, only 1 is", path, version);
    type_ = load<std::uint8_t>(index_, 17);
    width_ = element_width(type_);
    if (width_ == 0) refuse("{}: element type {} does not hold token ids (1-5 and 8 do)", path, type_);
    const auto sequences = load<std::uint64_t>(index_, 18), entries = load<std::uint64_t>(index_, 26);
    const std::uint64_t room = index_.size() - header_bytes;
    if (sequences > room / 12 || entries > (room - 12 * sequences) / 8)
        refuse("{}: {} bytes are too few for {} sequences and {} document entries; the file is cut off", path,
               index_.size(), sequences, entries);
    if (sequences == 0 || entries < 2)
        refuse("{}: the dataset is empty ({} sequences, {} document entries)", path, sequences, entries);
    documents_ = static_cast<std::int64_t>(entries) - 1;
    offsets_at_ = header_bytes + 4 * sequences;
    const std::size_t documents_at = header_bytes + 12 * sequences;
    const auto last = load<std::int64_t>(index_, documents_at + 8 * (entries - 1));
    if (last != static_cast<std::int64_t>(sequences))
        refuse("{}: the documents end at sequence {}, the index has {}", path, last, sequences);
    bool back_to_back = true;
    for (std::size_t s = 0; s < sequences; ++s) {
        const auto length = load<std::int32_t>(index_, header_bytes + 4 * s);
        const auto offset = load<std::int64_t>(index_, offsets_at_ + 8 * s);
        const std::int64_t bytes = static_cast<std::int64_t>(length) * static_cast<std::int64_t>(width_);
        const auto available = static_cast<std::int64_t>(data_.size());
        if (length < 0 || offset < 0 || offset > available || bytes > available - offset)
            refuse("{}: sequence {} needs bytes {} to {}, but {} has {}; the file is cut off or of another index", path,
                   s, offset, static_cast<double>(offset) + static_cast<double>(bytes), data_.path(), data_.size());
        back_to_back = back_to_back && offset == tokens_ * static_cast<std::int64_t>(width_);
        tokens_ += length;
    }
    if (back_to_back) return;
    first_token_.reserve(sequences + 1);
    std::int64_t first = 0;
    for (std::size_t s = 0; s < sequences; ++s) {
        first_token_.push_back(first);
        first += load<std::int32_t>(index_, header_bytes + 4 * s);
    }
    first_token_.push_back(first);
}

std::uint32_t IndexedDataset::mark() const {
    constexpr std::size_t most = 1 << 16;
    const std::size_t size = data_.size(), part = std::min(size, most);
    std::string ends(data_.at(0), part);
    ends.append(data_.at(size - part), part);
    return engine::crc32c(ends);
}

std::int64_t IndexedDataset::token(std::size_t byte) const {
    switch (type_) {
    case 1:
        return load<std::uint8_t>(data_, byte);
    case 2:
        return load<std::int8_t>(data_, byte);
    case 3:
        return load<std::int16_t>(data_, byte);
    case 4:
        return load<std::int32_t>(data_, byte);
    case 5:
        return load<std::int64_t>(data_, byte);
    default:
        return load<std::uint16_t>(data_, byte);
    }
}

void IndexedDataset::read(std::int64_t first, std::span<std::int32_t> out, std::int64_t vocab) const {
    const auto count = static_cast<std::int64_t>(out.size());
    if (first < 0 || first > tokens_ || count > tokens_ - first)
        refuse("{}: tokens {} to {} were asked for, the dataset has {}", prefix_, first, first + count, tokens_);
    std::size_t sequence = 0;
    if (!first_token_.empty())
        sequence = static_cast<std::size_t>(std::upper_bound(first_token_.begin(), first_token_.end(), first) -
                                            first_token_.begin()) -
                   1;
    for (std::int64_t i = 0; i < count; ++i) {
        std::size_t byte = static_cast<std::size_t>(first + i) * width_;
        if (!first_token_.empty()) {
            while (first + i >= first_token_[sequence + 1]) ++sequence;
            const auto start = load<std::int64_t>(index_, offsets_at_ + 8 * sequence);
            byte =
                static_cast<std::size_t>(start) + static_cast<std::size_t>(first + i - first_token_[sequence]) * width_;
        }
        const std::int64_t id = token(byte);
        if (id < 0 || id >= vocab)
            refuse(
                "{}: token {} at position {} is outside the model's vocabulary of {}; tokenize the text for this model",
                data_.path(), id, first + i, vocab);
        out[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(id);
    }
}

void IndexedDataset::index_documents() {
    const auto sequences = load<std::uint64_t>(index_, 18);
    const std::size_t documents_at = header_bytes + 12 * sequences;
    std::vector<std::int64_t> firsts;
    firsts.reserve(static_cast<std::size_t>(documents_));
    std::uint64_t sequence = 0;
    std::int64_t first = 0;
    for (std::int64_t d = 0; d < documents_; ++d) {
        const auto begin = load<std::int64_t>(index_, documents_at + 8 * static_cast<std::size_t>(d));
        if (begin < static_cast<std::int64_t>(sequence) || begin > static_cast<std::int64_t>(sequences))
            refuse("{}: document {} begins at sequence {}, behind one at {} of {}: the documents are not in order",
                   index_.path(), d, begin, sequence, sequences);
        for (; sequence < static_cast<std::uint64_t>(begin); ++sequence)
            first += load<std::int32_t>(index_, header_bytes + 4 * sequence);
        firsts.push_back(first);
    }
    if (firsts.front() != 0) refuse("{}: {} tokens stand before the first document", index_.path(), firsts.front());
    first_of_document_ = std::move(firsts);
}

const std::vector<std::int64_t>& IndexedDataset::first_of_document() {
    if (first_of_document_.empty()) index_documents();
    return first_of_document_;
}

void IndexedDataset::read_documents(std::int64_t first, std::span<std::int64_t> out) {
    const std::vector<std::int64_t>& firsts = first_of_document();
    auto next = std::upper_bound(firsts.begin(), firsts.end(), first);
    for (std::size_t i = 0; i < out.size(); ++i) {
        while (next != firsts.end() && *next <= first + static_cast<std::int64_t>(i)) ++next;
        out[i] = *(next - 1);
    }
}

} // namespace moe::data
