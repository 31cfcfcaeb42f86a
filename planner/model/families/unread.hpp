// Fields of a config that its architecture's reader has no use for, of which some may change what the model computes.
#pragma once

#include "planner/base/json_object.hpp"
#include "planner/model/model.hpp"

#include <string>
#include <vector>

namespace moe::families {

// Of a watched config that has been read: the fields that were not asked for, at the top and in the objects that were,
// less those that have no part in a model's layers and those that say what was read elsewhere. Fields of objects stand
// behind the object's name and a dot.
std::vector<std::string> unread_of(const JsonObject& text, const model::Model& model);

} // namespace moe::families
