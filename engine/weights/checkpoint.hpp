// Checkpoints: every rank's slices of weights and moments in safetensors shards, and one index that says which elements
// of which global tensor lie where, so that the ranks of any other plan find theirs.
//
// A checkpoint is a folder step-NNNNNNNN with rank-NNNNN.safetensors (FP32, one row of elements per parameter and kind
// of state) and index.json. It is written beside its final name, flushed, and renamed: a folder of that name is whole
// unless the disk has lost something since, which the CRC-32C of every tensor and of the index tells. Processes of one
// run write their shards into the same folder beside the final name; the one that holds rank 0 waits for all of them,
// writes the index and renames.
#pragma once

#include "engine/data/position.hpp"
#include "engine/weights/checkpoint_folder.hpp"
#include "engine/weights/parameters.hpp"
#include "engine/weights/safetensors.hpp"

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace moe::weights {

// The largest magnitude of a tensor in a step.
struct Largest {
    std::int64_t step = 0; // from 1
    float value = 0.0f;
};

// The point that a run stands at. `samples`: of the data, taken by all steps so far; the seed keys the order of
// samples, the only randomness behind the initial weights.
struct RunState {
    std::int64_t step = 0, samples = 0;
    std::uint64_t seed = 0;
    std::string model;  // name of the model
    std::string config; // config.json of the model, so that an export needs nothing else
    // Loads by layer, where the plan's load_balancing is global_aux_loss: the load that the next step balances.
    std::map<int, std::vector<float>> router_loads;
    data::DataPosition data; // without datasets: of a run whose data have no position
    // Norms of the gradients of the last steps taken, the oldest first, and steps that were bad: train::BadSteps.
    std::vector<float> norms;
    std::int64_t skipped = 0;
    std::vector<std::string> freeze = {},
                             lr_groups = {}; // the run's rules for weights, as train::WeightRules writes them
    double ema = 0.0;                        // decay of the average of the weights, 0 = there is none
    bool muon = false;                       // the plan's optimizer; else AdamW
    std::string lora = {};                   // the plan's adapters, as plan::Lora is written; empty without any
    std::map<std::string, std::vector<Largest>> largest = {}; // by quantized tensor: train::ScaleHistory
    bool averages() const { return ema > 0.0; }
};

// A set of `repeat` runs of `count` elements of a global tensor, `stride` elements from start to start.
struct Runs {
    std::int64_t first = 0, count = 0, stride = 0, repeat = 1;
};

// The elements of one global tensor [rows, cols] that a rank holds, in the order of its shard.
struct Slice {
    std::string name;
    std::int64_t rows = 0, cols = 1;
    std::vector<Runs> runs;
    std::int64_t elements = 0;
    std::array<std::vector<float>, state_kind_count> values; // empty of kinds that the run has not
    int moments = 2;                                         // see kinds_of()
};

struct RankSlices {
    int rank = 0;
    std::vector<Slice> slices;
};

// A copy of what this process adds to a checkpoint, apart from the run that goes on.
struct Snapshot {
    RunState state;
    std::vector<RankSlices> ranks;
    int world = 1;   // number of ranks of the run
    std::string run; // id that tells the processes of one run from those of an earlier one that was killed
};

// Appends a run to a list, as a repetition of the last where it is one.
void add_run(std::vector<Runs>& runs, std::int64_t first, std::int64_t count);

// Writes this process' part of FOLDER/step-NNNNNNNN and, where it holds rank 0, waits for the others' and completes it;
// a damaged one of that name is replaced. Throws Error (failure), also when a part has not come after `patience`
// seconds.
void write_checkpoint(const std::string& folder, const Snapshot& snapshot, double patience = 600.0);

class StoredCheckpoint {
public:
    // Reads the index, maps the shards, holds the slices against the shapes that they cover, then every tensor against
    // its checksum. Throws Error (bad_input) naming what is missing, senseless or damaged.
    explicit StoredCheckpoint(const std::string& path);

    const std::string& path() const { return path_; }
    const RunState& state() const { return state_; }
    struct Shape {
        std::int64_t rows = 0, cols = 1;
        int moments = 2; // see kinds_of()
    };
    const std::map<std::string, Shape>& shapes() const { return shapes_; }
    // Elements [first, first + out.size()) of a global tensor. Throws Error (bad_input) for a name or a kind that it
    // does not hold.
    void read(const std::string& name, StateKind kind, std::int64_t first, std::span<float> out) const;

private:
    struct Part { // part of one rank
        const Safetensors* file = nullptr;
        std::vector<Runs> runs;
    };
    std::string path_;
    RunState state_;
    std::vector<std::unique_ptr<Safetensors>> files_;
    std::map<std::string, Shape> shapes_;
    std::map<std::string, std::vector<Part>> parts_;
};

// The newest whole checkpoint of a folder; `skipped` gets the reasons of newer ones that are not. Nothing where the
// folder holds none at all; throws Error (bad_input) where none of those that it holds is whole.
std::unique_ptr<StoredCheckpoint> newest_checkpoint(const std::string& folder, std::vector<std::string>& skipped);

} // namespace moe::weights
