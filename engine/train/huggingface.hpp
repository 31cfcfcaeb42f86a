// The bridge to Hugging Face folders: a checkpoint's weights into the ranks of any plan, and back.
#pragma once

#include "engine/train/trainer.hpp"

#include <string>
#include <vector>

namespace moe::train {

// The parts of a checkpoint that loading found beside the weights it needed.
struct LoadReport {
    std::int64_t loaded = 0;             // number of the model's parameters
    std::vector<std::string> unused;     // tensors of the checkpoint that no parameter takes
    std::vector<std::string> difference; // fields in which the checkpoint's config.json differs from the plan's model
    std::int64_t grown_from = 0, grown_to = 0; // tokens of both vocabularies where the plan's is larger, else from 0
};

// Fills every parameter of the trainer from HF_DIR (model.safetensors or shards in F32, BF16 or F16), each rank's
// slices straight from the memory map; rows of vocabulary padding stay zero. Experts may lie in one tensor per matrix
// ("experts.3.gate_proj.weight", Mixtral: "experts.3.w1.weight") or fused by layer ("experts.gate_up_proj" [E, 2f, h],
// "experts.down_proj" [E, h, f]), as transformers 4 and 5 name them; GPT-OSS's in its own layout (not in MXFP4).
// Embedding and head may have fewer rows than the plan's model: those of new tokens are the mean of the others.
// Nothing is changed before all are found. Throws Error (bad_input) naming the tensor that is missing or has another
// shape, and for a checkpoint of another architecture.
LoadReport load_weights(Trainer& trainer, const std::string& folder);
// Numbers of the whole model in which a stored one differs from the plan's.
std::vector<std::string> differing_numbers(const model::Model& plan, const model::Model& stored);
// Fields in which a stored model differs from the plan's in what is computed, layers among them. Throws Error
// (bad_input) naming `place` for another architecture.
std::vector<std::string> differing_fields(const model::Model& plan, const model::Model& stored,
                                          const std::string& place);
// One line about a larger vocabulary, unused tensors and differing fields, empty when there is nothing to say.
std::string describe(const LoadReport& report);

struct ExportOptions {
    program::Dtype dtype =
        program::Dtype::f32; // F32 keeps masters bit for bit; BF16 rounds them, but for selection biases
    std::int64_t shard_bytes = 5'000'000'000; // largest bytes of a file that holds more than one tensor
    bool average = false; // the average of the weights in place of them, of a checkpoint that has one
};
// Writes the master weights, adapters merged into them, and config.json in the layout that both transformers 4 and 5
// load (experts one by one; GPT-OSS's as its own class has them; MTP with its copies of embedding and head). Throws
// Error (bad_input) when the folder holds weights already, Error (failure) when writing fails.
void export_weights(const Trainer& trainer, const std::string& folder, const ExportOptions& options = {});
// Exports the weights of a checkpoint, without ranks.
void export_weights(const weights::StoredCheckpoint& checkpoint, const std::string& folder,
                    const ExportOptions& options = {});

} // namespace moe::train
