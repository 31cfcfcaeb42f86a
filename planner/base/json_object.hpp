// Typed, checked reading of a JSON object: every fault names the place, the field, its value and what is allowed.
#pragma once

#include "planner/base/json.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace moe {

class JsonObject {
public:
    // Throws Error (bad_input) as parse_json() of json.hpp does, and for what is not an object.
    static JsonObject parse(const std::string& text, const std::string& place, const JsonLimits& limits = {});
    // The same of an array of objects; the place of each is "PLACE: row N".
    static std::vector<JsonObject> parse_list(const std::string& text, const std::string& place);

    const std::string& place() const { return place_; }
    std::vector<std::string> keys() const;
    std::string dump() const; // compact text, keys in their order
    // Copies with that field set, to a word or to what another object has under the same name, which must state it.
    JsonObject with_string(const std::string& key, const std::string& value) const;
    JsonObject with_field(const std::string& key, const JsonObject& from) const;

    // A copy that notes which of its keys are asked for, as do the copies and the objects within that are made of it.
    JsonObject watched() const;
    // Keys of a watched object that nobody has asked for and that say something: more than null, false, 0 or nothing.
    std::vector<std::string> unasked() const;

    bool has(const std::string& key) const;    // present and not null
    bool states(const std::string& key) const; // present, be it null
    bool is_string(const std::string& key) const;
    bool is_array(const std::string& key) const;
    bool is_object(const std::string& key) const;

    // Required fields refuse when the key is missing, or null, which they tell apart; the _or forms then give the
    // fallback. All of them refuse a wrong type and a value outside [low, high].
    std::int64_t integer(const std::string& key, std::int64_t low, std::int64_t high) const;
    std::int64_t integer_or(const std::string& key, std::int64_t fallback, std::int64_t low, std::int64_t high) const;
    double number(const std::string& key, double low, double high) const;
    double number_or(const std::string& key, double fallback, double low, double high) const;
    bool boolean(const std::string& key) const;
    bool boolean_or(const std::string& key, bool fallback) const;
    std::string string(const std::string& key) const;
    std::string string_or(const std::string& key, const std::string& fallback) const;
    std::vector<std::int64_t> integers(const std::string& key, std::int64_t low, std::int64_t high) const;
    std::vector<double> numbers(const std::string& key, double low, double high) const;
    std::vector<bool> booleans(const std::string& key) const;
    std::vector<std::string> strings(const std::string& key) const;
    // Exactly `count` numbers; and an array of such arrays.
    std::vector<std::int64_t> integers(const std::string& key, std::size_t count, std::int64_t low,
                                       std::int64_t high) const;
    std::vector<std::vector<std::int64_t>> integer_rows(const std::string& key, std::size_t count, std::int64_t low,
                                                        std::int64_t high) const;
    std::vector<std::vector<double>> number_rows(const std::string& key) const; // array of arrays of finite numbers
    // Two numbers, the lower first; an infinite one as Python's json writes it, or as {"__float__": "Infinity"}.
    std::pair<double, double> interval(const std::string& key) const;
    JsonObject object(const std::string& key) const;
    std::vector<JsonObject> objects(const std::string& key) const; // an array of objects

    // Refuses the first key that is not in `known`, with the nearest known one.
    void only(const std::vector<std::string>& known) const;
    // Throws Error (bad_input) "PLACE: KEY = VALUE: why".
    [[noreturn]] void refuse_value(const std::string& key, const std::string& why) const;

private:
    JsonObject(std::shared_ptr<const nlohmann::ordered_json> root, const nlohmann::ordered_json* node,
               std::string place)
        : root_(std::move(root)), node_(node), place_(std::move(place)) {}
    static std::vector<JsonObject> elements_of(const std::shared_ptr<const nlohmann::ordered_json>& root,
                                               const nlohmann::ordered_json& list, const std::string& place);
    void note(const std::string& key) const;
    const nlohmann::ordered_json* find(const std::string& key) const; // nullptr when missing or null
    const nlohmann::ordered_json& need(const std::string& key) const;

    std::shared_ptr<const nlohmann::ordered_json> root_; // keeps node_ alive
    const nlohmann::ordered_json* node_;
    std::string place_;
    std::shared_ptr<std::set<std::string>> asked_; // keys by place; nullptr: not watched
};

} // namespace moe
