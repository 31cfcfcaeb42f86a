// Loading a model by path or profile name.
#include "planner/model/families/load_model.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/profile.hpp"
#include "planner/model/families/config.hpp"
#include "planner/model/families/unread.hpp"

#include <filesystem>

namespace moe::families {
namespace {

model::Model read_model(const std::string& text, const std::string& place, const std::string& fallback_name) {
    const JsonObject json = JsonObject::parse(text, place);
    model::Model model;
    model.name = json.string_or("name", fallback_name);
    read_family(json, model);
    // A plan carries its model under the same name, whatever file the plan is read from.
    model.config_json = json.with_string("name", model.name).dump();
    constexpr double most = 9e15; // most of any count: counts stay exact in doubles and in 64 bits
    if (const double total = static_cast<double>(model::count_parameters(model).total); total < 0.0 || total > most)
        refuse("{}: more than {:.0e} parameters: check hidden_size, num_hidden_layers and the number of experts", place,
               most);
    return model;
}

} // namespace

model::Model model_from_json(const std::string& text, const std::string& place) {
    return read_model(text, place, "model");
}

std::vector<std::string> unread_fields(const model::Model& model) {
    model::Model again;
    const JsonObject text = read_family(JsonObject::parse(model.config_json, model.name), again);
    return unread_of(text, again);
}

model::Model load_model(const std::string& name_or_path) {
    const ProfileFile file = find_profile(name_or_path, "models", "model", "config.json");
    return read_model(read_file(file.path), file.path, file.name);
}

} // namespace moe::families
