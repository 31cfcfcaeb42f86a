// JSON text: what the parser accepts and refuses, beside nlohmann's own, and what is written back.
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/names.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

using namespace moe;
using Json = nlohmann::ordered_json;

namespace {

std::string fault(const std::string& text, const JsonLimits& limits = {}) {
    return fault_of([&] { parse_json<Json>(text, "a.json", limits); });
}

Json parsed(const std::string& text) { return parse_json<Json>(text, "a.json"); }

std::string nested(int depth) {
    return std::string(static_cast<std::size_t>(depth), '[') + std::string(static_cast<std::size_t>(depth), ']');
}

// No field stands twice, which nlohmann's parser lets pass.
bool unique_names(const std::string& text) {
    std::vector<std::set<std::string>> open;
    bool unique = true;
    [[maybe_unused]] const Json whole = Json::parse(text, [&](int, Json::parse_event_t event, Json& value) {
        if (event == Json::parse_event_t::object_start) open.emplace_back();
        if (event == Json::parse_event_t::key) unique = open.back().insert(value.get<std::string>()).second && unique;
        if (event == Json::parse_event_t::object_end) open.pop_back();
        return true;
    });
    return unique;
}

} // namespace

TEST_CASE("json: faults name the place, the reason, the line and the column") {
    CHECK(fault("") == "2: a.json: not valid JSON: the text is empty");
    CHECK(fault("{\"a\": 1,\n \"b\" 2}") ==
          "2: a.json: not valid JSON: ':' was expected, found '2' at line 2, column 6");
    CHECK(fault("[1, 2") ==
          "2: a.json: not valid JSON: ',' or ']' was expected, found the end of the text at line 1, column 6");
    CHECK(fault("{\"a\": 1, \"b\": 2, \"a\": 3}") ==
          "2: a.json: not valid JSON: the field \"a\" stands twice in one object at line 1, column 18");
    CHECK(fault("[1e999]") == "2: a.json: not valid JSON: the number '1e999' is beyond 1.8e308 at line 1, column 2");
    CHECK(fault("[1] 2").find("text behind the end") != std::string::npos);
    CHECK(fault("[\"\xff\"]").find("no UTF-8") != std::string::npos);
    CHECK(fault("[\"\xed\xa0\x80\"]").find("no UTF-8") != std::string::npos);
    CHECK(fault("[\"\xc0\x80\"]").find("no UTF-8") != std::string::npos);
    CHECK(fault("[\"\\ud800\"]").find("surrogate") != std::string::npos);
    CHECK(fault("[\"a\nb\"]").find("control character") != std::string::npos);
    CHECK(fault("[01]").find("begins with 0") != std::string::npos);
    CHECK(fault("[1.]").find("a digit was expected") != std::string::npos);
    CHECK(fault("[+1]").find("a value was expected, found '+1'") != std::string::npos);
    CHECK(fault("[\x1b[31mred]").find('\x1b') == std::string::npos); // no control characters of a file in a message
    CHECK(fault("[" + std::string(100000, 'x') + "]").size() < 120);
}

TEST_CASE("names: text of files is printed short, without what a terminal obeys") {
    CHECK(shown("a\x1b[31mb\x7f\tc") == "a?[31mb??c");
    CHECK(shown("\xc2\x9b"
                "31m \xe2\x80\xae gnp.exe \xff") == "?31m ? gnp.exe ?");
    CHECK(shown("é漢😀") == "é漢😀");
    CHECK(shown(std::string(79, 'x') + "é tail") == std::string(79, 'x') + "...");
    CHECK(shown(std::string(81, '\xbf')).size() <= 83);
}

TEST_CASE("json: depth and size are bounded") {
    CHECK(fault(nested(100)).empty());
    CHECK(fault(nested(101)).find("nested more than 100 deep") != std::string::npos);
    CHECK(fault(std::string(200'000, '[')).find("nested more than 100 deep") != std::string::npos);
    CHECK(fault("[1, 2, 3, 4]", {8, 100}).find("at most 0 MiB") != std::string::npos);
    const Folder folder;
    const std::string path = folder / "big.json";
    write_file(path, "[" + std::string(3 << 20, ' ') + "]");
    CHECK(fault_of([&] {
              load_json<Json>(path, {std::size_t{1} << 20, 100});
          }) == "2: cannot read " + path + ": it holds more than 1 MiB");
    CHECK(load_json<nlohmann::json>(path) == nlohmann::json::array());
}

TEST_CASE("json: numbers keep their kind, and what Python writes is read and written back") {
    CHECK(parsed("18446744073709551615").is_number_unsigned());
    CHECK(parsed("-9223372036854775808").get<std::int64_t>() == INT64_MIN);
    CHECK(parsed("36893488147419103232").get<double>() == 36893488147419103232.0);
    CHECK(parsed("1e-999").get<double>() == 0.0);
    CHECK(parsed("4.0").is_number_float());
    const std::string python = R"({"time_step_limit":[0.0,Infinity],"x":NaN,"y":-Infinity,"z":{},"w":[],"s":"\"é"})";
    CHECK(json_text(parsed(python)) == python);
    CHECK(std::isnan(parsed(python)["x"].get<double>()));
    CHECK(parsed("\"\\u00e9\\ud83d\\ude00\\n\"") == "é😀\n");
    CHECK(parsed("\xEF\xBB\xBF[1]") == Json::array({1}));
    const JsonObject object = JsonObject::parse(python, "a.json");
    CHECK(fault_of([&] { object.number("x", 0.0, 1.0); }) == "2: a.json: x = NaN: must be a number from 0 to 1");
    CHECK(JsonObject::parse(object.dump(), "b.json").dump() == python);
}

TEST_CASE("json: a field that is null is told apart from one that is missing") {
    const JsonObject object = JsonObject::parse(R"({"top_k": null, "rows": [{"a": 1}, 2]})", "a.json");
    CHECK(fault_of([&] { object.integer("top_k", 1, 8); }) == "2: a.json: top_k = null: must be given a value");
    CHECK(fault_of([&] { object.integer("topk", 1, 8); }) ==
          "2: a.json: field \"topk\" is missing: did you mean top_k?");
    CHECK(object.integer_or("top_k", 3, 1, 8) == 3);
    CHECK(fault_of([&] { object.objects("rows"); }) == "2: a.json: rows: row 2: must be a JSON object, but is 2");
}

TEST_CASE("json: the parser and nlohmann's own agree about changed documents") {
    const std::string seed =
        R"({"a": [1, -2.5e3, 0, true, null, "x\u00e9\n"], "b": {"c": {}, "d": [[], [false]]}, "é": 12345678901234567890})";
    std::mt19937 random(7);
    const std::string letters = "{}[]\",:\\ue0123456789.-+tfn \n\xc3\xa9";
    int accepted = 0;
    for (int i = 0; i < 20'000; ++i) {
        std::string text = seed;
        for (unsigned changes = 1 + random() % 3; changes > 0; --changes) {
            const std::size_t at = random() % text.size();
            const char letter = letters[random() % letters.size()];
            if (random() % 3 == 0)
                text.erase(at, 1);
            else if (random() % 2 == 0)
                text[at] = letter;
            else
                text.insert(at, 1, letter);
        }
        const Json other = Json::parse(text, nullptr, false);
        CAPTURE(text);
        if (other.is_discarded() || !unique_names(text)) {
            CHECK(fault(text).starts_with("2: a.json: not valid JSON: "));
        } else {
            REQUIRE(fault(text).empty());
            CHECK(parsed(text) == other);
            ++accepted;
        }
    }
    CHECK(accepted > 1000);
}
