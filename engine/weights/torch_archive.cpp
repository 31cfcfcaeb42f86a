// Zip archives without compression (APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3), and the pickle of a tensor in them.
#include "engine/weights/torch_archive.hpp"

#include "engine/weights/pickle.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <optional>

namespace moe::weights {

namespace {

constexpr std::size_t longest_directory = 1 << 20, longest_pickle = 1 << 20; // bytes

// What torch.save names for a tensor.
const std::set<std::string>& names_of_tensors() {
    static const std::set<std::string> names = {"torch._utils._rebuild_tensor_v2",
                                                "torch._utils._rebuild_parameter",
                                                "collections.OrderedDict",
                                                "torch.FloatStorage",
                                                "torch.BFloat16Storage",
                                                "torch.HalfStorage",
                                                "torch.DoubleStorage",
                                                "torch.LongStorage",
                                                "torch.IntStorage",
                                                "torch.ByteStorage",
                                                "torch.BoolStorage"};
    return names;
}

struct ElementType {
    const char *storage, *dtype;
    std::size_t bytes;
};
constexpr ElementType element_types[] = {
    {"torch.FloatStorage", "F32", 4}, {"torch.BFloat16Storage", "BF16", 2}, {"torch.HalfStorage", "F16", 2}};

class Archive {
public:
    Archive(const engine::SourceFile& file, std::size_t offset, std::size_t length, const std::string& place)
        : file_(file), offset_(offset), length_(length), place_(place) {
        if (offset > file.size() || length > file.size() - offset)
            refuse("{}: bytes {} to {} are asked of a file of {}", place, offset, offset + length, file.size());
        read_directory();
    }

    struct Entry {
        std::size_t offset = 0, size = 0; // in the file
    };
    // The entry whose name ends so behind the archive's own folder.
    const Entry* find(const std::string& name) const {
        const auto found = entries_.find(name);
        return found == entries_.end() ? nullptr : &found->second;
    }
    std::string text(const Entry& entry) const { return read(entry.offset - offset_, entry.size); }
    [[noreturn]] void fault() const { refuse("{}: is no archive of torch.save, or a damaged one", place_); }

private:
    std::string read(std::size_t at, std::size_t size) const {
        if (at > length_ || size > length_ - at) fault();
        std::string bytes(size, '\0');
        file_.read(offset_ + at, bytes);
        return bytes;
    }
    std::uint64_t number(std::string_view bytes, std::size_t at, std::size_t size) const {
        if (at + size > bytes.size()) fault();
        std::uint64_t value = 0;
        for (std::size_t i = 0; i < size; ++i)
            value |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[at + i])) << (8 * i);
        return value;
    }

    void read_directory() {
        constexpr std::size_t end_size = 22, locator_size = 20, end64_size = 56;
        if (length_ < end_size) fault();
        const std::string end = read(length_ - end_size, end_size);
        if (number(end, 0, 4) != 0x06054B50) fault();
        std::uint64_t size = number(end, 12, 4), at = number(end, 16, 4);
        if ((size == 0xFFFFFFFF || at == 0xFFFFFFFF || number(end, 10, 2) == 0xFFFF) &&
            length_ >= end_size + locator_size) {
            const std::string locator = read(length_ - end_size - locator_size, locator_size);
            if (number(locator, 0, 4) != 0x07064B50) fault();
            const std::string end64 = read(number(locator, 8, 8), end64_size);
            if (number(end64, 0, 4) != 0x06064B50) fault();
            size = number(end64, 40, 8);
            at = number(end64, 48, 8);
        }
        if (size > longest_directory) fault();
        const std::string directory = read(at, size);
        for (std::size_t next = 0; next < directory.size();) next = read_entry(directory, next);
    }

    std::size_t read_entry(const std::string& directory, std::size_t at) {
        constexpr std::size_t head = 46, local_head = 30;
        if (number(directory, at, 4) != 0x02014B50) fault();
        const std::size_t name_size = number(directory, at + 28, 2), extra_size = number(directory, at + 30, 2),
                          comment_size = number(directory, at + 32, 2);
        const std::size_t end = at + head + name_size + extra_size + comment_size;
        if (end > directory.size()) fault();
        std::uint64_t packed = number(directory, at + 20, 4), size = number(directory, at + 24, 4),
                      local = number(directory, at + 42, 4);
        const std::string_view extra = std::string_view(directory).substr(at + head + name_size, extra_size);
        read_wide(extra, size, packed, local);
        if (number(directory, at + 10, 2) != 0 || packed != size) refuse("{}: is compressed", place_);
        const std::string local_entry = read(local, local_head);
        if (number(local_entry, 0, 4) != 0x04034B50) fault();
        const std::uint64_t begin = local + local_head + number(local_entry, 26, 2) + number(local_entry, 28, 2);
        if (begin > length_ || size > length_ - begin) fault();
        const std::string name = directory.substr(at + head, name_size);
        const std::size_t folder = name.find('/');
        if (folder == std::string::npos) fault();
        entries_[name.substr(folder + 1)] = {offset_ + begin, size};
        return end;
    }

    // Fields beyond 32 bits, in the order in which the entry lacks them.
    void read_wide(std::string_view extra, std::uint64_t& size, std::uint64_t& packed, std::uint64_t& local) const {
        for (std::size_t at = 0; at + 4 <= extra.size();) {
            const std::uint64_t kind = number(extra, at, 2), bytes = number(extra, at + 2, 2);
            std::size_t field = at + 4;
            at = field + bytes;
            if (kind != 1) continue;
            for (std::uint64_t* value : {&size, &packed, &local}) {
                if (*value != 0xFFFFFFFF) continue;
                *value = number(extra, field, 8);
                field += 8;
            }
        }
    }

    const engine::SourceFile& file_;
    std::size_t offset_, length_;
    const std::string& place_;
    std::map<std::string, Entry> entries_;
};

std::optional<std::vector<std::int64_t>> sizes_of(const Pickle::Value& value) {
    std::vector<std::int64_t> sizes;
    if (value.kind != Pickle::Kind::list || value.items.size() > 16) return std::nullopt;
    for (const Pickle::Value* item : value.items) {
        if (item->kind != Pickle::Kind::integer || item->integer < 0) return std::nullopt;
        sizes.push_back(item->integer);
    }
    return sizes;
}

} // namespace

StoredTensor torch_tensor(const engine::SourceFile& file, std::size_t offset, std::size_t length,
                          const std::string& place) {
    const Archive archive(file, offset, length, place);
    const Archive::Entry* description = archive.find("data.pkl");
    if (description == nullptr || description->size > longest_pickle) archive.fault();
    const Pickle pickle(archive.text(*description), place, names_of_tensors());
    const Pickle::Value* tensor = &pickle.root();
    if (is_object(*tensor, "torch._utils._rebuild_parameter") && !tensor->items.empty()) tensor = tensor->items[0];
    if (!is_object(*tensor, "torch._utils._rebuild_tensor_v2") || tensor->items.size() < 4) archive.fault();
    const Pickle::Value &storage = *tensor->items[0], &begin = *tensor->items[1];
    const auto shape = sizes_of(*tensor->items[2]), strides = sizes_of(*tensor->items[3]);
    if (storage.kind != Pickle::Kind::persistent || storage.items[0]->items.size() < 3 || !shape || !strides ||
        shape->size() != strides->size())
        archive.fault();
    const std::vector<const Pickle::Value*>& id = storage.items[0]->items;
    if (id[1]->kind != Pickle::Kind::global || id[2]->kind != Pickle::Kind::text) archive.fault();
    StoredTensor found;
    found.shape = *shape;
    found.file = &file;
    std::size_t element_bytes = 0;
    for (const ElementType& type : element_types)
        if (id[1]->text == type.storage) {
            found.dtype = type.dtype;
            element_bytes = type.bytes;
        }
    if (element_bytes == 0) refuse("{}: holds {}: only float, bfloat16 and half are read", place, shown(id[1]->text));
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max() / 8;
    found.elements = 1;
    for (std::size_t i = shape->size(); i-- > 0;) {
        if ((*shape)[i] > 1 && (*strides)[i] != found.elements)
            refuse("{}: its rows do not lie behind each other", place);
        if ((*shape)[i] > 0 && found.elements > most / (*shape)[i]) archive.fault();
        found.elements *= (*shape)[i];
    }
    const Archive::Entry* data = archive.find("data/" + id[2]->text);
    if (data == nullptr || begin.kind != Pickle::Kind::integer || begin.integer < 0) archive.fault();
    const auto first = static_cast<std::uint64_t>(begin.integer);
    if (first > data->size / element_bytes ||
        static_cast<std::uint64_t>(found.elements) > data->size / element_bytes - first)
        refuse("{}: holds {} of {} bytes", place, data->size,
               (first + static_cast<std::uint64_t>(found.elements)) * element_bytes);
    if (const Archive::Entry* order = archive.find("byteorder"); order != nullptr && order->size == 3)
        refuse("{}: its bytes lie in the order of a big-endian machine", place);
    found.offset = data->offset + first * element_bytes;
    return found;
}

} // namespace moe::weights
