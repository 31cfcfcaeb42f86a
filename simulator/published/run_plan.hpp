// A published run becomes the plan that it was measured with, or the reason why it cannot.
#pragma once

#include "planner/plan/plan.hpp"
#include "planner/stack/stack.hpp"
#include "simulator/published/runs.hpp"
#include "simulator/published/sibling.hpp"

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace moe::published {

struct PlannedRun {
    std::string skipped; // why there is no plan; empty when there is one
    plan::Plan plan;     // sound and within the stack, open choices at their smallest
    bool open_mbs = false, open_vpp = false, open_recompute = false,
         open_offload = false;         // the row leaves them to the planner
    double flops_per_token = 0.0;      // FLOPs as the published TFLOPS count them
    std::string family;                // architecture of the model; empty when it has no config
    std::string kind;                  // kind of the model, see kind_of
    std::vector<std::string> warnings; // statements of the row that the plan does not make
};

// The hardware profile of a row's system: "GB200" is "gb200-nvl72".
std::string hardware_profile_of(const std::string& system);

// Reads rows by the rules of RUNS.csv: nothing depends on run_id, only on what the row says and, where cells are blank,
// on the recipes that are most like it. Models, machines, stacks and recipes are read once.
class RunPlanner {
public:
    // Recipes: rows of profiles/runs and of its folder recipes.
    explicit RunPlanner(machine::Coefficients coefficients);
    RunPlanner(machine::Coefficients coefficients, std::vector<Run> recipes);
    // Never throws for what a row says: that becomes `skipped`. Throws Error for profiles that cannot be read.
    PlannedRun plan(const Run& run);
    const stack::Stack& stack(const plan::Plan& plan); // the stack of a plan that plan() has made

private:
    PlannedRun attempt(const Run& run, std::vector<std::string> notes);
    // Refuse with what becomes the reason.
    void fill(const Run& run, PlannedRun& planned);
    std::shared_ptr<const model::Model> model(const Run& run);
    std::shared_ptr<const machine::Hardware> hardware(const std::string& system);
    const stack::Stack& stack(const std::string& name, const machine::Hardware& hardware);

    machine::Coefficients coefficients_;
    std::vector<std::pair<std::string, stack::Publication>> published_; // stack name, what it stands for
    Siblings siblings_;
    std::map<std::string, std::shared_ptr<const model::Model>> models_; // models by name and MTP depth
    std::map<std::string, std::shared_ptr<const machine::Hardware>> machines_;
    std::map<std::pair<std::string, std::string>, stack::Stack> stacks_; // stacks by (name, hardware)
};

// The longest `source` word that occurs in a source; empty when none does.
std::string source_word(const std::vector<std::pair<std::string, stack::Publication>>& published,
                        const std::string& source);

// Name of the stack that stands for a source and its release: the longest `source` word that occurs in it; of its
// releases the same one, else the newest that is not newer, else the oldest. Empty when no word occurs.
std::string stack_of(const std::vector<std::pair<std::string, stack::Publication>>& published,
                     const std::string& source, const std::string& release);

// Negative, zero or positive as release `a` is older than, equal to or newer than `b`, number by number.
int compare_releases(const std::string& a, const std::string& b);

// The kind that rows are grouped by: "MoE", "dense" or, of layers of one part each, "hybrid".
std::string kind_of(const model::Model& model);

} // namespace moe::published
