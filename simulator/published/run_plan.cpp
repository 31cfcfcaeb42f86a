// Builds plans from rows: model, machine and stack by name, the mesh by its degrees, the recipe by its words.
#include "simulator/published/run_plan.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "simulator/cost/network.hpp"
#include "simulator/published/run_recipe.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <iterator>

namespace moe::published {
namespace {

// Numbers of "v25.04.02" or "26.04", in order.
std::vector<std::int64_t> numbers_of(const std::string& text) {
    std::vector<std::int64_t> numbers;
    bool inside = false;
    for (const char c : text) {
        const bool digit = c >= '0' && c <= '9';
        if (digit && !inside) numbers.push_back(0);
        if (digit) numbers.back() = std::min<std::int64_t>(numbers.back() * 10 + (c - '0'), 1'000'000'000);
        inside = digit;
    }
    return numbers;
}

// Reasons that need nothing but the row itself.
std::string row_fault(const Run& run) {
    if (run.status != "current") return fmt::format("status is {}", run.status.empty() ? "blank" : shown(run.status));
    if (!run.gbs) return "no gbs";
    if (!run.seq_len) return "no seq_len";
    if (!run.gpus) return "no gpus";
    if (!run.tp || !run.pp) return "mapping is incomplete: tp and pp must be given";
    if (!run.mapping_check.empty() && run.mapping_check != "ok") return shown(run.mapping_check);
    if (run.system.find("power-limited") != std::string::npos)
        return fmt::format("system {}: its clocks are not known", shown(run.system));
    if (!run.tflops_std && !run.tflops_per_gpu) return "no TFLOPS published";
    return {};
}

int degree(const std::optional<std::int64_t>& value) { return static_cast<int>(value.value_or(1)); }

// The axis that the row leaves out is what remains of the GPUs.
int remaining(int gpus, std::int64_t others, const char* factors) {
    if (others < 1 || gpus % others != 0)
        refuse("impossible mapping: {} GPUs are not a multiple of {} = {}", gpus, factors, others);
    return static_cast<int>(gpus / others);
}

void fill_mesh(const Run& run, plan::Plan& plan) {
    plan.gpus = static_cast<int>(*run.gpus);
    plan.tp = degree(run.tp);
    plan.pp = degree(run.pp);
    plan.cp = degree(run.cp);
    plan.ep = degree(run.ep);
    plan.etp = degree(run.etp);
    plan.vpp = plan.pp > 1 ? degree(run.vpp) : 1;
    plan.schedule = plan.vpp > 1 ? plan::ScheduleKind::interleaved : plan::ScheduleKind::one_f_one_b;
    // Products of three degrees up to 1e9 would pass 64 bits; none above gpus can divide it. Chunks are bounded by the
    // layers, whatever the GPUs.
    for (const int part : {plan.tp, plan.pp, plan.cp, plan.ep, plan.etp})
        if (part > plan.gpus) refuse("impossible mapping: a degree of {} on {} GPUs", part, plan.gpus);
    const std::int64_t dense = std::int64_t{plan.tp} * plan.cp, expert = std::int64_t{plan.etp} * plan.ep;
    plan.dp = remaining(remaining(plan.gpus, plan.pp, "pp"), dense, "tp * cp (times pp)");
    plan.edp = remaining(remaining(plan.gpus, plan.pp, "pp"), expert, "ep * etp (times pp)");
}

// Tables do not print a degree that is 1. Before parallel folding (arXiv 2504.14960) the two factorings of the ranks
// shared TP, and so do the rows of a source that says so.
void fill_expert_tensor(Run& run, const model::Model& model, const stack::Publication* publication,
                        std::vector<std::string>& notes) {
    if (run.etp || publication == nullptr || publication->folding || kind_of(model) != "MoE") return;
    run.etp = run.tp;
    notes.push_back(fmt::format("blank etp is tp = {}: without parallel folding experts share it", *run.tp));
}

// A published run did run: where its recipe as recorded breaks a rule, the record lacks something. A layout that the
// row does not state stands for account_for_embedding_in_pipeline_split and its like, which every release has.
void warn_of_rules(const Run& run, plan::Plan plan, const stack::Stack& s, std::vector<std::string>& warnings) {
    if (run.pipeline_layout.empty()) plan.layout.clear();
    for (const stack::Rule* rule : stack::broken_rules(plan, s))
        warnings.push_back(fmt::format("the recipe as recorded breaks a rule of {}: {}", s.engine.name, rule->message));
}

} // namespace

std::string kind_of(const model::Model& model) {
    if (model.hybrid) return "hybrid";
    return std::any_of(model.kinds.begin(), model.kinds.end(),
                       [](const model::LayerKind& k) { return k.moe.has_value(); })
               ? "MoE"
               : "dense";
}

std::string hardware_profile_of(const std::string& system) {
    std::string name;
    for (const char c : system) name += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (name == "h100(hbm2e,500w)") return "h100-hbm2e";
    if (name == "gb200" || name == "gb300") return name + "-nvl72";
    if (name == "vr200") return "vr-nvl72";
    if (name == "a100") return "a100-sxm";
    return name;
}

int compare_releases(const std::string& a, const std::string& b) {
    const std::vector<std::int64_t> x = numbers_of(a), y = numbers_of(b);
    if (x == y) return a.compare(b) == 0 || !x.empty() ? 0 : a.compare(b);
    return std::lexicographical_compare(x.begin(), x.end(), y.begin(), y.end()) ? -1 : 1;
}

std::string source_word(const std::vector<std::pair<std::string, stack::Publication>>& published,
                        const std::string& source) {
    std::string longest;
    for (const auto& [name, publication] : published)
        if (source.find(publication.source) != std::string::npos && publication.source.size() > longest.size())
            longest = publication.source;
    return longest;
}

std::string stack_of(const std::vector<std::pair<std::string, stack::Publication>>& published,
                     const std::string& source, const std::string& release) {
    const std::string word = source_word(published, source);
    std::string oldest, best, oldest_release, best_release;
    for (const auto& [name, publication] : published) {
        if (word.empty() || publication.source != word) continue;
        if (publication.releases.empty()) return name;
        for (const std::string& candidate : publication.releases) {
            if (candidate == release) return name;
            if (oldest.empty() || compare_releases(candidate, oldest_release) < 0)
                oldest = name, oldest_release = candidate;
            if (compare_releases(candidate, release) <= 0 &&
                (best.empty() || compare_releases(candidate, best_release) > 0))
                best = name, best_release = candidate;
        }
    }
    return best.empty() ? oldest : best;
}

namespace {

using Published = std::vector<std::pair<std::string, stack::Publication>>;

Published published_stacks(const machine::Coefficients& coefficients) {
    // A stack stands for the same software on every machine; any that has a profile will do.
    const machine::Hardware any = machine::load_hardware("h100");
    Published published;
    for (const std::string& name : stack::stack_names())
        for (const stack::Publication& publication : stack::load_stack(name, any, coefficients).published)
            published.emplace_back(name, publication);
    return published;
}

std::vector<Run> shipped_recipes() {
    std::vector<Run> recipes;
    for (const char* folder : {"/runs", "/runs/recipes"}) {
        const std::string path = profiles_folder() + folder;
        if (!std::filesystem::is_directory(path)) continue;
        std::vector<Run> some = load_runs(path);
        recipes.insert(recipes.end(), std::make_move_iterator(some.begin()), std::make_move_iterator(some.end()));
    }
    return recipes;
}

} // namespace

RunPlanner::RunPlanner(machine::Coefficients coefficients) : RunPlanner(std::move(coefficients), shipped_recipes()) {}

RunPlanner::RunPlanner(machine::Coefficients coefficients, std::vector<Run> recipes)
    : coefficients_(std::move(coefficients)),
      published_(published_stacks(coefficients_)),
      siblings_(std::move(recipes), [published = published_](const Run& run) {
          return Origin{source_word(published, run.source), stack_of(published, run.source, run.release)};
      }) {}

std::shared_ptr<const model::Model> RunPlanner::model(const Run& run) {
    const std::string key = run.model + (run.mtp_layers ? fmt::format(" mtp {}", *run.mtp_layers) : "");
    auto& slot = models_[key];
    if (slot) return slot;
    if (run.model.empty() || run.model.find('/') != std::string::npos)
        refuse("model '{}': must be the name of a profile", shown(run.model));
    model::Model model = families::load_model(run.model);
    if (run.mtp_layers && *run.mtp_layers != static_cast<std::int64_t>(model.mtp.size())) {
        auto json = parse_json<nlohmann::ordered_json>(model.config_json, run.model);
        json["num_nextn_predict_layers"] = *run.mtp_layers;
        const std::string name = model.name;
        model = families::model_from_json(json_text(json), run.model);
        model.name = name;
        if (*run.mtp_layers != static_cast<std::int64_t>(model.mtp.size()))
            refuse("mtp_layers {}: {} has no multi-token prediction", *run.mtp_layers, run.model);
    }
    slot = std::make_shared<const model::Model>(std::move(model));
    return slot;
}

std::shared_ptr<const machine::Hardware> RunPlanner::hardware(const std::string& system) {
    auto& slot = machines_[system];
    if (slot) return slot;
    const std::string name = hardware_profile_of(system);
    if (name.empty() || name.find('/') != std::string::npos) refuse("system '{}': must be a name", shown(system));
    slot = std::make_shared<const machine::Hardware>(machine::load_hardware(name));
    return slot;
}

const stack::Stack& RunPlanner::stack(const std::string& name, const machine::Hardware& hardware) {
    const std::pair<std::string, std::string> key{name, hardware.name};
    auto found = stacks_.find(key);
    if (found == stacks_.end()) found = stacks_.emplace(key, stack::load_stack(name, hardware, coefficients_)).first;
    return found->second;
}

const stack::Stack& RunPlanner::stack(const plan::Plan& plan) { return stack(plan.stack, *plan.hardware); }

void RunPlanner::fill(const Run& run, PlannedRun& planned) {
    plan::Plan& plan = planned.plan;
    plan.model = model(run);
    planned.family = plan.model->architecture;
    planned.kind = kind_of(*plan.model);
    plan.hardware = hardware(run.system);
    std::string name = stack_of(published_, run.source, run.release);
    if (name.empty()) {
        name = plan.hardware->default_stack;
        planned.warnings.push_back("no stack stands for this source: priced as " + name);
    }
    const stack::Stack& s = stack(name, *plan.hardware);
    plan.stack = s.name;
    plan.seq = *run.seq_len;
    plan.gbs = *run.gbs;
    plan.precision = recipe_precision(run.precision);
    plan.fsdp = run.fsdp.value_or(false);
    plan.mbs = run.mbs.value_or(1);
    planned.open_mbs = !run.mbs;
    planned.open_recompute = run.recompute_modules.empty();
    planned.open_offload = run.offload_modules.empty();
    fill_mesh(run, plan);
    planned.open_vpp = !run.mbs && !run.vpp && run.pipeline_layout.empty() && plan.pp > 1;
    apply_recipe(run, s, plan, planned.warnings);
    plan.layout = recipe_layout(run, plan, planned.warnings);
    if (const plan::PlanFault fault = plan::check_plan(plan)) refuse("{}", fault.message);
    if (const plan::PlanFault fault = stack::check_offers(plan, s)) refuse("{}", fault.message);
    warn_of_rules(run, plan, s, planned.warnings);
    if (const std::string line = cost::unpriced(plan); !line.empty()) planned.warnings.push_back(line);
    planned.flops_per_token = run.gflop_per_token_std ? *run.gflop_per_token_std * 1e9
                                                      : model::model_flops_per_token(*plan.model, plan.seq, plan.tp);
}

PlannedRun RunPlanner::attempt(const Run& run, std::vector<std::string> notes) {
    PlannedRun planned;
    planned.warnings = std::move(notes);
    try {
        fill(run, planned);
    } catch (const Error& error) {
        if (error.fault() != Fault::bad_input) throw;
        planned.skipped = error.what();
    }
    return planned;
}

PlannedRun RunPlanner::plan(const Run& run) {
    PlannedRun planned;
    planned.skipped = row_fault(run);
    if (!planned.skipped.empty()) return planned;
    Run printed = run, whole = run;
    std::vector<std::string> notes;
    try {
        const std::string word = source_word(published_, run.source);
        const std::string name = stack_of(published_, run.source, run.release);
        const auto found = std::find_if(published_.begin(), published_.end(), [&](const auto& known) {
            return known.first == name && known.second.source == word;
        });
        fill_expert_tensor(printed, *model(run), found == published_.end() ? nullptr : &found->second, notes);
    } catch (const Error& error) {
        if (error.fault() != Fault::bad_input) throw;
        planned.skipped = error.what();
        return planned;
    }
    whole = printed;
    forget_misprints(whole);
    std::vector<std::string> filled = notes;
    siblings_.fill(whole, filled);
    planned = attempt(whole, filled);
    // Cells of a sibling that make no plan beside those of the row are left out again.
    if (!planned.skipped.empty() && filled.size() > notes.size()) planned = attempt(printed, notes);
    return planned;
}

} // namespace moe::published
