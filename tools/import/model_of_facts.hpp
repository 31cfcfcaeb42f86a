// A model from what a launch file says of it: a profile that agrees, or a config.json made of the facts.
#pragma once

#include "planner/model/model.hpp"
#include "tools/import/reader_table.hpp"

#include <map>
#include <string>
#include <vector>

namespace moe::tools {

using Facts = std::map<std::string, std::string>;

struct FactDifference {
    std::string fact, file, model; // words of the file and of the model for the fact
};
// Where the model is another one than the facts say; facts that change neither time nor memory are left out.
std::vector<FactDifference> differing_facts(const Facts& facts, const model::Model& model, const ReaderTable& reader);

// Fills in what follows from other facts where no setting says it: heads of keys, widths; which layers have experts,
// unless the file says it in a way that is `unclear`.
void complete_facts(Facts& facts, bool unclear_layers = false);

// The profile with all of these facts, of several the one that is `named`, else the first; where there is none, a model
// "imported" of the architecture that has most of them and of the likely ones. Throws Error (bad_input) naming the fact
// that is missing; `place` names the file.
model::Model model_of_facts(const Facts& facts, const Facts& likely, const std::string& named,
                            const ReaderTable& reader, const std::string& place);

// The named model with as many layers for multi-token prediction as the file trains.
model::Model with_mtp_of(const Facts& facts, const model::Model& model, const std::string& place);

} // namespace moe::tools
