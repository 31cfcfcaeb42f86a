// Weights in the safetensors format: checked reading, one file or shards, and atomic writing.
#pragma once

#include "engine/base/source_file.hpp"
#include "planner/program/tensor.hpp"

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace moe::weights {

// A tensor as a file holds it: row-major, little endian, at any alignment.
struct StoredTensor {
    std::string dtype; // type as the file spells it: "BF16", "F32", "F16", ...
    std::vector<std::int64_t> shape;
    std::int64_t elements = 0;
    const engine::SourceFile* file = nullptr;
    std::size_t offset = 0; // bytes from the file's start to the tensor
};

// Elements [first, first + out.size()) as FP32, exactly: F32, BF16 and F16 fit in it. Throws Error (bad_input) naming
// `name` for any other type.
void read_floats(const StoredTensor& tensor, const std::string& name, std::int64_t first, std::span<float> out);

// Elements [first, first + out.size()) of an I32 tensor. Throws Error (bad_input) naming `name` for any other type.
void read_integers(const StoredTensor& tensor, const std::string& name, std::int64_t first,
                   std::span<std::int32_t> out);

// One file: u64 length of the header, that many bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, data.
// Offsets count from the end of the header; the tensors fill the data area without gaps or overlaps.
// Source: the format's specification, https://huggingface.co/docs/safetensors.
class Safetensors {
public:
    static constexpr std::uint64_t longest_header = 100'000'000; // most bytes of a header, as in the format's readers

    // Opens the file and checks its header; throws Error (bad_input) that names file, tensor and the numbers that
    // disagree.
    explicit Safetensors(const std::string& path);

    const std::string& path() const { return file_.path(); }
    const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
    // Texts by name of the header's __metadata__; what is no text there is left out.
    const std::map<std::string, std::string>& metadata() const { return metadata_; }

private:
    engine::SourceFile file_;
    std::map<std::string, std::string> metadata_;
    std::map<std::string, StoredTensor> tensors_;
};

// The weights of a Hugging Face folder: model.safetensors, or the shards that model.safetensors.index.json lists.
class StoredWeights {
public:
    // Throws Error (bad_input) when the folder holds neither, a shard is missing, or index and shards disagree.
    explicit StoredWeights(const std::string& folder);

    const std::string& folder() const { return folder_; }
    const StoredTensor* find(const std::string& name) const; // null when there is none
    std::vector<std::string> names() const;

private:
    void open_shards(const std::string& index_path);

    std::string folder_;
    std::vector<std::unique_ptr<Safetensors>> files_;
    std::map<std::string, const StoredTensor*> tensors_;
};

struct TensorToWrite {
    std::string name;
    std::vector<std::int64_t> shape;
    bool exact = false; // F32 in a file of any type
};
// The FP32 values of a tensor, row-major, asked for once each and in the order of the list.
using TensorValues = std::function<std::vector<float>(const TensorToWrite&)>;

// Writes one file, atomically, in F32 or rounded to BF16. Throws Error (failure) when writing fails.
void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors, program::Dtype dtype,
                       const TensorValues& values);
// Whole numbers to write, row-major.
struct IntegersToWrite {
    std::string name;
    std::vector<std::int64_t> shape;
    std::span<const std::int32_t> values;
};
// Writes one file of I32 tensors, atomically. Throws Error (failure) when writing fails.
void write_integers(const std::string& path, const std::vector<IntegersToWrite>& tensors,
                    const std::map<std::string, std::string>& metadata);
// Writes model.safetensors, or, past `shard_bytes`, shards in the order of the list with their index last, so that an
// interrupted export is never taken for a whole one. Refuses a folder that holds weights already.
void write_weights(const std::string& folder, const std::vector<TensorToWrite>& tensors, program::Dtype dtype,
                   std::int64_t shard_bytes, const TensorValues& values);

} // namespace moe::weights
