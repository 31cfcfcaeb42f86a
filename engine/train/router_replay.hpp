// Router replay: the experts that routers chose in a step, by global token, as a file that a run of any plan reads.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moe::train {

struct RoutedLayer {
    int experts = 0, top_k = 0;
    std::vector<std::int32_t> index; // [samples, seq, top_k], in the router's order
};

// The choices of a step's global batch. Samples are in the order in which the step takes them.
struct RoutedStep {
    std::int64_t step = 0; // number, from 1
    std::int64_t samples = 0, seq = 0;
    std::uint32_t tokens_crc32c = 0;   // of the tokens, [samples, seq + 1] int32
    std::map<int, RoutedLayer> layers; // by number in the model; MTP layers come behind the model's
};

// FOLDER/step-N.safetensors: an I32 tensor layers.L.routed_experts [samples, seq, top_k] for each layer, and in the
// metadata step, tokens_crc32c and layers.L.experts.
std::string routing_file(const std::string& folder, std::int64_t step);

// Writes the file, atomically, in a folder that is made where there is none. Throws Error (failure).
void write_routing(const std::string& folder, const RoutedStep& step);

// Throws Error (bad_input), naming file and field, where the file of step.step is missing or holds other layers,
// numbers of experts, top-k or tokens than `step`. Reads its header alone; tokens_crc32c and index play no part.
void check_routing(const std::string& folder, const RoutedStep& step);

// Fills in every layer's index. Throws Error (bad_input) likewise, and where the tokens were others, or a token has an
// expert that there is not, or one twice.
void read_routing(const std::string& folder, RoutedStep& step);

} // namespace moe::train
