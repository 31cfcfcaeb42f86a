// Reads the members of a stack's JSON objects; costs are numbers or named coefficients.
#pragma once

#include "planner/base/error.hpp"
#include "planner/base/place.hpp"
#include "planner/machine/coefficients.hpp"

#include <nlohmann/json.hpp>

#include <set>
#include <string>
#include <vector>

namespace moe::stack {

// Fields that nobody asked for are refused at the end, so that a misspelt field cannot pass. All throw Error
// (bad_input) that begins with `place`. The object and the coefficients must outlive the reader.
class StackReader {
public:
    using Json = nlohmann::json;

    StackReader(const Json& object, std::string place, const machine::Coefficients& coefficients);

    const Json& at(const std::string& key);
    const Json* find(const std::string& key); // nullptr where it is missing
    std::string text(const std::string& key);
    bool flag(const std::string& key, bool otherwise);
    double number(const std::string& key, double otherwise, double low, double high);
    // A cost is a number, "@name" of a coefficient, or a list of these that is multiplied out.
    double checked(const Json& value, const std::string& key, double low, double high) const;
    // A word, turned into a value by `parse`.
    template <class Parse>
    auto word(const std::string& key, Parse parse) {
        return at_place(place_ + ": \"" + key + "\"", [&] { return parse(text(key)); });
    }
    // A list of words, each turned into a value by `parse`.
    template <class Parse>
    auto list(const std::string& key, Parse parse) {
        const Json& value = at(key);
        if (!value.is_array()) refuse("{}: \"{}\" must be a list, found {}", place_, key, value.type_name());
        std::vector<decltype(parse(std::string()))> result;
        for (const Json& item : value) {
            if (!item.is_string()) refuse("{}: \"{}\" must hold strings, found {}", place_, key, item.type_name());
            result.push_back(at_place(place_ + ": \"" + key + "\"", [&] { return parse(item.get<std::string>()); }));
        }
        return result;
    }
    const std::string& place() const { return place_; }
    const machine::Coefficients& coefficients() const { return coefficients_; }
    const std::set<std::string>& known() const { return known_; } // asked for so far
    void finish() const;

private:
    const Json& object_;
    std::string place_;
    const machine::Coefficients& coefficients_;
    std::set<std::string> known_;
};

// True where a cost holds a number of its own; coefficients carry their source themselves.
bool states_figure(const nlohmann::json& cost);

} // namespace moe::stack
