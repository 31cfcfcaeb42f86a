// Reads the members of a stack's JSON objects; costs are numbers or named coefficients.
#include "planner/stack/stack_reader.hpp"

#include <algorithm>
#include <utility>

namespace moe::stack {

using Json = nlohmann::json;

namespace {

double resolve(const Json& value, const std::string& place, const machine::Coefficients& coefficients) {
    if (value.is_number()) return value.get<double>();
    if (value.is_array() && !value.empty()) {
        double product = 1.0;
        for (const Json& factor : value) product *= resolve(factor, place, coefficients);
        return product;
    }
    if (!value.is_string() || value.get<std::string>().rfind('@', 0) != 0)
        refuse("{}: must be a number, the \"@name\" of a coefficient, or a list of these, found {}", place,
               value.type_name());
    const std::string name = value.get<std::string>().substr(1);
    const auto found = coefficients.find(name);
    if (found == coefficients.end()) refuse("{}: profiles/coefficients.json has no \"{}\"", place, name);
    return found->second.value;
}

} // namespace

StackReader::StackReader(const Json& object, std::string place, const machine::Coefficients& coefficients)
    : object_(object), place_(std::move(place)), coefficients_(coefficients) {
    if (!object_.is_object()) refuse("{}: must be a JSON object, found {}", place_, object_.type_name());
}

const Json& StackReader::at(const std::string& key) {
    const Json* found = find(key);
    if (found == nullptr) refuse("{}: field \"{}\" is missing: add it", place_, key);
    return *found;
}

const Json* StackReader::find(const std::string& key) {
    known_.insert(key);
    const auto it = object_.find(key);
    return it == object_.end() ? nullptr : &*it;
}

std::string StackReader::text(const std::string& key) {
    const Json& value = at(key);
    if (!value.is_string()) refuse("{}: \"{}\" must be a string, found {}", place_, key, value.type_name());
    return value.get<std::string>();
}

bool StackReader::flag(const std::string& key, bool otherwise) {
    const Json* value = find(key);
    if (value == nullptr) return otherwise;
    if (!value->is_boolean()) refuse("{}: \"{}\" must be true or false, found {}", place_, key, value->type_name());
    return value->get<bool>();
}

double StackReader::number(const std::string& key, double otherwise, double low, double high) {
    const Json* value = find(key);
    return value == nullptr ? otherwise : checked(*value, key, low, high);
}

double StackReader::checked(const Json& value, const std::string& key, double low, double high) const {
    const double number = resolve(value, place_ + ": \"" + key + "\"", coefficients_);
    if (!(number >= low && number <= high))
        refuse("{}: \"{}\" is {}, outside {} to {}", place_, key, number, low, high);
    return number;
}

void StackReader::finish() const {
    for (const auto& item : object_.items())
        if (known_.count(item.key()) == 0) refuse("{}: unknown field \"{}\"", place_, item.key());
}

bool states_figure(const nlohmann::json& cost) {
    if (cost.is_object() || cost.is_array()) return std::any_of(cost.begin(), cost.end(), states_figure);
    return cost.is_number();
}

} // namespace moe::stack
