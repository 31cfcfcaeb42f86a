// Reads stacks from profiles/stacks and applies what they say of one machine.
#include "planner/stack/stack.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/base/schema.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_choices.hpp"
#include "planner/stack/anchored.hpp"
#include "planner/stack/requirements.hpp"
#include "planner/stack/stack_file.hpp"
#include "planner/stack/stack_reader.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

namespace moe::stack {
namespace {

using Json = nlohmann::json;
using Reader = StackReader;

std::string stacks_folder() { return profiles_folder() + "/stacks"; }

// Multiplies a cost, or every figure inside it, by a further factor.
void multiply(Json& cost, const Json& factor) {
    if (cost.is_object())
        for (auto& item : cost.items()) multiply(item.value(), factor);
    else
        cost = Json::array({cost, factor});
}

// Features behind the stack's name, and the costs of those that it lacks. A stack without the field "features" states
// its costs as they are.
void apply_features(Json& json, const std::vector<std::string>& changes, const std::string& place) {
    const std::string path = stacks_folder() + "/base/features.json";
    if (!json.contains("features")) {
        if (!changes.empty()) refuse("{}: names no features, so that \"{}\" cannot change one", place, changes.front());
        return;
    }
    const Json all = load_json<Json>(path);
    std::set<std::string> has;
    for (const Json& name : json["features"]) has.insert(name.is_string() ? name.get<std::string>() : "");
    for (const std::string& change : changes) {
        const bool drop = change.rfind("no-", 0) == 0;
        const std::string name = drop ? change.substr(3) : change;
        if (!all.contains(name)) refuse("{}: unknown feature \"{}\": see {}", place, name, path);
        if (drop)
            has.erase(name);
        else
            has.insert(name);
    }
    for (const auto& item : all.items()) {
        if (has.erase(item.key()) > 0) continue;
        for (const auto& cost : item.value().at("without").items()) {
            Json& stated = json["costs"][cost.key()]; // a cost that is 1 unless stated is not
            if (stated.is_null()) stated = 1.0;
            multiply(stated, cost.value());
            json["cost_sources"][cost.key()] = item.value().at("source");
        }
    }
    if (!has.empty()) refuse("{}: unknown feature \"{}\": see {}", place, *has.begin(), path);
}

// The differences on some machines, as a JSON merge patch.
struct Variant {
    std::vector<std::string> machines;
    Json set;
};

// "on": [{"hardware": [names], "set": {...}}], taken out of the stack.
std::vector<Variant> take_variants(Json& json, const std::string& place) {
    static const machine::Coefficients none; // lists of names hold no costs
    const auto on = json.find("on");
    if (on == json.end()) return {};
    const Json list = *on;
    json.erase(on);
    if (!list.is_array()) refuse("{}: \"on\" must be a list, found {}", place, list.type_name());
    std::vector<Variant> variants;
    for (const Json& item : list) {
        Reader in(item, place + ": on", none);
        Variant variant{in.list("hardware", [](std::string name) { return name; }), in.at("set")};
        in.finish();
        if (!variant.set.is_object())
            refuse("{}: on.set must be a JSON object, found {}", place, variant.set.type_name());
        variants.push_back(std::move(variant));
    }
    return variants;
}

void apply_variants(Json& json, const std::vector<Variant>& variants, const std::string& machine) {
    for (const Variant& variant : variants)
        if (std::find(variant.machines.begin(), variant.machines.end(), machine) != variant.machines.end())
            json.merge_patch(variant.set);
}

// `calibrate` names a GPU's profile after the datasheet's.
std::string own_name(const machine::Hardware& hardware) {
    return hardware.name.substr(0, hardware.name.rfind("-measured"));
}

// The machine, of those that a stack has figures for, whose figures this one gets, see load_stack().
std::string known_machine(const machine::Hardware& hardware, const std::vector<Variant>& variants) {
    std::set<std::string> known;
    for (const Variant& variant : variants) known.insert(variant.machines.begin(), variant.machines.end());
    if (known.empty() || hardware.name.empty()) return own_name(hardware); // no machine in particular
    if (!hardware.like.empty()) {
        if (known.contains(hardware.like)) return hardware.like;
        refuse("hardware {}: like = \"{}\": no machine that the stack has figures for{}; these are {}", hardware.name,
               shown(hardware.like), did_you_mean(hardware.like, {known.begin(), known.end()}), fmt::join(known, ", "));
    }
    if (hardware.cpu || known.contains(own_name(hardware))) return own_name(hardware);
    const auto computes = [&hardware](machine::Precision precision) {
        return hardware.peak_flops[static_cast<std::size_t>(precision)] > 0.0;
    };
    if (!computes(machine::Precision::mxfp8) && !computes(machine::Precision::nvfp4)) return "h100";
    return hardware.nvlink_domain > 8 ? "gb200-nvl72" : "b200";
}

constexpr int longest_chain = 8; // of bases; more is a cycle

// A stack's file with its bases below it: objects merge field by field, "on" lists follow each other. A cost that a
// file changes needs that file's own entry in cost_sources, since its base speaks of another figure.
Json read_with_bases(const std::string& name, int depth) {
    const std::string path = stacks_folder() + "/" + name + ".json";
    std::error_code unreadable; // such as a name that is too long
    const bool plain = name.find('/') == std::string::npos || (depth > 0 && name.rfind("base/", 0) == 0);
    if (!plain || !std::filesystem::is_regular_file(path, unreadable)) {
        const std::vector<std::string> known = stack_names();
        refuse("unknown stack '{}': known are {}", shown(name),
               known.empty() ? "none" : fmt::format("{}", fmt::join(known, ", ")));
    }
    Json json = load_json<Json>(path);
    if (!json.is_object() || !json.contains("base")) return json;
    if (!json["base"].is_string()) refuse("{}: \"base\" must be a string, found {}", path, json["base"].type_name());
    if (depth >= longest_chain) refuse("{}: more than {} bases follow each other: is it a cycle?", path, longest_chain);
    if (json.contains("costs") && json["costs"].is_object())
        for (const auto& item : json["costs"].items())
            if (states_figure(item.value()) &&
                (!json.contains("cost_sources") || !json["cost_sources"].contains(item.key())))
                refuse("{}: costs.{} has no entry in \"cost_sources\": say where the figure comes from", path,
                       item.key());
    Json whole = at_place(path + ": base", [&] { return read_with_bases(json["base"].get<std::string>(), depth + 1); });
    Json on = whole.contains("on") ? whole["on"] : Json::array();
    if (json.contains("on") && json["on"].is_array()) on.insert(on.end(), json["on"].begin(), json["on"].end());
    whole.erase("published"); // what the base stands for
    json.erase("base");
    whole.merge_patch(json);
    if (!on.empty() && whole["on"].is_array()) whole["on"] = on;
    return whole;
}

std::vector<std::string> words_of(const std::string& name) {
    std::vector<std::string> words;
    for (std::size_t at = 0; at <= name.size();) {
        const std::size_t comma = std::min(name.find(',', at), name.size());
        words.push_back(name.substr(at, comma - at));
        at = comma + 1;
    }
    return words;
}

// The file among the words, which then are those of its base; `name` becomes the one that says both.
std::optional<AnchoredStack> take_anchored(std::vector<std::string>& words, std::string& name) {
    const auto file = std::find_if(words.begin(), words.end(), names_file);
    if (file == words.end()) return std::nullopt;
    const std::string path = std::filesystem::absolute(*file).lexically_normal().string();
    if (path.find(',') != std::string::npos) refuse("stack {}: its path must hold no comma", path);
    AnchoredStack anchored = load_anchored(path);
    words.erase(file);
    if (!words.empty() && words != words_of(anchored.base))
        refuse("stack {}: the file is based on {}: name it alone", name, anchored.base);
    words = words_of(anchored.base);
    name = anchored.base + "," + path;
    return anchored;
}

machine::Coefficients with_values(machine::Coefficients coefficients, const AnchoredStack& anchored,
                                  const std::string& name) {
    for (const auto& [coefficient, value] : anchored.coefficients) {
        const auto found = coefficients.find(coefficient);
        if (found == coefficients.end())
            refuse("stack {}: profiles/coefficients.json has no \"{}\"", name, coefficient);
        found->second.value = value;
    }
    return coefficients;
}

} // namespace

std::vector<std::string> stack_names() {
    std::vector<std::string> names;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(stacks_folder(), ignored))
        if (entry.path().extension() == ".json") names.push_back(entry.path().stem().string());
    std::sort(names.begin(), names.end());
    return names;
}

Stack load_stack(const std::string& name, const machine::Hardware& hardware) {
    return load_stack(name, hardware, machine::load_coefficients());
}

Stack load_stack(const std::string& name, const machine::Hardware& hardware,
                 const machine::Coefficients& coefficients) {
    std::string wanted = name.empty() ? hardware.default_stack : name;
    if (wanted.empty()) refuse("hardware {}: has no default_stack: name one with --stack", hardware.name);
    std::vector<std::string> words = words_of(wanted); // the stack, its changed features, an anchored stack's file
    const std::optional<AnchoredStack> anchored = take_anchored(words, wanted);
    const machine::Coefficients values = anchored ? with_values(coefficients, *anchored, wanted) : coefficients;
    const std::string path = stacks_folder() + "/" + words.front() + ".json";
    Json json = read_with_bases(words.front(), 0);
    const std::vector<Variant> variants = take_variants(json, path);
    if (json.contains("requirements")) refuse_machine(wanted, read_requirements(json["requirements"], path), hardware);
    const std::string machine = known_machine(hardware, variants), own = own_name(hardware);
    apply_variants(json, variants, machine);
    if (own != machine) apply_variants(json, variants, own);
    apply_features(json, {words.begin() + 1, words.end()}, path);
    Stack stack = read_stack(json, path, values);
    if (anchored) stack.anchors = anchored->runs;
    if (stack.name != words.front()) refuse("{}: name = \"{}\": rename the file or the stack", path, shown(stack.name));
    stack.name = wanted;
    leave_out_lacking(stack, hardware);
    if (machine != own) stack.figures_of = machine;
    return stack;
}

} // namespace moe::stack
