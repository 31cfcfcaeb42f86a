// The safetensors format: header checks, element conversion, shards and their index.
#include "engine/weights/safetensors.hpp"

#include "kernels/bf16.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <filesystem>
#include <limits>

namespace moe::weights {

namespace {

using SortedJson = nlohmann::json; // A sorted map keeps look-ups among tens of thousands of tensors cheap.

// Bits of one element; 0 for a type that the format does not know.
std::int64_t bits_of(const std::string& dtype) {
    static const std::map<std::string, std::int64_t> bits = {
        {"BOOL", 8}, {"U8", 8},   {"I8", 8},    {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"I16", 16},
        {"U16", 16}, {"F16", 16}, {"BF16", 16}, {"I32", 32},    {"U32", 32},    {"F32", 32},    {"I64", 64},
        {"U64", 64}, {"F64", 64}, {"C64", 64},  {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}};
    const auto found = bits.find(dtype);
    return found == bits.end() ? 0 : found->second;
}

float float_of_half(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
    const std::uint32_t exponent = (half >> 10) & 0x1fu, fraction = half & 0x3ffu;
    if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (fraction << 13));
    if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
    const float tiny = static_cast<float>(fraction) * 0x1p-24f; // The exponent 0 means a subnormal number.
    return sign != 0 ? -tiny : tiny;
}

SortedJson parse(const char* text, std::size_t length, const std::string& place) {
    SortedJson json = parse_json<SortedJson>({text, length}, place, long_json);
    if (!json.is_object()) refuse("{}: the JSON is not an object of tensors", place);
    return json;
}

std::int64_t whole_number(const SortedJson& value, const std::string& place) {
    if (!value.is_number_integer() || (value.is_number_unsigned() && value.get<std::uint64_t>() > (1ull << 62)) ||
        value.get<std::int64_t>() < 0)
        refuse("{}: shape and data_offsets must be whole numbers that are not negative", place);
    return value.get<std::int64_t>();
}

// Elements of a shape, or -1 when they pass 2^56, which no file can hold.
std::int64_t checked_product(const std::vector<std::int64_t>& shape) {
    constexpr std::int64_t most = std::int64_t{1} << 56;
    std::int64_t elements = 1;
    for (const std::int64_t n : shape) {
        if (n == 0) return 0;
        if (elements > most / n) return -1;
        elements *= n;
    }
    return elements;
}

struct Extent {
    std::int64_t begin = 0, end = 0;
    std::string name;
};

// One entry of the header; `data` is where the data area starts and `room` its length in bytes.
StoredTensor read_entry(const SortedJson& entry, const std::string& place, std::size_t data, std::int64_t room,
                        Extent& extent) {
    if (!entry.is_object()) refuse("{}: must be an object with dtype, shape and data_offsets", place);
    StoredTensor tensor;
    const auto dtype = entry.find("dtype"), shape = entry.find("shape"), offsets = entry.find("data_offsets");
    if (dtype == entry.end() || !dtype->is_string()) refuse("{}: dtype is missing", place);
    if (shape == entry.end() || !shape->is_array()) refuse("{}: shape is missing", place);
    if (offsets == entry.end() || !offsets->is_array() || offsets->size() != 2)
        refuse("{}: data_offsets must be two numbers", place);
    tensor.dtype = dtype->get<std::string>();
    const std::int64_t bits = bits_of(tensor.dtype);
    if (bits == 0) refuse("{}: dtype {} is not known", place, shown(tensor.dtype));
    for (const SortedJson& n : *shape) tensor.shape.push_back(whole_number(n, place));
    tensor.elements = checked_product(tensor.shape);
    extent.begin = whole_number((*offsets)[0], place);
    extent.end = whole_number((*offsets)[1], place);
    if (extent.begin > extent.end || extent.end > room)
        refuse("{}: bytes {} to {}, but the file holds {} bytes of data; it is cut off or damaged", place, extent.begin,
               extent.end, room);
    if (tensor.elements < 0 || tensor.elements * bits != (extent.end - extent.begin) * 8)
        refuse("{}: shape [{}] of {} does not fill {} bytes", place, fmt::join(tensor.shape, ", "), tensor.dtype,
               extent.end - extent.begin);
    tensor.offset = data + static_cast<std::size_t>(extent.begin);
    return tensor;
}

void check_tiling(std::vector<Extent>& extents, std::int64_t room, const std::string& path) {
    std::sort(extents.begin(), extents.end(),
              [](const Extent& a, const Extent& b) { return std::pair(a.begin, a.end) < std::pair(b.begin, b.end); });
    std::int64_t at = 0;
    for (const Extent& extent : extents) {
        if (extent.begin != at)
            refuse("{}: {} begins at byte {} of the data, the tensor before it ends at {}", path, shown(extent.name),
                   extent.begin, at);
        at = extent.end;
    }
    if (at != room) refuse("{}: the tensors end at byte {} of {} bytes of data", path, at, room);
}

program::Dtype stored_type(const TensorToWrite& tensor, program::Dtype dtype) {
    return tensor.exact ? program::Dtype::f32 : dtype;
}

// Tensors of one file, in order, and the length and text that go before their data.
class Header {
public:
    explicit Header(const std::map<std::string, std::string>& metadata) {
        json_["__metadata__"] = metadata;
        json_["__metadata__"]["format"] = "pt"; // Transformers refuses files without it.
    }
    void add(const std::string& name, const char* dtype, const std::vector<std::int64_t>& shape, std::int64_t bytes) {
        json_[name] = {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {at_, at_ + bytes}}};
        at_ += bytes;
    }
    std::string text() const {
        std::string text = json_.dump();
        text.resize((text.size() + 7) / 8 * 8, ' '); // The blanks keep the data area aligned.
        const std::uint64_t length = text.size();
        return std::string(reinterpret_cast<const char*>(&length), sizeof length).append(text);
    }

private:
    SortedJson json_;
    std::int64_t at_ = 0;
};

std::string header_of(const std::vector<TensorToWrite>& tensors, program::Dtype dtype) {
    Header header({});
    for (const TensorToWrite& tensor : tensors) {
        const program::Dtype type = stored_type(tensor, dtype);
        header.add(tensor.name, type == program::Dtype::bf16 ? "BF16" : "F32", tensor.shape,
                   program::bytes_of(type, checked_product(tensor.shape)));
    }
    return header.text();
}

// Throws Error (failure) where values and shape of a tensor differ in size.
void check_values(const std::string& path, const std::string& name, const std::vector<std::int64_t>& shape,
                  std::size_t values) {
    if (static_cast<std::int64_t>(values) != checked_product(shape))
        fail("{}: {} has {} elements, its shape [{}] asks for {}", path, name, values, fmt::join(shape, ", "),
             checked_product(shape));
}

// Refuses elements that a tensor has not.
void check_range(const StoredTensor& tensor, const std::string& name, std::int64_t first, std::size_t count) {
    const auto some = static_cast<std::int64_t>(count);
    if (first < 0 || first > tensor.elements - some)
        fail("elements {} to {} of {} were asked for, it has {}", first, first + some, name, tensor.elements);
}

std::string encoded(const std::vector<float>& values, program::Dtype dtype) {
    if (values.empty()) return {};
    std::string bytes(values.size() * (dtype == program::Dtype::bf16 ? 2 : 4), '\0');
    if (dtype == program::Dtype::f32) {
        std::memcpy(bytes.data(), values.data(), bytes.size());
        return bytes;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
        const std::uint16_t half = bf16_of_float(values[i]);
        std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
    return bytes;
}

std::string in_folder(const std::string& folder, const std::string& name) {
    return (std::filesystem::path(folder) / name).string();
}

} // namespace

void read_floats(const StoredTensor& tensor, const std::string& name, std::int64_t first, std::span<float> out) {
    check_range(tensor, name, first, out.size());
    if (out.empty()) return;
    if (tensor.dtype == "F32") {
        tensor.file->read(tensor.offset + 4 * static_cast<std::size_t>(first),
                          {reinterpret_cast<char*>(out.data()), out.size_bytes()});
        return;
    }
    const bool half = tensor.dtype == "F16";
    if (!half && tensor.dtype != "BF16")
        refuse("{}: {} is stored as {}; only F32, BF16 and F16 weights can be read: convert the checkpoint",
               tensor.file->path(), name, tensor.dtype);
    std::array<std::uint16_t, 4096> bits{};
    for (std::size_t done = 0; done < out.size(); done += bits.size()) {
        const std::size_t part = std::min(bits.size(), out.size() - done);
        tensor.file->read(tensor.offset + 2 * (static_cast<std::size_t>(first) + done),
                          {reinterpret_cast<char*>(bits.data()), 2 * part});
        for (std::size_t i = 0; i < part; ++i) out[done + i] = half ? float_of_half(bits[i]) : float_of_bf16(bits[i]);
    }
}

void read_integers(const StoredTensor& tensor, const std::string& name, std::int64_t first,
                   std::span<std::int32_t> out) {
    check_range(tensor, name, first, out.size());
    if (tensor.dtype != "I32") refuse("{}: {}: dtype {}: must be I32", tensor.file->path(), shown(name), tensor.dtype);
    if (out.empty()) return;
    tensor.file->read(tensor.offset + 4 * static_cast<std::size_t>(first),
                      {reinterpret_cast<char*>(out.data()), out.size_bytes()});
}

Safetensors::Safetensors(const std::string& path) : file_(path) {
    if (file_.size() < 8) refuse("{}: {} bytes are too few for a safetensors file", path, file_.size());
    std::uint64_t length = 0;
    file_.read(0, {reinterpret_cast<char*>(&length), sizeof length});
    if (length > longest_header)
        refuse("{}: a header of {} bytes; at most {} are allowed: not a safetensors file, or damaged", path, length,
               longest_header);
    if (length > file_.size() - 8)
        refuse("{}: a header of {} bytes in a file of {}; it is cut off", path, length, file_.size());
    std::string text(static_cast<std::size_t>(length), '\0');
    file_.read(8, text);
    const SortedJson header = parse(text.data(), text.size(), path + ": header");
    const std::size_t data = 8 + static_cast<std::size_t>(length);
    const auto room = static_cast<std::int64_t>(file_.size() - data);
    std::vector<Extent> extents;
    for (const auto& [name, entry] : header.items()) {
        if (name == "__metadata__") {
            for (const auto& [key, value] : entry.items())
                if (value.is_string()) metadata_.emplace(key, value.get<std::string>());
            continue;
        }
        Extent& extent = extents.emplace_back();
        extent.name = name;
        StoredTensor tensor = read_entry(entry, fmt::format("{}: {}", path, shown(name)), data, room, extent);
        tensor.file = &file_;
        tensors_.emplace(name, std::move(tensor));
    }
    check_tiling(extents, room, path);
}

StoredWeights::StoredWeights(const std::string& folder) : folder_(folder) {
    const std::string single = in_folder(folder, "model.safetensors"),
                      index = in_folder(folder, "model.safetensors.index.json");
    std::error_code error;
    if (std::filesystem::exists(index, error)) {
        open_shards(index);
        return;
    }
    if (!std::filesystem::exists(single, error))
        refuse("{}: holds neither model.safetensors nor model.safetensors.index.json", folder);
    files_.push_back(std::make_unique<Safetensors>(single));
    for (const auto& [name, tensor] : files_.back()->tensors()) tensors_.emplace(name, &tensor);
}

void StoredWeights::open_shards(const std::string& index_path) {
    const std::string text = read_file(index_path);
    const SortedJson index = parse(text.data(), text.size(), index_path);
    const auto map = index.find("weight_map");
    if (map == index.end() || !map->is_object()) refuse("{}: weight_map is missing", index_path);
    std::map<std::string, const Safetensors*> shards;
    for (const auto& [name, file] : map->items()) {
        if (!file.is_string()) refuse("{}: weight_map: {}: must name a file", index_path, shown(name));
        const std::string shard = file.get<std::string>();
        if (shard.empty() || shard.find('/') != std::string::npos || shard == "..")
            refuse("{}: weight_map: {} = {}: must be a file of the same folder", index_path, shown(name), shown(shard));
        const Safetensors*& open = shards[shard];
        if (open == nullptr) {
            files_.push_back(std::make_unique<Safetensors>(in_folder(folder_, shard)));
            open = files_.back().get();
        }
        const auto found = open->tensors().find(name);
        if (found == open->tensors().end())
            refuse("{}: weight_map puts {} into {}, which does not hold it", index_path, shown(name), shown(shard));
        tensors_.emplace(name, &found->second);
    }
}

const StoredTensor* StoredWeights::find(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : found->second;
}

std::vector<std::string> StoredWeights::names() const {
    std::vector<std::string> list;
    for (const auto& [name, tensor] : tensors_) list.push_back(name);
    return list;
}

void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors, program::Dtype dtype,
                       const TensorValues& values) {
    if (dtype != program::Dtype::f32 && dtype != program::Dtype::bf16)
        fail("{}: weights are written as F32 or BF16", path);
    write_file(path, [&](const std::function<void(std::string_view)>& append) {
        append(header_of(tensors, dtype));
        for (const TensorToWrite& tensor : tensors) {
            const std::vector<float> floats = values(tensor);
            check_values(path, tensor.name, tensor.shape, floats.size());
            append(encoded(floats, stored_type(tensor, dtype)));
        }
    });
}

void write_integers(const std::string& path, const std::vector<IntegersToWrite>& tensors,
                    const std::map<std::string, std::string>& metadata) {
    Header header(metadata);
    for (const IntegersToWrite& tensor : tensors) {
        check_values(path, tensor.name, tensor.shape, tensor.values.size());
        header.add(tensor.name, "I32", tensor.shape, static_cast<std::int64_t>(tensor.values.size_bytes()));
    }
    write_file(path, [&](const std::function<void(std::string_view)>& append) {
        append(header.text());
        for (const IntegersToWrite& tensor : tensors)
            append({reinterpret_cast<const char*>(tensor.values.data()), tensor.values.size_bytes()});
    });
}

void write_weights(const std::string& folder, const std::vector<TensorToWrite>& tensors, program::Dtype dtype,
                   std::int64_t shard_bytes, const TensorValues& values) {
    namespace fs = std::filesystem;
    std::error_code error;
    fs::create_directories(folder, error);
    if (error || !fs::is_directory(folder)) fail("cannot make the folder {}: {}", folder, error.message());
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error))
        if (entry.path().string().find(".safetensors") != std::string::npos)
            refuse("{}: holds weights already ({}); choose another folder", folder, entry.path().filename().string());
    std::vector<std::vector<TensorToWrite>> shards(1);
    std::int64_t bytes = 0, total = 0;
    for (const TensorToWrite& tensor : tensors) {
        const std::int64_t size = program::bytes_of(stored_type(tensor, dtype), checked_product(tensor.shape));
        if (bytes > 0 && bytes + size > shard_bytes) {
            shards.emplace_back();
            bytes = 0;
        }
        shards.back().push_back(tensor);
        bytes += size;
        total += size;
    }
    if (shards.size() == 1) {
        write_safetensors(in_folder(folder, "model.safetensors"), tensors, dtype, values);
        return;
    }
    SortedJson map = SortedJson::object();
    for (std::size_t i = 0; i < shards.size(); ++i) {
        const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
        write_safetensors(in_folder(folder, name), shards[i], dtype, values);
        for (const TensorToWrite& tensor : shards[i]) map[tensor.name] = name;
    }
    const SortedJson index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
    write_file(in_folder(folder, "model.safetensors.index.json"), index.dump(2) + "\n");
}

} // namespace moe::weights
