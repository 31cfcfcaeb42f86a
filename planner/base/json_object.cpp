// Checked fields of JSON objects; the text itself is read by json.hpp.
#include "planner/base/json_object.hpp"

#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <cmath>
#include <limits>

namespace moe {
namespace {

using Json = nlohmann::ordered_json;

double checked_number(const Json& value, double low, double high, const JsonObject& at, const std::string& key) {
    if (!value.is_number()) at.refuse_value(key, "must be a number");
    const double number = value.get<double>();
    if (!std::isfinite(number) || number < low || number > high)
        at.refuse_value(key, fmt::format("must be a number from {} to {}", low, high));
    return number;
}

std::int64_t checked_integer(const Json& value, std::int64_t low, std::int64_t high, const JsonObject& at,
                             const std::string& key) {
    const auto refuse_range = [&] {
        at.refuse_value(key, fmt::format("must be a whole number from {} to {}", low, high));
    };
    if (!value.is_number()) refuse_range();
    std::int64_t number = 0;
    if (value.is_number_unsigned()) {
        const auto wide = value.get<std::uint64_t>();
        if (wide > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) refuse_range();
        number = static_cast<std::int64_t>(wide);
    } else if (value.is_number_integer()) {
        number = value.get<std::int64_t>();
    } else {
        const double real = value.get<double>();
        constexpr double exact = 9007199254740992.0; // 2^53: doubles beyond it are not reliably whole
        if (!(std::fabs(real) < exact) || real != std::floor(real)) refuse_range();
        number = static_cast<std::int64_t>(real);
    }
    if (number < low || number > high) refuse_range();
    return number;
}

} // namespace

JsonObject JsonObject::parse(const std::string& text, const std::string& place, const JsonLimits& limits) {
    const auto root = std::make_shared<const Json>(parse_json<Json>(text, place, limits));
    if (!root->is_object()) refuse("{}: must be a JSON object, but is {}", place, shown_json(*root));
    return JsonObject(root, root.get(), place);
}

std::vector<JsonObject> JsonObject::parse_list(const std::string& text, const std::string& place) {
    const auto root = std::make_shared<const Json>(parse_json<Json>(text, place));
    return elements_of(root, *root, place);
}

std::vector<JsonObject> JsonObject::elements_of(const std::shared_ptr<const Json>& root, const Json& list,
                                                const std::string& place) {
    if (!list.is_array()) refuse("{}: must be an array of objects, but is {}", place, shown_json(list));
    std::vector<JsonObject> result;
    for (const Json& element : list) {
        const std::string at = fmt::format("{}: row {}", place, result.size() + 1);
        if (!element.is_object()) refuse("{}: must be a JSON object, but is {}", at, shown_json(element));
        result.push_back(JsonObject(root, &element, at));
    }
    return result;
}

std::vector<std::string> JsonObject::keys() const {
    std::vector<std::string> result;
    for (const auto& [key, value] : node_->items()) result.push_back(key);
    return result;
}

std::string JsonObject::dump() const { return json_text(*node_); }

JsonObject JsonObject::with_string(const std::string& key, const std::string& value) const {
    auto copy = std::make_shared<Json>(*node_);
    (*copy)[key] = value;
    JsonObject changed(copy, copy.get(), place_);
    changed.asked_ = asked_;
    return changed;
}

JsonObject JsonObject::with_field(const std::string& key, const JsonObject& from) const {
    auto copy = std::make_shared<Json>(*node_);
    (*copy)[key] = from.node_->at(key);
    JsonObject changed(copy, copy.get(), place_);
    changed.asked_ = asked_;
    return changed;
}

JsonObject JsonObject::watched() const {
    JsonObject copy = *this;
    copy.asked_ = std::make_shared<std::set<std::string>>();
    return copy;
}

std::vector<std::string> JsonObject::unasked() const {
    std::vector<std::string> result;
    for (const auto& [key, value] : node_->items()) {
        const bool silent = value.is_null() || value == false || value == 0 || value == "" || value.empty();
        if (asked_ != nullptr && !silent && !asked_->contains(place_ + '\n' + key)) result.push_back(key);
    }
    return result;
}

void JsonObject::note(const std::string& key) const {
    if (asked_ != nullptr) asked_->insert(place_ + '\n' + key);
}

const Json* JsonObject::find(const std::string& key) const {
    note(key);
    const auto found = node_->find(key);
    return found == node_->end() || found->is_null() ? nullptr : &*found;
}

const Json& JsonObject::need(const std::string& key) const {
    note(key);
    const auto found = node_->find(key);
    if (found == node_->end()) refuse("{}: field \"{}\" is missing{}", place_, key, did_you_mean(key, keys()));
    if (found->is_null()) refuse("{}: {} = null: must be given a value", place_, shown(key));
    return *found;
}

bool JsonObject::states(const std::string& key) const {
    note(key);
    return node_->contains(key);
}

bool JsonObject::has(const std::string& key) const { return find(key) != nullptr; }

bool JsonObject::is_string(const std::string& key) const {
    const Json* value = find(key);
    return value != nullptr && value->is_string();
}

bool JsonObject::is_array(const std::string& key) const {
    const Json* value = find(key);
    return value != nullptr && value->is_array();
}

bool JsonObject::is_object(const std::string& key) const {
    const Json* value = find(key);
    return value != nullptr && value->is_object();
}

std::int64_t JsonObject::integer(const std::string& key, std::int64_t low, std::int64_t high) const {
    return checked_integer(need(key), low, high, *this, key);
}

std::int64_t JsonObject::integer_or(const std::string& key, std::int64_t fallback, std::int64_t low,
                                    std::int64_t high) const {
    const Json* value = find(key);
    return value == nullptr ? fallback : checked_integer(*value, low, high, *this, key);
}

double JsonObject::number(const std::string& key, double low, double high) const {
    return checked_number(need(key), low, high, *this, key);
}

double JsonObject::number_or(const std::string& key, double fallback, double low, double high) const {
    const Json* value = find(key);
    return value == nullptr ? fallback : checked_number(*value, low, high, *this, key);
}

bool JsonObject::boolean(const std::string& key) const {
    const Json& value = need(key);
    if (!value.is_boolean()) refuse_value(key, "must be true or false");
    return value.get<bool>();
}

bool JsonObject::boolean_or(const std::string& key, bool fallback) const { return has(key) ? boolean(key) : fallback; }

std::string JsonObject::string(const std::string& key) const {
    const Json& value = need(key);
    if (!value.is_string()) refuse_value(key, "must be a string");
    return value.get<std::string>();
}

std::string JsonObject::string_or(const std::string& key, const std::string& fallback) const {
    return has(key) ? string(key) : fallback;
}

std::vector<std::int64_t> JsonObject::integers(const std::string& key, std::int64_t low, std::int64_t high) const {
    const Json& value = need(key);
    if (!value.is_array()) refuse_value(key, "must be an array of whole numbers");
    std::vector<std::int64_t> result;
    for (const Json& element : value) result.push_back(checked_integer(element, low, high, *this, key));
    return result;
}

std::vector<std::int64_t> JsonObject::integers(const std::string& key, std::size_t count, std::int64_t low,
                                               std::int64_t high) const {
    std::vector<std::int64_t> result = integers(key, low, high);
    if (result.size() != count) refuse_value(key, fmt::format("must be {} whole numbers", count));
    return result;
}

std::vector<std::vector<std::int64_t>> JsonObject::integer_rows(const std::string& key, std::size_t count,
                                                                std::int64_t low, std::int64_t high) const {
    const Json& value = need(key);
    if (!value.is_array()) refuse_value(key, fmt::format("must be an array of arrays of {} whole numbers", count));
    std::vector<std::vector<std::int64_t>> result;
    for (const Json& row : value) {
        if (!row.is_array() || row.size() != count)
            refuse_value(key, fmt::format("row {} must be {} whole numbers", result.size() + 1, count));
        std::vector<std::int64_t>& numbers = result.emplace_back();
        for (const Json& element : row) numbers.push_back(checked_integer(element, low, high, *this, key));
    }
    return result;
}

std::vector<double> JsonObject::numbers(const std::string& key, double low, double high) const {
    const Json& value = need(key);
    std::vector<double> result;
    if (!value.is_array()) refuse_value(key, "must be an array of numbers");
    for (const Json& element : value) result.push_back(checked_number(element, low, high, *this, key));
    return result;
}

std::pair<double, double> JsonObject::interval(const std::string& key) const {
    const Json& value = need(key);
    const auto bound = [](const Json& element) {
        if (element.is_number()) return element.get<double>();
        const bool infinite = element.is_object() && element.value("__float__", "") == "Infinity"; // transformers 5
        return infinite ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    };
    const bool pair = value.is_array() && value.size() == 2;
    const std::pair<double, double> ends = pair ? std::pair{bound(value[0]), bound(value[1])} : std::pair{1.0, 0.0};
    if (!(ends.first <= ends.second)) refuse_value(key, "must be two numbers, the lower first");
    return ends;
}

std::vector<bool> JsonObject::booleans(const std::string& key) const {
    const Json& value = need(key);
    std::vector<bool> result;
    if (!value.is_array()) refuse_value(key, "must be an array of true and false");
    for (const Json& element : value) {
        if (!element.is_boolean()) refuse_value(key, "must be an array of true and false");
        result.push_back(element.get<bool>());
    }
    return result;
}

std::vector<std::string> JsonObject::strings(const std::string& key) const {
    const Json& value = need(key);
    std::vector<std::string> result;
    if (!value.is_array()) refuse_value(key, "must be an array of strings");
    for (const Json& element : value) {
        if (!element.is_string()) refuse_value(key, "must be an array of strings");
        result.push_back(element.get<std::string>());
    }
    return result;
}

std::vector<std::vector<double>> JsonObject::number_rows(const std::string& key) const {
    const Json& value = need(key);
    if (!value.is_array()) refuse_value(key, "must be an array of arrays of numbers");
    constexpr double huge = std::numeric_limits<double>::max();
    std::vector<std::vector<double>> result;
    for (const Json& row : value) {
        if (!row.is_array()) refuse_value(key, "must be an array of arrays of numbers");
        std::vector<double>& numbers = result.emplace_back();
        for (const Json& element : row) numbers.push_back(checked_number(element, -huge, huge, *this, key));
    }
    return result;
}

JsonObject JsonObject::object(const std::string& key) const {
    const Json& value = need(key);
    if (!value.is_object()) refuse_value(key, "must be an object");
    JsonObject inner(root_, &value, fmt::format("{}: {}", place_, shown(key)));
    inner.asked_ = asked_;
    return inner;
}

std::vector<JsonObject> JsonObject::objects(const std::string& key) const {
    return elements_of(root_, need(key), fmt::format("{}: {}", place_, key));
}

void JsonObject::only(const std::vector<std::string>& known) const {
    for (const auto& [key, value] : node_->items()) {
        bool found = false;
        for (const std::string& name : known) found = found || name == key;
        if (!found) refuse("{}: unknown field \"{}\"{}", place_, shown(key), did_you_mean(key, known));
    }
}

void JsonObject::refuse_value(const std::string& key, const std::string& why) const {
    const auto found = node_->find(key);
    if (found == node_->end()) refuse("{}: field \"{}\" is missing: {}", place_, key, why);
    refuse("{}: {} = {}: {}", place_, shown(key), shown_json(*found), why);
}

} // namespace moe
