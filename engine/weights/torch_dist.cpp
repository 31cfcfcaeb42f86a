// Reads the list of tensors, checks that their parts make them up, and reads across parts.
#include "engine/weights/torch_dist.hpp"

#include "engine/weights/pickle.hpp"
#include "engine/weights/torch_archive.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>

namespace moe::weights {

namespace {

namespace fs = std::filesystem;
using Value = Pickle::Value;
using Kind = Pickle::Kind;
using Sizes = std::vector<std::int64_t>;

constexpr std::size_t longest_metadata = std::size_t{1} << 30; // bytes; a part takes some hundred

// What the metadata of torch and Megatron-Core names.
std::set<std::string> names_of_metadata() {
    std::set<std::string> names = {"torch.Size",
                                   "torch.serialization._get_layout",
                                   "torch.distributed.checkpoint.filesystem._StorageInfo",
                                   "collections.OrderedDict",
                                   "collections.defaultdict",
                                   "pathlib.PosixPath",
                                   "pathlib.PurePosixPath",
                                   "pathlib._local.PosixPath",
                                   "builtins.list",
                                   "builtins.dict",
                                   "builtins.set",
                                   "torch.strided",
                                   "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
                                   "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan"};
    for (const char* name : {"Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
                             "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING"})
        names.insert(std::string("torch.distributed.checkpoint.metadata.") + name);
    // Plans of the ranks, which Megatron-Core keeps beside the list.
    for (const char* name : {"SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData"})
        names.insert(std::string("torch.distributed.checkpoint.planner.") + name);
    for (const char* name : {"float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8",
                             "int8", "int16", "int32", "int64", "bool"})
        names.insert(std::string("torch.") + name);
    return names;
}

// torch.Size, or a tuple of numbers.
std::optional<Sizes> sizes_of(const Value* value) {
    if (value == nullptr) return std::nullopt;
    if (is_object(*value, "torch.Size") && value->items.size() == 1) value = value->items[0];
    if (value->kind != Kind::list || value->items.size() > 16) return std::nullopt;
    Sizes sizes;
    for (const Value* item : value->items) {
        if (item->kind != Kind::integer || item->integer < 0) return std::nullopt;
        sizes.push_back(item->integer);
    }
    return sizes;
}

std::int64_t product(const Sizes& sizes) {
    return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

std::string shown_sizes(const Sizes& sizes) { return fmt::format("[{}]", fmt::join(sizes, ", ")); }

Sizes without_ones(Sizes sizes) {
    sizes.erase(std::remove(sizes.begin(), sizes.end(), 1), sizes.end());
    return sizes;
}

class MetadataReader {
public:
    MetadataReader(const std::string& folder, std::map<std::string, DistTensor>& tensors)
        : path_((fs::path(folder) / ".metadata").string()), tensors_(tensors) {
        const Pickle pickle(read_file(path_, longest_metadata), path_, names_of_metadata());
        const Value& root = pickle.root();
        if (!is_object(root, "torch.distributed.checkpoint.metadata.Metadata")) fault("is no metadata of a checkpoint");
        const Value *list = field_of(root, "state_dict_metadata"), *places = field_of(root, "storage_data");
        if (list == nullptr || list->kind != Kind::dict) fault("state_dict_metadata is missing");
        if (places == nullptr || places->kind != Kind::dict) fault("storage_data is missing");
        for (std::size_t i = 0; i + 1 < list->pairs.size(); i += 2) read_tensor(*list->pairs[i], *list->pairs[i + 1]);
        for (std::size_t i = 0; i + 1 < places->pairs.size(); i += 2)
            read_place(*places->pairs[i], *places->pairs[i + 1]);
        for (auto& [name, tensor] : tensors_) finish(name, tensor);
    }

private:
    [[noreturn]] void fault(const std::string& what) const { refuse("{}: {}", path_, what); }
    [[noreturn]] void fault(const std::string& tensor, const std::string& what) const {
        refuse("{}: {}: {}", path_, shown(tensor), what);
    }

    void read_tensor(const Value& name, const Value& value) {
        if (name.kind != Kind::text) fault("state_dict_metadata: a name is no text");
        if (!is_object(value, "torch.distributed.checkpoint.metadata.TensorStorageMetadata")) return; // other data
        DistTensor tensor;
        const auto shape = sizes_of(field_of(value, "size"));
        const Value* chunks = field_of(value, "chunks");
        if (!shape || chunks == nullptr || chunks->kind != Kind::list) fault(name.text, "has no size or no chunks");
        tensor.shape = *shape;
        std::int64_t elements = 1;
        for (const std::int64_t size : tensor.shape) {
            if (size > 0 && elements > std::numeric_limits<std::int64_t>::max() / 8 / size)
                fault(name.text, "has the shape " + shown_sizes(tensor.shape));
            elements *= size;
        }
        for (const Value* chunk : chunks->items) {
            const auto offsets = sizes_of(field_of(*chunk, "offsets")), sizes = sizes_of(field_of(*chunk, "sizes"));
            if (!offsets || !sizes || offsets->size() != tensor.shape.size() || sizes->size() != tensor.shape.size())
                fault(name.text, "a chunk has other axes than the tensor");
            for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis)
                if ((*sizes)[axis] > tensor.shape[axis] || (*offsets)[axis] > tensor.shape[axis] - (*sizes)[axis])
                    fault(name.text, fmt::format("a chunk of {} at {} lies outside of {}", shown_sizes(*sizes),
                                                 shown_sizes(*offsets), shown_sizes(tensor.shape)));
            tensor.parts.push_back({*offsets, *sizes, "", 0, 0, {}});
        }
        std::sort(tensor.parts.begin(), tensor.parts.end(),
                  [](const auto& a, const auto& b) { return a.offsets < b.offsets; });
        if (!tensors_.emplace(name.text, std::move(tensor)).second) fault(name.text, "is listed twice");
    }

    void read_place(const Value& index, const Value& info) {
        const Value *name = field_of(index, "fqn"), *file = field_of(info, "relative_path"),
                    *offset = field_of(info, "offset"), *length = field_of(info, "length");
        if (name == nullptr || name->kind != Kind::text) fault("storage_data: a key has no name");
        const auto tensor = tensors_.find(name->text);
        if (tensor == tensors_.end()) return; // other data
        if (file == nullptr || file->kind != Kind::text || offset == nullptr || offset->kind != Kind::integer ||
            offset->integer < 0 || length == nullptr || length->kind != Kind::integer || length->integer < 0)
            fault(name->text, "has a place without file, offset or length");
        if (file->text.find('/') != std::string::npos || file->text == ".." || file->text.empty())
            fault(name->text, "lies in " + shown(file->text) + ", which is not in the folder");
        if (const Value* how = field_of(info, "transform_descriptors"); how != nullptr && !how->items.empty())
            fault(name->text, "is stored compressed, by transform_descriptors");
        const auto at = sizes_of(field_of(index, "offset"));
        std::vector<DistTensor::Part>& parts = tensor->second.parts;
        const Sizes wanted = at ? *at : Sizes(tensor->second.shape.size(), 0);
        const auto part =
            std::lower_bound(parts.begin(), parts.end(), wanted,
                             [](const DistTensor::Part& one, const Sizes& offsets) { return one.offsets < offsets; });
        if (part == parts.end() || part->offsets != wanted)
            fault(name->text, "has a place for a chunk at " + shown_sizes(wanted) + ", which is not listed");
        part->file = file->text;
        part->offset = static_cast<std::size_t>(offset->integer);
        part->length = static_cast<std::size_t>(length->integer);
    }

    void finish(const std::string& name, const DistTensor& tensor) const {
        for (const DistTensor::Part& part : tensor.parts)
            if (part.file.empty()) fault(name, "the chunk at " + shown_sizes(part.offsets) + " has no place in a file");
    }

    std::string path_;
    std::map<std::string, DistTensor>& tensors_;
};

bool overlap(const DistTensor::Part& a, const DistTensor::Part& b) {
    for (std::size_t axis = 0; axis < a.offsets.size(); ++axis)
        if (a.offsets[axis] >= b.offsets[axis] + b.sizes[axis] || b.offsets[axis] >= a.offsets[axis] + a.sizes[axis])
            return false;
    return true;
}

} // namespace

std::int64_t DistTensor::elements() const { return product(shape); }

TorchDist::TorchDist(const std::string& folder) : folder_(folder) {
    const fs::path config = fs::path(folder) / "metadata.json";
    std::error_code none;
    if (fs::is_regular_file(config, none)) {
        const auto json = load_json<nlohmann::json>(config.string());
        const std::string backend = json.is_object() ? json.value("sharded_backend", nlohmann::json()).dump() : "";
        if (backend != "\"torch_dist\"")
            refuse("{}: sharded_backend = {}: only torch_dist is read", config.string(), shown(backend));
    }
    if (!fs::is_regular_file(fs::path(folder) / ".metadata", none))
        refuse("{}: holds no .metadata: give the folder of one iteration of a torch_dist checkpoint", folder);
    MetadataReader(folder, tensors_);
}

// Parts that do not overlap and have all elements together leave no hole.
void TorchDist::check_parts(const std::string& name, const DistTensor& tensor) const {
    std::int64_t covered = 0;
    for (std::size_t i = 0; i < tensor.parts.size(); ++i) {
        const DistTensor::Part& part = tensor.parts[i];
        covered += product(part.sizes);
        for (std::size_t j = i + 1; j < tensor.parts.size(); ++j) {
            const DistTensor::Part& next = tensor.parts[j];
            if (!part.offsets.empty() && next.offsets[0] >= part.offsets[0] + part.sizes[0]) break;
            if (product(part.sizes) > 0 && overlap(part, next))
                refuse("{}: {}: the chunks at {} and {} overlap", folder_, shown(name), shown_sizes(part.offsets),
                       shown_sizes(next.offsets));
        }
        if (covered > tensor.elements()) break;
    }
    if (covered != tensor.elements())
        refuse("{}: {}: chunks hold {} of its {} elements: there are holes", folder_, shown(name), covered,
               tensor.elements());
}

const DistTensor& TorchDist::open(const std::string& name) {
    DistTensor& tensor = tensors_.at(name);
    check_parts(name, tensor);
    for (DistTensor::Part& part : tensor.parts) {
        if (part.tensor.file != nullptr) continue;
        std::unique_ptr<engine::SourceFile>& file = files_[part.file];
        if (!file) file = std::make_unique<engine::SourceFile>((fs::path(folder_) / part.file).string());
        const std::string place = fmt::format("{}: {}", file->path(), shown(name));
        part.tensor = torch_tensor(*file, part.offset, part.length, place);
        if (without_ones(part.tensor.shape) != without_ones(part.sizes))
            refuse("{}: has shape {}, the metadata says {}", place, shown_sizes(part.tensor.shape),
                   shown_sizes(part.sizes));
    }
    return tensor;
}

void TorchDist::read_floats(const std::string& name, std::int64_t first, std::span<float> out) const {
    const DistTensor& tensor = tensors_.at(name);
    const std::size_t axes = tensor.shape.size();
    std::size_t hint = 0; // neighbours in a tensor lie in neighbouring parts
    for (std::size_t done = 0; done < out.size();) {
        std::int64_t rest = first + static_cast<std::int64_t>(done);
        Sizes at(axes, 0);
        for (std::size_t axis = axes; axis-- > 0;) {
            at[axis] = rest % tensor.shape[axis];
            rest /= tensor.shape[axis];
        }
        const auto holds = [&](const DistTensor::Part& part) {
            for (std::size_t axis = 0; axis < axes; ++axis)
                if (at[axis] < part.offsets[axis] || at[axis] >= part.offsets[axis] + part.sizes[axis]) return false;
            return true;
        };
        for (std::size_t tried = 0; !holds(tensor.parts[hint]); ++tried) {
            hint = (hint + 1) % tensor.parts.size();
            if (tried > tensor.parts.size()) fail("{}: {}: a part is missing", folder_, shown(name));
        }
        const DistTensor::Part& part = tensor.parts[hint];
        std::int64_t local = 0, run = axes == 0 ? 1 : part.sizes[axes - 1] - (at[axes - 1] - part.offsets[axes - 1]);
        for (std::size_t axis = 0; axis < axes; ++axis)
            local = local * part.sizes[axis] + at[axis] - part.offsets[axis];
        // Where the part has whole rows, the rows that follow lie behind.
        for (std::size_t axis = axes; axis-- > 1 && part.sizes[axis] == tensor.shape[axis];) {
            const std::int64_t inner =
                product(Sizes(part.sizes.begin() + static_cast<std::ptrdiff_t>(axis), part.sizes.end()));
            run += (part.sizes[axis - 1] - (at[axis - 1] - part.offsets[axis - 1]) - 1) * inner;
        }
        run = std::min(run, static_cast<std::int64_t>(out.size() - done));
        weights::read_floats(part.tensor, name, local, out.subspan(done, static_cast<std::size_t>(run)));
        done += static_cast<std::size_t>(run);
    }
}

} // namespace moe::weights
