// Megatron's other words for stages: layers of a chunk, of the first and of the last stage, what counts as a layer, and
// bars in the pattern of a hybrid.
#include "tools/import/stage_settings.hpp"

#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan_fields.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/stack/plan_words.hpp"
#include "tools/engines/engine_value.hpp"

namespace moe::tools {
namespace {

int number_in(const Reading& reading, const std::string& name) {
    const std::vector<std::string>* values = name.empty() ? nullptr : reading.given(name);
    if (values == nullptr || values->size() != 1) return 0;
    const auto value = literal(values->front());
    return value.is_number_integer() && value.get<std::int64_t>() > 0 && value.get<std::int64_t>() < 1 << 14
               ? value.get<int>()
               : 0;
}

bool flag_in(const Reading& reading, const std::string& name) {
    const std::vector<std::string>* values = name.empty() ? nullptr : reading.given(name);
    return values != nullptr && (values->empty() || values->front() == "true" || values->front() == "True");
}

struct StageWords {
    int per_chunk, first, last;
    bool embedding, loss;
};

// Layers of each stage in order; empty where the numbers do not fit.
std::vector<int> sizes(const StageWords& words, int layers, int pp, int vpp) {
    const int stages = pp * vpp;
    std::vector<int> counts(static_cast<std::size_t>(stages), 0);
    if (words.first == 0 && words.last == 0) {
        const int all = layers + (words.embedding ? 1 : 0) + (words.loss ? 1 : 0);
        if (all % stages != 0) return {};
        counts.assign(counts.size(), all / stages);
        if (words.embedding) --counts.front();
        if (words.loss) --counts.back();
        return counts;
    }
    // First and last are layers of a pipeline rank, over all of its chunks.
    const int ends = (words.first > 0 ? 1 : 0) + (words.last > 0 ? 1 : 0), between = pp - ends;
    const int rest = layers - words.first - words.last;
    if (rest < 0 || (between == 0 ? rest != 0 : rest % (between * vpp) != 0)) return {};
    if (words.first % vpp != 0 || words.last % vpp != 0) return {};
    for (int stage = 0; stage < stages; ++stage) {
        const int rank = stage % pp;
        const bool at_first = rank == 0 && words.first > 0, at_last = rank == pp - 1 && words.last > 0;
        counts[static_cast<std::size_t>(stage)] = (at_first       ? words.first
                                                   : at_last      ? words.last
                                                   : between == 0 ? 0
                                                                  : rest / between) /
                                                  vpp;
    }
    return counts;
}

std::string layout_of(const std::vector<int>& counts, const model::Model& model) {
    std::vector<plan::Stage> stages(counts.size());
    int layer = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
        if (counts[i] < 0) return {};
        stages[i].first_layer = layer;
        stages[i].layers = counts[i];
        layer += counts[i];
    }
    stages.front().embedding = true;
    stages.back().loss = true;
    stages.back().mtp = static_cast<int>(model.mtp.size());
    return layer == static_cast<int>(model.layers.size()) ? plan::layout_to_string(stages) : std::string();
}

// Layers of each stage of a hybrid's pattern: a letter is a layer, a bar ends a stage, MTP stands behind a slash.
std::vector<int> counts_of(const std::string& pattern) {
    std::vector<int> counts{0};
    for (const char letter : pattern.substr(0, pattern.find('/')))
        if (letter == '|')
            counts.push_back(0);
        else
            ++counts.back();
    return counts;
}

// Whether the plan took vpp and layout from a pattern with bars, which other words of its fields do not have already.
bool cut_by_pattern(plan::Plan& plan, const std::vector<std::string>* pattern) {
    if (pattern == nullptr || pattern->size() != 1 || pattern->front().find('|') == std::string::npos) return false;
    if (stack::plan_word(plan, "model.pattern") == pattern->front()) return false;
    const std::vector<int> counts = counts_of(pattern->front());
    const int stages = static_cast<int>(counts.size());
    const std::string layout = stages % plan.pp == 0 ? layout_of(counts, *plan.model) : std::string();
    if (layout.empty()) return false;
    plan.layout = layout;
    plan.vpp = stages / plan.pp;
    plan.schedule = plan.vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
    return true;
}

} // namespace

std::string layout_of_parts(const std::vector<std::string>& parts, const plan::Plan& plan) {
    if (parts.empty() || parts.size() > 1 << 12) return {};
    std::vector<plan::Stage> stages(parts.size());
    int layer = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
        stages[i].first_layer = layer;
        std::size_t at = 0;
        while ((at = parts[i].find("layers.", at)) != std::string::npos) {
            ++stages[i].layers;
            ++at;
        }
        layer += stages[i].layers;
        stages[i].embedding = parts[i].find("embed") != std::string::npos;
        stages[i].mtp = parts[i].find("mtp") != std::string::npos ? static_cast<int>(plan.model->mtp.size()) : 0;
        stages[i].loss = parts[i].find("output") != std::string::npos || parts[i].find("lm_head") != std::string::npos;
    }
    if (layer != static_cast<int>(plan.model->layers.size())) return {};
    return plan::layout_to_string(stages);
}

std::vector<std::string> set_stages(plan::Plan& plan, const Reading& reading, const ReaderTable& reader) {
    const StageNames& names = reader.stages;
    const StageWords words{number_in(reading, names.layers_per_chunk), number_in(reading, names.first),
                           number_in(reading, names.last), flag_in(reading, names.embedding),
                           flag_in(reading, names.loss)};
    std::vector<std::string> used;
    if (plan.pp == 1 || !plan.layout.empty()) return used;
    if (!names.pattern.empty() && cut_by_pattern(plan, reading.given(names.pattern))) return {names.pattern};
    const int layers = static_cast<int>(plan.model->layers.size());
    plan::Plan tried = plan;
    if (words.per_chunk > 0) {
        const int all = layers + (words.embedding ? 1 : 0) + (words.loss ? 1 : 0) - (words.first + words.last);
        const int ranks = plan.pp - (words.first > 0 ? 1 : 0) - (words.last > 0 ? 1 : 0);
        if (ranks < 1 || all % (ranks * words.per_chunk) != 0) return used;
        plan::set_field(tried, "vpp", fmt::format("{}", all / ranks / words.per_chunk));
        tried.schedule = tried.vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
        used.push_back(names.layers_per_chunk);
    }
    const bool uneven = words.first > 0 || words.last > 0 || words.embedding || words.loss;
    if (uneven) {
        const std::vector<int> counts = sizes(words, layers, tried.pp, tried.vpp);
        const std::string layout = counts.empty() ? std::string() : layout_of(counts, *plan.model);
        if (layout.empty()) return {};
        tried.layout = layout;
        for (const std::string* name : {&names.first, &names.last, &names.embedding, &names.loss})
            if (!name->empty() && reading.given(*name) != nullptr) used.push_back(*name);
    }
    plan = tried;
    return used;
}

} // namespace moe::tools
