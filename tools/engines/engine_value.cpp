// Placeholders are words of the plan, or made here from several of them.
#include "tools/engines/engine_value.hpp"

#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/plan_words.hpp"

#include <algorithm>
#include <array>
#include <charconv>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

// Modules that `partial` means to Megatron: those of static shapes that the model has.
std::vector<std::string> partial_modules(const plan::Plan& plan) {
    std::vector<std::string> modules{"attn"};
    const auto on = [&plan](const char* word) { return stack::plan_word(plan, word); };
    if (on("model.dense_layers") != "0" && !plan.ep_overlap) modules.emplace_back("mlp");
    if (on("model.experts") == "0") return modules;
    modules.emplace_back("moe_router");
    const bool drops = plan.router.expert_capacity > 0.0 && !plan.router.pad_to_capacity;
    if (on("derived.dispatcher") != "alltoall" || !drops) modules.emplace_back("moe_preprocess");
    return modules;
}

// Ranks of the first expert group that lie in one NVLink domain with its first rank.
int expert_ranks_per_domain(const plan::Plan& plan) {
    const plan::Group group{plan::Domain::expert, plan::axis::tensor | plan::axis::expert};
    const int domain = std::max(1, plan.hardware->nvlink_domain_used);
    int count = 0;
    for (const int rank : plan::Mesh(plan).members(group, 0)) count += rank / domain == 0 ? 1 : 0;
    return count;
}

// The modules of a set that the engine has, in its own words and in the table's order.
std::vector<std::string> translated(const EngineEntry& entry, const std::string& set) {
    std::vector<std::string> modules;
    for (const auto& [name, word] : entry.words) {
        const std::string padded = "+" + set + "+";
        if (!word.empty() && padded.find("+" + name + "+") != std::string::npos) modules.push_back(word);
    }
    return modules;
}

struct Numbers {
    std::string first, last; // first and last text of "FIRST+LAST"
};
Numbers both(const std::string& word) {
    const std::size_t plus = word.find('+');
    if (plus == std::string::npos) return {"0", "0"};
    return {word.substr(0, plus), word.substr(plus + 1)};
}

constexpr std::array made{
    "$value",       "$modules",     "$partial",          "$first",          "$last", "$ep_ranks_per_domain",
    "$local_batch", "$peak_tflops", "$torchtitan_parts", "$automodel_parts"};

// Names of what stands before, in and behind the layers of a model.
struct ModuleNames {
    const char *embedding, *layer;
    const char* mtp; // "" = the engine trains none
    std::array<const char*, 2> head;
    const char* everywhere; // module that every part has, "" = none
};
constexpr ModuleNames torchtitan_names{"tok_embeddings", "layers.", "", {"norm", "output"}, ""};
constexpr ModuleNames automodel_names{
    "model.embed_tokens", "model.layers.", "mtp", {"model.norm", "lm_head"}, "model.rotary_emb"};

// The modules of every stage, a list of lists of names.
Json module_parts(const plan::Plan& plan, const ModuleNames& names) {
    Json parts = Json::array();
    for (const plan::Stage& stage : plan::stages(plan)) {
        Json part = Json::array();
        if (stage.embedding) part.push_back(names.embedding);
        for (int layer = 0; layer < stage.layers; ++layer)
            part.push_back(fmt::format("{}{}", names.layer, stage.first_layer + layer));
        if (stage.loss)
            for (const char* name : names.head) part.push_back(name);
        if (stage.mtp > 0 && *names.mtp != '\0') part.push_back(names.mtp);
        if (*names.everywhere != '\0') part.push_back(names.everywhere);
        parts.push_back(part);
    }
    return parts;
}

// The peak rate in the precision of the linear layers, TFLOP/s.
double peak_tflops(const plan::Plan& plan) {
    return plan.hardware->peak_flops[static_cast<std::size_t>(plan.computed_in(plan.precision))] / 1e12;
}

std::string word_of(const EngineEntry& entry, const plan::Plan& plan, const std::string& text) {
    if (text == "$value") return stack::plan_word(plan, entry.field);
    if (text == "$first") return both(stack::plan_word(plan, entry.field)).first;
    if (text == "$last") return both(stack::plan_word(plan, entry.field)).last;
    if (text == "$local_batch") return fmt::format("{}", plan.gbs / plan.dp);
    if (text == "$peak_tflops") return fmt::format("{}", peak_tflops(plan));
    if (text == "$ep_ranks_per_domain") return fmt::format("{}", expert_ranks_per_domain(plan));
    return stack::plan_word(plan, text.substr(1));
}

bool is_modules(const std::string& text) { return text == "$modules" || text == "$partial"; }

std::vector<std::string> modules_of(const EngineEntry& entry, const plan::Plan& plan, const std::string& text) {
    return text == "$partial" ? partial_modules(plan) : translated(entry, stack::plan_word(plan, entry.field));
}

// "[0,0,0,1,1]" as "([0]*3+[1]*2)", which is how Megatron-LM reads long lists as well.
std::string in_runs(const Json& list) {
    std::string text;
    for (std::size_t at = 0; at < list.size();) {
        std::size_t end = at;
        while (end < list.size() && list[end] == list[at]) ++end;
        text += fmt::format("{}[{}]*{}", at > 0 ? "+" : "", list[at].dump(), end - at);
        at = end;
    }
    return fmt::format("({})", text);
}

} // namespace

bool known_placeholder(const std::string& text) {
    return std::find(made.begin(), made.end(), text) != made.end() || stack::find_plan_word(text.substr(1)) != nullptr;
}

std::string text_of_json(const Json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

Json literal(const std::string& word) {
    if (word.starts_with("[")) try {
            return parse_json<Json>(word, "list");
        } catch (const Error&) {
            return word; // text that begins like a list
        }
    const char *begin = word.data(), *end = begin + word.size();
    std::int64_t whole = 0;
    if (const auto [last, error] = std::from_chars(begin, end, whole); error == std::errc{} && last == end)
        return whole;
    double number = 0.0;
    const bool digits = !word.empty() && word.find_first_not_of("0123456789.e+-") == std::string::npos;
    if (const auto [last, error] = std::from_chars(begin, end, number); digits && error == std::errc{} && last == end)
        return number;
    return word;
}

Json engine_value(const EngineEntry& entry, const plan::Plan& plan, const Json& value) {
    if (value.is_array()) {
        Json list = Json::array();
        for (const Json& item : value) list.push_back(engine_value(entry, plan, item));
        return list;
    }
    if (!value.is_string()) return value;
    const std::string text = value.get<std::string>();
    if (!text.starts_with("$")) return value;
    if (is_modules(text)) return modules_of(entry, plan, text);
    if (text == "$torchtitan_parts") return module_parts(plan, torchtitan_names);
    if (text == "$automodel_parts") return module_parts(plan, automodel_names);
    return literal(word_of(entry, plan, text));
}

std::vector<std::string> engine_words(const EngineEntry& entry, const plan::Plan& plan, const std::string& value) {
    if (is_modules(value)) return modules_of(entry, plan, value);
    // "$value,0": a placeholder at the start of a longer word.
    const std::size_t comma = value.find(',');
    if (!value.starts_with("$")) return {value};
    if (comma != std::string::npos) return {word_of(entry, plan, value.substr(0, comma)) + value.substr(comma)};
    const std::string word = word_of(entry, plan, value);
    return {word.starts_with("[") ? in_runs(parse_json<Json>(word, entry.field)) : word};
}

} // namespace moe::tools
