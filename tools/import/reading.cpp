// Fields one after another, each by trying its possible values: what a value would write is compared with the file.
#include "tools/import/reading.hpp"

#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/plan_words.hpp"
#include "planner/stack/rules.hpp"
#include "tools/import/lists.hpp"
#include "tools/import/readers/bash_test.hpp"
#include "tools/import/stage_settings.hpp"

#include <algorithm>
#include <charconv>
#include <limits>
#include <set>

namespace moe::tools {
namespace {

constexpr int settled = 8, hint = 1; // weights of a setting that disagrees; hint: a variable, or a weak one
constexpr int reading_passes = 4;

std::int64_t whole(const std::string& text) {
    std::int64_t number = 0;
    const auto [last, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc{} || last != text.data() + text.size() || number < 1) refuse("no whole number: {}", text);
    return number;
}

// Degrees that follow from the others, as far as they divide.
void settle_mesh(plan::Plan& plan) {
    const auto share = [&plan](std::int64_t others) {
        return others > 0 && plan.gpus % others == 0 ? static_cast<int>(plan.gpus / others) : 1;
    };
    plan.dp = share(std::int64_t{plan.tp} * plan.cp * plan.pp);
    plan.edp = share(std::int64_t{plan.etp} * plan.ep * plan.pp);
    if (plan.schedule == plan::ScheduleKind::one_f_one_b || plan.schedule == plan::ScheduleKind::interleaved)
        plan.schedule = plan.vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
}

// Sets the field with all that follows from it. Throws Error (bad_input) for what it cannot be.
void set_word(plan::Plan& plan, const std::string& field, const std::string& value) {
    if (field == "seq") {
        plan.seq = whole(value);
    } else if (field == "gbs") {
        plan.gbs = whole(value);
    } else if (field == "capacity" || field == "expert_capacity" || field == "aux_loss" || field == "z_loss" ||
               field == "input_jitter" || field == "indexer_loss" || field == "bias_update") {
        plan::set_field(plan, field, value == "null" || value == "0.0" ? "none" : value);
    } else {
        plan::set_field(plan, field, value);
    }
    if (field == "layout" && !plan.layout.empty()) {
        const int stages = plan::layout_stage_count(plan);
        if (stages % plan.pp == 0) plan.vpp = stages / plan.pp;
    }
    settle_mesh(plan);
}

std::string word_of(const plan::Plan& plan, const std::string& field) { return stack::plan_word(plan, field); }

bool release_less(const std::string& a, const std::string& b) { return stack::compare_versions(a, b) < 0; }

} // namespace

std::vector<std::string> fields_of(const EngineTable& table) {
    std::vector<std::string> settable = plan::field_names(), order;
    settable.insert(settable.end(), {"seq", "gbs"});
    for (const EngineEntry& entry : table.entries) {
        if (contains(settable, entry.field)) add_once(order, entry.field);
        for (const auto& [field, test] : entry.tests.items())
            if (contains(settable, field)) add_once(order, field);
    }
    // What follows from others is not read; what no setting says stays as it is.
    for (const char* follows :
         {"dp", "routing", "lengths", "expert_precision", "fp8_wgrad", "memory_efficient_permutation", "fsdp_replicas"})
        order.erase(std::remove(order.begin(), order.end(), follows), order.end());
    return order;
}

Reading::Reading(const EngineTable& table, const ReaderTable& reader, const SettingsFile& file, std::string release)
    : table_(table), reader_(reader), file_(file), release_(std::move(release)) {
    std::set<std::string, decltype(&release_less)> bounds(&release_less);
    bounds.insert("0");
    for (const EngineEntry& entry : table_.entries) {
        Line line{&entry, phrases_of(entry, reader_.part, true), {}};
        for (const auto& [field, test] : entry.tests.items()) line.fields.push_back(field);
        lines_.push_back(std::move(line));
        for (const std::string& bound : {entry.from, entry.until})
            if (!bound.empty()) bounds.insert(bound);
    }
    releases_.push_back(release_);
    releases_.insert(releases_.end(), bounds.rbegin(), bounds.rend());
    for (const Setting& setting : file_.settings) given_[setting.name] = setting.values;
    for (auto& [name, values] : given_) drop_strays(name, values);
    for (const auto& [name, value] : file_.environment) given_["$" + name] = {value};
    for (const auto& asked : reader_.asked_with)
        if (!file_.has(asked.second))
            std::erase_if(given_, [&](const auto& one) { return matches_pattern(one.first, asked.first); });
    for (const Frequency& frequency : reader_.frequencies) {
        const auto found = given_.find(frequency.setting), layers = given_.find(frequency.layers);
        if (found == given_.end() || layers == given_.end() || found->second.size() != 1 || layers->second.size() != 1)
            continue;
        try {
            const std::int64_t every = whole(found->second[0]), count = whole(layers->second[0]);
            if (count > 1 << 14) continue;
            found->second = {marks_of(static_cast<int>(std::min<std::int64_t>(every, 1 << 14)), static_cast<int>(count),
                                      frequency.marks)};
        } catch (const Error&) {
            continue; // The value is a list already.
        }
    }
}

// A variable that nothing sets, behind the values that a flag takes, is most often empty: `--bf16 $EXTRA`.
void Reading::drop_strays(const std::string& name, std::vector<std::string>& values) const {
    std::size_t most = 0;
    bool known = false;
    for (const Line& line : lines_)
        for (const Phrase& phrase : line.phrases) {
            if (phrase.name != name) continue;
            const bool set = phrase.words.size() == 1 && phrase.words[0] == "$modules";
            known = true;
            most = std::max(most, set ? values.size() : phrase.words.size());
        }
    const auto stray = [](const std::string& value) {
        return value.size() > 3 && value[0] == unknown_mark && value.compare(1, 2, "${") == 0 &&
               value.find(unknown_mark, 1) == value.size() - 1;
    };
    while (known && values.size() > most && stray(values.back())) values.pop_back();
}

const std::vector<std::string>* Reading::given(const std::string& name) const {
    const auto found = given_.find(name);
    return found == given_.end() ? nullptr : &found->second;
}

std::optional<std::vector<std::string>> Reading::default_of(const std::string& name, const plan::Plan& plan) const {
    const auto found = reader_.defaults.find(name);
    if (found == reader_.defaults.end()) return std::nullopt;
    std::vector<std::string> values;
    for (const std::string& value : found->second)
        values.push_back(value.rfind('$', 0) == 0 ? word_of(plan, value.substr(1)) : value);
    return values;
}

std::optional<std::vector<std::string>> Reading::value(const std::string& name, const plan::Plan& plan) const {
    if (const auto* values = given(name)) return *values;
    return default_of(name, plan);
}

std::string Reading::said_by(const std::string& field) const {
    for (const Line& line : lines_) {
        if (line.entry->field != field) continue;
        for (const Phrase& phrase : line.phrases)
            if (contains(phrase.words, "$value") && given(phrase.name) != nullptr) return phrase.name;
    }
    return {};
}

bool Reading::known(const std::string& name) const {
    return std::any_of(lines_.begin(), lines_.end(), [&name](const Line& line) {
        return std::any_of(line.phrases.begin(), line.phrases.end(),
                           [&name](const Phrase& phrase) { return phrase.name == name; });
    });
}

bool Reading::without_effect(const std::string& name, const plan::Plan& plan) const {
    if (reader_.is_harmless(name)) return true;
    for (const Beside& beside : reader_.beside)
        if (contains(beside.settings, name) && beside.when.holds(plan)) return true;
    return false;
}

int Reading::disagreement(const plan::Plan& plan, const std::string& field, const std::vector<const Line*>& lines,
                          const std::vector<std::string>& names, const std::string& release) const {
    std::map<std::string, std::vector<std::string>> says;
    // implied: settings that no field says; own: those that this one says; plain: those that are its value
    std::vector<std::string> implied, own, plain;
    for (const Line* line : lines)
        if (line->entry->field == field)
            for (const Phrase& phrase : line->phrases) {
                add_once(own, phrase.name);
                if (phrase.words == std::vector<std::string>{"$value"}) add_once(plain, phrase.name);
            }
    for (const Line* line : lines) {
        if (!line->entry->in_force(release) || !line->entry->when.holds(plan)) continue;
        for (const Phrase& phrase : line->phrases)
            if (contains(names, phrase.name)) {
                says[phrase.name] = said(*line->entry, plan, phrase);
                if (line->entry->field.empty()) implied.push_back(phrase.name);
            }
    }
    int sum = 0;
    const std::vector<std::string> off{"null"}, no{"false"};
    for (const std::string& name : names) {
        if (reader_.is_harmless(name)) continue;
        const std::vector<std::string>* here = given(name);
        const auto would = says.find(name);
        const auto usual = default_of(name, plan);
        bool agree = true;
        if (here != nullptr && std::any_of(here->begin(), here->end(), has_unknown)) {
            agree = true; // They are told apart: no value is better than another.
        } else if (here != nullptr && would != says.end()) {
            agree = same_values(*here, would->second, reader_);
        } else if (here != nullptr) {
            agree = usual ? same_values(*here, *usual, reader_)
                          : same_values(*here, off, reader_) || same_values(*here, no, reader_);
        } else if (would != says.end()) {
            agree = usual ? same_values(would->second, *usual, reader_)
                          : same_values(would->second, off, reader_) || same_values(would->second, no, reader_);
        }
        const bool weak = reader_.is_weak(name);
        if (!agree)
            sum += name[0] == '$' || weak || contains(implied, name) ? hint
                   : here != nullptr && contains(plain, name)        ? 8 * settled
                   : contains(own, name)                             ? 2 * settled
                                                                     : settled;
    }
    return sum;
}

// The releases whose words the file may be in: this one, and those that have a setting of the file which it lacks.
std::vector<std::string> Reading::speaking(const std::vector<std::string>& names,
                                           const std::vector<const Line*>& lines) const {
    const auto writes = [&lines](const std::string& name, const std::string& release) {
        return std::any_of(lines.begin(), lines.end(), [&](const Line* line) {
            return line->entry->in_force(release) &&
                   std::any_of(line->phrases.begin(), line->phrases.end(),
                               [&name](const Phrase& phrase) { return phrase.name == name; });
        });
    };
    std::vector<std::string> list{release_};
    for (const std::string& name : names) {
        if (given(name) == nullptr || name[0] == '$' || writes(name, release_)) continue;
        for (const std::string& release : releases_)
            if (writes(name, release)) add_once(list, release);
    }
    return list;
}

// Whether another value of the field agrees better with the file, which is then set.
bool Reading::improve(plan::Plan& plan, const std::string& field) {
    std::vector<std::string> names;
    // These fields follow from others unless a setting says them.
    if (field == "schedule" && std::none_of(lines_.begin(), lines_.end(), [](const Line& line) {
            return line.entry->field == "schedule" && !line.phrases.empty();
        }))
        return false;
    for (const Line& line : lines_)
        if (line.entry->field == field || contains(line.fields, field) || contains(line.fields, "derived." + field))
            for (const Phrase& phrase : line.phrases) add_once(names, phrase.name);
    std::vector<const Line*> lines;
    for (const Line& line : lines_)
        if (std::any_of(line.phrases.begin(), line.phrases.end(),
                        [&names](const Phrase& phrase) { return contains(names, phrase.name); }))
            lines.push_back(&line);
    const std::vector<std::string> releases = speaking(names, lines);
    const auto least = [&](const plan::Plan& tried) {
        std::pair<int, std::string> best{std::numeric_limits<int>::max(), release_};
        for (const std::string& release : releases) {
            try {
                const int sum = disagreement(tried, field, lines, names, release);
                if (sum < best.first) best = {sum, release};
            } catch (const Error&) {
                continue; // The words of such a plan cannot be said.
            }
            if (best.first == 0) break;
        }
        return best;
    };
    const std::string before = word_of(plan, field);
    auto best = least(plan);
    plan::Plan chosen = plan;
    for (const Choice& choice : candidates(plan, field)) {
        if (best.first == 0) break;
        plan::Plan tried = plan;
        try {
            for (const auto& [name, value] : choice) set_word(tried, name, value);
        } catch (const Error&) {
            continue; // The fault is told at the end: the plan does not say what the file does.
        }
        if (const auto sum = least(tried); sum.first < best.first) {
            best = sum;
            chosen = std::move(tried);
        }
    }
    if (best.second == release_)
        dialects_.erase(field);
    else
        dialects_[field] = best.second;
    plan = std::move(chosen);
    return word_of(plan, field) != before;
}

void Reading::set_fields(plan::Plan& plan, const std::vector<std::string>& fixed) {
    settle_mesh(plan);
    const std::vector<std::string> fields = fields_of(table_);
    for (int pass = 0; pass < reading_passes; ++pass) {
        bool changed = false;
        for (const std::string& field : fields)
            if (!contains(fixed, field)) changed = improve(plan, field) || changed;
        if (!changed) break;
    }
    // Which modules `partial` holds depends on fields that were read after it: where it says what the file does, it is
    // the value.
    const std::string graph = word_of(plan, "cuda_graph");
    if (graph.find('+') != std::string::npos && !contains(fixed, "cuda_graph")) {
        plan.cuda_graph = plan::CudaGraph::none;
        improve(plan, "cuda_graph");
    }
    settle_mesh(plan);
}

std::map<std::string, Reading::Said> Reading::written(const plan::Plan& plan) const {
    std::map<std::string, Said> all;
    for (const Line& line : lines_) {
        const auto dialect = dialects_.find(line.entry->field);
        const std::string& release = dialect == dialects_.end() ? release_ : dialect->second;
        if (!line.entry->in_force(release) || !line.entry->when.holds(plan)) continue;
        for (const Phrase& phrase : line.phrases) {
            try {
                all[phrase.name] = {said(*line.entry, plan, phrase), line.entry->field};
            } catch (const Error&) {
                continue; // Stages that do not fit the model are told as an impossible plan.
            }
        }
    }
    return all;
}

} // namespace moe::tools
