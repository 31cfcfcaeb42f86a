// Comparison of a checkpoint's run with the one that resumes it, field by field.
#include "engine/train/resume.hpp"

#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/model/same.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

namespace moe::train {

namespace {

using Json = nlohmann::ordered_json;

// Fields that Hugging Face's configs carry beside the model's computation.
const std::set<std::string_view>& silent_fields() {
    static const std::set<std::string_view> names{
        "name",         "_name_or_path",     "architectures", "auto_map",    "bos_token_id",         "dtype",
        "eos_token_id", "initializer_range", "pad_token_id",  "torch_dtype", "transformers_version", "use_cache"};
    return names;
}

using Fields = std::map<std::string, Json>; // leaves by their dotted names

// Null counts as absent.
void flatten(const Json& json, const std::string& name, Fields& fields) {
    if (json.is_null()) return;
    if (!json.is_object()) {
        fields[name] = json;
        return;
    }
    for (const auto& [key, value] : json.items())
        if (silent_fields().count(key) == 0)
            flatten(value, name.empty() ? key : fmt::format("{}.{}", name, key), fields);
}

// One of the two configs, with its fields.
struct Config {
    Config(const std::string& text, const std::string& place) : json(parse_json<Json>(text, place, long_json)) {
        flatten(json, "", fields);
    }
    const Json* find(const std::string& name) const {
        const auto found = fields.find(name);
        return found == fields.end() ? nullptr : &found->second;
    }
    std::string value(const std::string& name) const {
        const Json* found = find(name);
        return found == nullptr ? "absent" : json_text(*found);
    }

    Json json;
    Fields fields;
};

// A field that one config states and the other leaves to its default does not differ where the model stays the same
// when both state it.
bool states_default(const Config& lacking, const std::string& name, const Json& value) {
    Json stating = lacking.json;
    try {
        Json* at = &stating;
        for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
            end = name.find('.', begin);
            Json& inner = (*at)[name.substr(begin, end - begin)];
            if (inner.is_null() && end != std::string::npos) inner = Json::object();
            at = &inner;
        }
        *at = value;
        return model::same_computation(families::model_from_json(json_text(lacking.json), "config"),
                                       families::model_from_json(json_text(stating), "config"));
    } catch (const Error&) {
        return false; // A config that cannot be read says nothing about its defaults.
    }
}

bool same_field(const Config& was, const Config& is, const std::string& name) {
    const Json *before = was.find(name), *now = is.find(name);
    if (before != nullptr && now != nullptr) return *before == *now; // 10000 is 10000.0
    return before == nullptr ? states_default(was, name, *now) : states_default(is, name, *before);
}

std::string text_of(const data::DataPosition& data) {
    std::string text;
    for (const data::DatasetPosition& d : data.datasets)
        text += fmt::format("{}{} {} ({}, {}, mark {:08x})", text.empty() ? "" : ", ", d.weight, shown(d.prefix),
                            counted(d.tokens, "token"), counted(d.documents, "document"), d.mark);
    return text;
}

bool same_blend(const data::DataPosition& a, const data::DataPosition& b) {
    return std::equal(a.datasets.begin(), a.datasets.end(), b.datasets.begin(), b.datasets.end(),
                      [](const data::DatasetPosition& x, const data::DatasetPosition& y) {
                          return x.same_tokens(y) && !(x.weight < y.weight) && !(y.weight < x.weight);
                      });
}

class Comparison {
public:
    Comparison(const std::string& path, const std::vector<std::string>& allowed) : path_(path), allowed_(allowed) {}

    void differs(const std::string& field, const std::string& was, const std::string& is) {
        const std::string last = field.substr(field.rfind('.') + 1);
        const bool meant = std::any_of(allowed_.begin(), allowed_.end(),
                                       [&](const std::string& name) { return name == field || name == last; });
        if (!meant)
            refuse("{}: {} was {}, this run has {}: add --allow-change {} if that is meant", path_, field, was, is,
                   field);
        say(fmt::format("{}: {} was {}, now {}", path_, field, was, is));
    }
    void say(const std::string& line) { said_.push_back(line); }
    std::vector<std::string> said() && { return std::move(said_); }

private:
    const std::string& path_;
    const std::vector<std::string>& allowed_;
    std::vector<std::string> said_;
};

const char* on_off(bool shuffled) { return shuffled ? "on" : "off"; }

} // namespace

std::vector<std::string> check_resume(const std::string& path, const weights::RunState& stored, const ResumedRun& now,
                                      const std::vector<std::string>& allowed) {
    Comparison compare(path, allowed);
    const Config was(stored.config, path), is(now.config, "plan");
    std::set<std::string> names;
    for (const Config* config : {&was, &is})
        for (const auto& [name, value] : config->fields) names.insert(name);
    for (const std::string& name : names)
        if (!same_field(was, is, name)) compare.differs(name, shown(was.value(name)), shown(is.value(name)));
    if (stored.seed != now.seed) compare.differs("seed", std::to_string(stored.seed), std::to_string(now.seed));
    const auto texts = [](const std::vector<std::string>& list) {
        return list.empty() ? std::string("none") : shown(fmt::format("{}", fmt::join(list, " ")));
    };
    const auto decay = [](double ema) { return ema > 0.0 ? fmt::format("{}", ema) : std::string("none"); };
    if (stored.ema < now.ema || now.ema < stored.ema) compare.differs("ema", decay(stored.ema), decay(now.ema));
    const auto optimizer = [](bool muon) { return muon ? "muon" : "adamw"; };
    if (stored.muon != now.muon) {
        compare.differs("optimizer", optimizer(stored.muon), optimizer(now.muon));
        compare.say(fmt::format("{}: the moments of the matrices of layers begin at zero", path));
    }
    if (now.delayed && stored.largest.empty())
        compare.say(fmt::format("{}: keeps no history of FP8 scales: they begin at 1", path));
    const auto adapters = [](const std::string& lora) { return lora.empty() ? std::string("none") : shown(lora); };
    if (stored.lora != now.lora) compare.differs("lora", adapters(stored.lora), adapters(now.lora));
    if (stored.freeze != now.freeze) compare.differs("freeze", texts(stored.freeze), texts(now.freeze));
    if (stored.lr_groups != now.lr_groups) compare.differs("lr_group", texts(stored.lr_groups), texts(now.lr_groups));
    const data::DataPosition &before = stored.data, &data = now.data;
    if (before.datasets.empty()) {
        if (stored.samples > 0)
            compare.say(fmt::format("{}: keeps no position in its data: going on with sample {} of {} tokens", path,
                                    stored.samples, data.seq));
        return std::move(compare).said();
    }
    if (before.shuffled != data.shuffled) compare.differs("shuffle", on_off(before.shuffled), on_off(data.shuffled));
    if (!same_blend(before, data)) compare.differs("data", text_of(before), text_of(data));
    if (before.seq != data.seq || before.global_batch != data.global_batch)
        compare.say(fmt::format("{}: a step was {} samples of {} tokens, now {} of {}; the data go on behind the last "
                                "token taken",
                                path, before.global_batch, before.seq, data.global_batch, data.seq));
    if (!same_order(stored, now))
        compare.say(fmt::format("{}: the order of samples has changed: every dataset begins its next pass", path));
    return std::move(compare).said();
}

bool same_order(const weights::RunState& stored, const ResumedRun& now) {
    if (stored.data.shuffled != now.data.shuffled) return false;
    return !now.data.shuffled || stored.seed == now.seed;
}

} // namespace moe::train
