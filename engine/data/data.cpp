// Checked reading of Megatron's indexed datasets.
#include "engine/data/data.hpp"

#include "engine/base/crc32c.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>

namespace moe::data {

namespace {

constexpr std::size_t header_bytes = 34;

template <class T>
T load(const engine::SourceFile& file, std::size_t offset) {
    T value;
    file.read(offset, {reinterpret_cast<char*>(&value), sizeof value});
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

template <class T>
std::int64_t element(const char* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return static_cast<std::int64_t>(value);
}

std::int64_t token_of(int type, const char* bytes) {
    switch (type) {
    case 1:
        return element<std::uint8_t>(bytes);
    case 2:
        return element<std::int8_t>(bytes);
    case 3:
        return element<std::int16_t>(bytes);
    case 4:
        return element<std::int32_t>(bytes);
    case 5:
        return element<std::int64_t>(bytes);
    default:
        return element<std::uint16_t>(bytes);
    }
}

} // namespace

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix), index_(prefix + ".idx"), data_(prefix + ".bin") {
    const std::string& path = index_.path();
    if (index_.size() < header_bytes)
        refuse("{}: {} bytes are too few for a dataset index (the header has {})", path, index_.size(), header_bytes);
    char magic[9] = {};
    index_.read(0, magic);
    if (std::memcmp(magic, "MMIDIDX\0\0", 9) != 0)
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
    const auto last = load<std::int64_t>(index_, header_bytes + 12 * sequences + 8 * (entries - 1));
    if (last != static_cast<std::int64_t>(sequences))
        refuse("{}: the documents end at sequence {}, the index has {}", path, last, sequences);
    read_index(sequences);
    const std::string mask = prefix + ".loss";
    if (!std::filesystem::exists(mask + ".idx")) return;
    loss_ = std::make_unique<IndexedDataset>(mask);
    if (loss_->tokens_ != tokens_ || loss_->documents_ != documents_)
        refuse("{}.idx: masks {} of {}, {} has {} of {}; it is of another dataset", mask,
               counted(loss_->tokens_, "token"), counted(loss_->documents_, "document"), path, tokens_, documents_);
}

void IndexedDataset::read_index(std::size_t sequences) {
    const auto available = static_cast<std::int64_t>(data_.size()), width = static_cast<std::int64_t>(width_);
    const auto walk = [&](const auto& visit) {
        constexpr std::size_t at_once = 1 << 16;
        std::vector<std::int32_t> lengths(std::min(at_once, sequences));
        std::vector<std::int64_t> offsets(lengths.size());
        for (std::size_t s = 0; s < sequences; s += at_once) {
            const std::size_t count = std::min(at_once, sequences - s);
            index_.read(header_bytes + 4 * s, {reinterpret_cast<char*>(lengths.data()), 4 * count});
            index_.read(header_bytes + 4 * sequences + 8 * s, {reinterpret_cast<char*>(offsets.data()), 8 * count});
            for (std::size_t i = 0; i < count; ++i) visit(s + i, lengths[i], offsets[i]);
        }
    };
    bool back_to_back = true;
    walk([&](std::size_t s, std::int64_t length, std::int64_t offset) {
        if (length < 0 || offset < 0 || offset > available || length * width > available - offset)
            refuse("{}: sequence {} needs bytes {} to {}, but {} has {}; the file is cut off or of another index",
                   index_.path(), s, offset, static_cast<double>(offset) + static_cast<double>(length * width),
                   data_.path(), available);
        back_to_back = back_to_back && offset == tokens_ * width;
        tokens_ += length;
    });
    if (back_to_back && tokens_ * width != available)
        refuse("{}: its sequences end at byte {}, but {} has {}; it is of another .bin", index_.path(), tokens_ * width,
               data_.path(), available);
    if (back_to_back) return;
    std::int64_t first = 0;
    walk([&](std::size_t, std::int64_t length, std::int64_t offset) {
        first_token_.push_back(first);
        first_byte_.push_back(offset);
        first += length;
    });
    first_token_.push_back(first);
}

std::uint32_t IndexedDataset::mark() const {
    constexpr std::size_t most = 1 << 16;
    const std::size_t part = std::min(data_.size(), most);
    std::string ends(2 * part, '\0');
    data_.read(0, std::span(ends).first(part));
    data_.read(data_.size() - part, std::span(ends).last(part));
    const std::uint32_t tokens = engine::crc32c(ends);
    return loss_ ? engine::crc32c(fmt::format("{} {}", tokens, loss_->mark())) : tokens;
}

void IndexedDataset::read_run(std::int64_t byte, std::int64_t first, std::span<std::int32_t> out,
                              std::int64_t vocab) const {
    std::string bytes(out.size() * width_, '\0');
    data_.read(static_cast<std::size_t>(byte), bytes);
    for (std::size_t i = 0; i < out.size(); ++i) {
        const std::int64_t id = token_of(type_, bytes.data() + i * width_);
        if (id < 0 || id >= vocab)
            refuse(
                "{}: token {} at position {} is outside the model's vocabulary of {}; tokenize the text for this model",
                data_.path(), id, first + static_cast<std::int64_t>(i), vocab);
        out[i] = static_cast<std::int32_t>(id);
    }
}

void IndexedDataset::read(std::int64_t first, std::span<std::int32_t> out, std::int64_t vocab) const {
    const auto count = static_cast<std::int64_t>(out.size()), width = static_cast<std::int64_t>(width_);
    if (first < 0 || first > tokens_ || count > tokens_ - first)
        refuse("{}: tokens {} to {} were asked for, the dataset has {}", prefix_, first, first + count, tokens_);
    if (first_token_.empty()) return read_run(first * width, first, out, vocab);
    auto next = std::upper_bound(first_token_.begin(), first_token_.end(), first);
    for (std::int64_t at = first; at < first + count; ++next) {
        const auto sequence = static_cast<std::size_t>(next - first_token_.begin()) - 1;
        const std::int64_t run = std::min(*next, first + count) - at;
        read_run(first_byte_[sequence] + (at - first_token_[sequence]) * width, at,
                 out.subspan(static_cast<std::size_t>(at - first), static_cast<std::size_t>(run)), vocab);
        at += run;
    }
}

void IndexedDataset::read_counts(std::int64_t first, std::span<std::int32_t> out) const {
    if (!loss_) return std::fill(out.begin(), out.end(), 1);
    loss_->read(first, out, 2);
}

void IndexedDataset::index_documents() {
    const auto sequences = static_cast<std::int64_t>(load<std::uint64_t>(index_, 18));
    const std::size_t lengths_at = header_bytes, documents_at = header_bytes + 12 * static_cast<std::size_t>(sequences);
    constexpr std::int64_t at_once = 1 << 16;
    std::vector<std::int64_t> begins(static_cast<std::size_t>(std::min(at_once, documents_)));
    std::vector<std::int32_t> lengths(static_cast<std::size_t>(std::min(at_once, sequences)));
    std::vector<std::int64_t> firsts;
    firsts.reserve(static_cast<std::size_t>(documents_));
    std::int64_t sequence = 0, first = 0; // first token of that sequence
    const auto walk_to = [&](std::int64_t begin) {
        for (; sequence < begin; ++sequence) {
            const std::int64_t at = sequence % at_once, count = std::min(at_once, sequences - sequence);
            if (at == 0)
                index_.read(lengths_at + 4 * static_cast<std::size_t>(sequence),
                            {reinterpret_cast<char*>(lengths.data()), 4 * static_cast<std::size_t>(count)});
            first += lengths[static_cast<std::size_t>(at)];
        }
    };
    for (std::int64_t d = 0; d < documents_; ++d) {
        const std::int64_t at = d % at_once, count = std::min(at_once, documents_ - d);
        if (at == 0)
            index_.read(documents_at + 8 * static_cast<std::size_t>(d),
                        {reinterpret_cast<char*>(begins.data()), 8 * static_cast<std::size_t>(count)});
        const std::int64_t begin = begins[static_cast<std::size_t>(at)];
        if (begin < sequence || begin > sequences)
            refuse("{}: document {} begins at sequence {}, behind one at {} of {}: the documents are not in order",
                   index_.path(), d, begin, sequence, sequences);
        walk_to(begin);
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
