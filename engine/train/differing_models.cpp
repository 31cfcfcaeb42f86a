// In which fields a stored model differs from a plan's.
#include "engine/train/huggingface.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"

#include <algorithm>

namespace moe::train {

std::vector<std::string> differing_numbers(const model::Model& plan, const model::Model& stored) {
    std::vector<std::string> list;
    const auto compare = [&](const char* field, auto ours, auto theirs) {
        if (ours != theirs)
            list.push_back(fmt::format("{} ({} in the plan, {} in the checkpoint)", field, ours, theirs));
    };
    compare("rms_norm_eps", plan.norm_eps, stored.norm_eps);
    compare("rope_theta", plan.rope_theta, stored.rope_theta);
    compare("rope_scaling", plan.rope_scaling.type, stored.rope_scaling.type);
    compare("rope_scaling.factor", plan.rope_scaling.factor, stored.rope_scaling.factor);
    compare("tie_word_embeddings", plan.tied_embeddings, stored.tied_embeddings);
    compare("num_hidden_layers", plan.layers.size(), stored.layers.size());
    compare("num_nextn_predict_layers", plan.mtp.size(), stored.mtp.size());
    return list;
}

std::vector<std::string> differing_fields(const model::Model& plan, const model::Model& stored,
                                          const std::string& place) {
    if (stored.architecture != plan.architecture)
        refuse("{}: architectures = {}, but the plan's model is {}", place, stored.architecture, plan.architecture);
    std::vector<std::string> list = differing_numbers(plan, stored);
    for (std::size_t layer = 0; layer < std::min(plan.layers.size(), stored.layers.size()); ++layer) {
        const int index = static_cast<int>(layer);
        if (plan.kind_of(index) == stored.kind_of(index)) continue;
        list.push_back(fmt::format("attention, MLP or router of layer {}", layer));
        break;
    }
    return list;
}

} // namespace moe::train
