// Finds the adapters of weights by name, and adds them up.
#include "engine/train/merge_adapters.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace moe::train {

namespace {

struct AdapterNames {
    std::string a, b;
};

using Shapes = std::map<std::string, Trainer::Shape>;

// Matrices that are one product share A: it bears the product's name, in the folder of theirs.
AdapterNames adapter_of(const std::string& weight, const Shapes& shapes) {
    const std::size_t end = weight.rfind(".weight");
    if (end == std::string::npos) return {};
    const std::string stem = weight.substr(0, end), folder = stem.substr(0, stem.rfind('.') + 1);
    const std::string b = stem + ".lora_B.weight";
    if (shapes.count(b) == 0) return {};
    for (const std::string& module : {stem, folder + "linear_qkv", folder + "linear_fc1"})
        if (const std::string a = module + ".lora_A.weight"; shapes.count(a) > 0) return {a, b};
    return {};
}

} // namespace

bool is_adapter(const std::string& parameter) {
    return parameter.ends_with(".lora_A.weight") || parameter.ends_with(".lora_B.weight");
}

WeightReader with_adapters_merged(const plan::Lora& lora, Shapes& shapes, const WeightReader& read) {
    if (!lora.on()) return read;
    const Shapes all = std::exchange(shapes, {});
    std::copy_if(all.begin(), all.end(), std::inserter(shapes, shapes.end()),
                 [](const auto& parameter) { return !is_adapter(parameter.first); });
    return [lora, all, read](const std::string& name) {
        std::vector<float> weight = read(name);
        const AdapterNames names = adapter_of(name, all);
        if (names.a.empty()) return weight;
        const std::vector<float> a = read(names.a), b = read(names.b);
        const auto rank = static_cast<std::size_t>(lora.rank), cols = static_cast<std::size_t>(all.at(name).cols);
        std::vector<double> row(cols);
        for (std::size_t r = 0; r < weight.size() / cols; ++r) {
            std::fill(row.begin(), row.end(), 0.0);
            for (std::size_t i = 0; i < rank; ++i) {
                const double factor = lora.scale() * static_cast<double>(b[r * rank + i]);
                for (std::size_t c = 0; c < cols; ++c) row[c] += factor * static_cast<double>(a[i * cols + c]);
            }
            for (std::size_t c = 0; c < cols; ++c)
                weight[r * cols + c] = static_cast<float>(static_cast<double>(weight[r * cols + c]) + row[c]);
        }
        return weight;
    };
}

} // namespace moe::train
