// index.json of a checkpoint: its fields within their ranges, and its slices as a partition of every tensor.
#pragma once

#include "engine/weights/checkpoint.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moe::weights {

struct IndexedSlice {
    std::size_t shard = 0;
    std::vector<Runs> runs;
    std::int64_t elements = 0; // of all runs
    std::array<std::uint32_t, state_kind_count> checksums{};
};
struct IndexedTensor {
    std::int64_t rows = 0, cols = 1;
    std::vector<IndexedSlice> slices;
    int moments = 2; // see kinds_of()
};
struct CheckpointIndex {
    RunState state;
    std::vector<std::string> shards; // file names
    std::map<std::string, IndexedTensor> tensors;
};

// Reads and checks an index: its checksum, every field's type and range, every run within its tensor, and as many
// elements in the slices as the tensor has. Throws Error (bad_input) naming the file and the field.
CheckpointIndex read_index(const std::string& path);
// Throws Error (bad_input) unless the slices hold every element once. The work is one look at each run, so the shards
// must have been found to hold as many elements as the index says.
void check_partition(const std::string& path, const std::string& name, const IndexedTensor& tensor);
// Text of an index file, of the parts that ranks wrote: {name: {shape, runs, crc32c}}, by rank.
std::string index_text(const RunState& state, const std::vector<std::string>& parts);
// Text of the part of one rank.
std::string part_text(const RankSlices& rank);

std::string shard_name(int rank); // "rank-00003.safetensors"
std::string stored_name(const std::string& name, StateKind kind);

} // namespace moe::weights
