// Comparison of a checkpoint's run with the one that resumes it, field by field.
#include "engine/train/resume.hpp"

#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"

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

// Leaves by their dotted names; null counts as absent.
void flatten(const Json& json, const std::string& name, std::map<std::string, std::string>& fields) {
    if (json.is_null()) return;
    if (!json.is_object()) {
        fields[name] = json_text(json);
        return;
    }
    for (const auto& [key, value] : json.items())
        if (silent_fields().count(key) == 0)
            flatten(value, name.empty() ? key : fmt::format("{}.{}", name, key), fields);
}

std::map<std::string, std::string> fields_of(const std::string& config, const std::string& place) {
    std::map<std::string, std::string> fields;
    flatten(parse_json<Json>(config, place, long_json), "", fields);
    return fields;
}

std::string value_of(const std::map<std::string, std::string>& fields, const std::string& name) {
    const auto found = fields.find(name);
    return found == fields.end() ? "absent" : found->second; // whole: lists may differ at their ends
}

std::string text_of(const data::DataPosition& data) {
    std::string text;
    for (const data::DatasetPosition& d : data.datasets)
        text += fmt::format("{}{} {} ({} tokens, {} documents, mark {:08x})", text.empty() ? "" : ", ", d.weight,
                            shown(d.prefix), d.tokens, d.documents, d.mark);
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
    const std::map<std::string, std::string> was = fields_of(stored.config, path), is = fields_of(now.config, "plan");
    std::set<std::string> names;
    for (const auto& [name, value] : was) names.insert(name);
    for (const auto& [name, value] : is) names.insert(name);
    for (const std::string& name : names)
        if (value_of(was, name) != value_of(is, name))
            compare.differs(name, shown(value_of(was, name)), shown(value_of(is, name)));
    if (stored.seed != now.seed) compare.differs("seed", std::to_string(stored.seed), std::to_string(now.seed));
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
