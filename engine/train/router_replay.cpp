// Files of routers' choices: what is written behind a step, and what a replayed step must find.
#include "engine/train/router_replay.hpp"

#include "engine/weights/safetensors.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>

namespace moe::train {

namespace {

std::string index_of(int layer) { return fmt::format("layers.{}.routed_experts", layer); }
std::string experts_of(int layer) { return fmt::format("layers.{}.experts", layer); }

// Refuses a field of the metadata that is another number than `want`.
void check_number(const weights::Safetensors& file, const std::string& field, std::int64_t want) {
    const auto found = file.metadata().find(field);
    if (found == file.metadata().end())
        refuse("{}: {}: is missing: not a file of --record-routing", file.path(), field);
    if (found->second != fmt::format("{}", want))
        refuse("{}: {}: {} where this run has {}", file.path(), field, found->second, want);
}

// The path of a step's file, which must be there.
std::string present(const std::string& folder, std::int64_t step) {
    std::string path = routing_file(folder, step);
    std::error_code error;
    if (!std::filesystem::exists(path, error))
        refuse("{}: is missing: --replay-routing needs a file for each step, up to the last one of --steps", path);
    return path;
}

void check_header(const weights::Safetensors& file, const RoutedStep& step) {
    const std::string& path = file.path();
    check_number(file, "step", step.step);
    for (const auto& [layer, want] : step.layers) {
        const std::string name = index_of(layer);
        const auto found = file.tensors().find(name);
        if (found == file.tensors().end()) refuse("{}: {}: is missing: the model has that layer", path, name);
        const weights::StoredTensor& tensor = found->second;
        check_number(file, experts_of(layer), want.experts);
        if (tensor.dtype != "I32") refuse("{}: {}: dtype {}: must be I32", path, name, tensor.dtype);
        if (tensor.shape.size() != 3) refuse("{}: {}: must be [samples, seq, top-k]", path, name);
        const std::int64_t wanted[] = {step.samples, step.seq, want.top_k};
        const char* const fields[] = {"samples", "tokens of a sequence", "top-k"};
        for (std::size_t i = 0; i < 3; ++i)
            if (tensor.shape[i] != wanted[i])
                refuse("{}: {}: {} {} where this run has {}", path, name, fields[i], tensor.shape[i], wanted[i]);
    }
    std::vector<std::string> known;
    for (const auto& layer : step.layers) known.push_back(index_of(layer.first));
    for (const auto& tensor : file.tensors())
        if (std::find(known.begin(), known.end(), tensor.first) == known.end())
            refuse("{}: {}: the model has no such layer of experts", path, tensor.first);
}

// The first place of a layer's index whose expert there is not, or which names an expert of its token again.
std::optional<std::size_t> fault(const RoutedLayer& layer) {
    const auto top_k = static_cast<std::size_t>(layer.top_k);
    for (std::size_t at = 0; at < layer.index.size(); ++at) {
        const std::int32_t expert = layer.index[at];
        const auto here = layer.index.begin() + static_cast<std::ptrdiff_t>(at),
                   first = here - static_cast<std::ptrdiff_t>(at % top_k);
        if (expert < 0 || expert >= layer.experts || std::find(first, here, expert) != here) return at;
    }
    return std::nullopt;
}

} // namespace

std::string routing_file(const std::string& folder, std::int64_t step) {
    return (std::filesystem::path(folder) / fmt::format("step-{:08}.safetensors", step)).string();
}

void write_routing(const std::string& folder, const RoutedStep& step) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error || !std::filesystem::is_directory(folder)) fail("cannot make the folder {}: {}", folder, error.message());
    std::map<std::string, std::string> metadata{{"step", fmt::format("{}", step.step)},
                                                {"tokens_crc32c", fmt::format("{}", step.tokens_crc32c)}};
    std::vector<weights::IntegersToWrite> tensors;
    for (const auto& [layer, routed] : step.layers) {
        metadata.emplace(experts_of(layer), fmt::format("{}", routed.experts));
        tensors.push_back({index_of(layer), {step.samples, step.seq, routed.top_k}, routed.index});
    }
    weights::write_integers(routing_file(folder, step.step), tensors, metadata);
}

void check_routing(const std::string& folder, const RoutedStep& step) {
    check_header(weights::Safetensors(present(folder, step.step)), step);
}

void read_routing(const std::string& folder, RoutedStep& step) {
    const std::string path = present(folder, step.step);
    const weights::Safetensors file(path);
    check_header(file, step);
    check_number(file, "tokens_crc32c", step.tokens_crc32c);
    for (auto& [number, layer] : step.layers) {
        const std::string name = index_of(number);
        layer.index.resize(static_cast<std::size_t>(step.samples * step.seq * layer.top_k));
        weights::read_integers(file.tensors().at(name), name, 0, layer.index);
        if (const std::optional<std::size_t> at = fault(layer)) {
            const auto token = static_cast<std::int64_t>(*at) / layer.top_k;
            refuse("{}: {}: sample {}, token {}: expert {} of {} is none, or named twice", path, name, token / step.seq,
                   token % step.seq, layer.index[*at], layer.experts);
        }
    }
}

} // namespace moe::train
