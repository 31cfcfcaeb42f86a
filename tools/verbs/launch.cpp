// The verb launch: a plan's job file for Slurm, Open MPI or Kubernetes, or its file for another engine.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"
#include "planner/stack/stack.hpp"
#include "tools/launch/engine_launch.hpp"
#include "tools/launch/job.hpp"
#include "tools/print/console.hpp"
#include "tools/report/documents.hpp"
#include "tools/verbs/request.hpp"
#include "tools/verbs/verbs.hpp"

#include <algorithm>
#include <cctype>
#include <filesystem>

namespace moe::tools {

namespace {

int gpus_per_node(const LaunchOptions& options, const plan::Plan& plan) {
    if (options.per_node < 0) refuse("--gpus-per-node {}: must be at least 1", options.per_node);
    if (options.per_node > 0) return static_cast<int>(options.per_node);
    if (plan.hardware->cpu) return plan.gpus;
    return std::min(plan.hardware->gpus_per_node, plan.gpus);
}

// Letters, digits and hyphens of the plan's model.
std::string job_name(const plan::Plan& plan) {
    std::string name;
    for (const char c : plan.model->name) {
        const auto letter = static_cast<unsigned char>(c);
        name += std::isalnum(letter) != 0 ? static_cast<char>(std::tolower(letter)) : '-';
    }
    while (!name.empty() && name.back() == '-') name.pop_back();
    name.erase(0, name.find_first_not_of('-'));
    return "moe-" + name.substr(0, 40);
}

// The nodes that the plan's ranks fill.
Nodes nodes_of(const LaunchOptions& options, const plan::Plan& plan) {
    Nodes nodes;
    nodes.name = job_name(plan);
    nodes.gpus = gpus_per_node(options, plan);
    if (plan.gpus % nodes.gpus != 0)
        refuse("--gpus-per-node {}: the plan's {} ranks do not fill whole nodes: use a divisor of {}", nodes.gpus,
               plan.gpus, plan.gpus);
    nodes.count = plan.gpus / nodes.gpus;
    return nodes;
}

Job job_of(const LaunchOptions& options, const plan::Plan& plan) {
    const Nodes nodes = nodes_of(options, plan);
    Job job;
    job.name = nodes.name;
    job.plan_path = options.plan;
    job.plan_json = plan::plan_to_json(plan);
    job.backend = plan.hardware->cpu ? "cpu" : "cuda";
    job.data = options.data;
    job.arguments = options.arguments;
    job.image = options.image;
    job.claim = options.claim;
    job.per_node = nodes.gpus;
    job.nodes = nodes.count;
    return job;
}

// The launchers of execute.
bool for_execute(const LaunchOptions& options) { return options.slurm || options.mpi || options.kubernetes; }

int modes(const LaunchOptions& options) {
    int count = 0;
    for (const bool chosen : {options.slurm, options.mpi, options.kubernetes, options.megatron_core,
                              options.megatron_lm, options.megatron_bridge, options.torchtitan, options.automodel})
        count += chosen ? 1 : 0;
    return count;
}

void make_executable(const std::string& path) {
    std::filesystem::permissions(path, std::filesystem::perms::owner_exec, std::filesystem::perm_options::add);
}

// Empty where execute can run the plan: what its stack has against the plan, or its kernels against the machine.
std::string why_not_executed(const plan::Plan& plan) {
    try {
        return stack::check_stack(plan, stack::load_stack("moe-plan", *plan.hardware)).message;
    } catch (const Error& error) {
        if (error.fault() != Fault::bad_input) throw;
        return error.what();
    }
}

void launch_execute(const LaunchOptions& options, const plan::Plan& plan) {
    const Job job = job_of(options, plan);
    // Said here, where a search is at hand, and not only by the job when its turn has come.
    if (const std::string why = why_not_executed(plan); !why.empty())
        Console(options).warn("execute cannot run this plan: {}", why);
    const std::string text = options.slurm ? slurm_script(job)
                             : options.mpi ? mpi_script(job)
                                           : kubernetes_manifest(job);
    if (!options.out.empty()) {
        write_file(options.out, text);
        if (!options.kubernetes) make_executable(options.out);
    }
    if (options.json) return print(launch_document(job.nodes, job.per_node, options.out, text));
    if (options.out.empty()) return print(text);
    Console console(options);
    console.note("{} with {} each, in {}; next: {} {}", counted(job.nodes, "node"), counted(job.per_node, "process"),
                 options.out,
                 options.slurm ? "sbatch"
                 : options.mpi ? "bash"
                               : "kubectl apply -f",
                 options.out);
}

EngineLaunch engine_launch(const LaunchOptions& options, const plan::Plan& plan, const Nodes& nodes) {
    if (options.megatron_core) return megatron_core_launch(plan);
    if (options.torchtitan) return torchtitan_launch(plan, nodes);
    if (options.automodel) return automodel_launch(plan, nodes);
    if (options.megatron_bridge) return megatron_bridge_launch(plan, nodes);
    return megatron_lm_launch(plan, nodes);
}

void launch_engine(const LaunchOptions& options, const plan::Plan& plan) {
    const Nodes nodes = nodes_of(options, plan);
    const EngineLaunch launch = engine_launch(options, plan, nodes);
    const std::string document = launch_engine_document(launch, nodes, options.out);
    const std::string& text = launch.text.empty() ? document : launch.text;
    if (!options.out.empty()) {
        refuse_overwriting("--out", options.out, options.plan);
        write_file(options.out, text);
        if (launch.script) make_executable(options.out);
    }
    if (options.json) return print(document);
    if (options.out.empty()) return print(text);
    Console(options).note("{} with {} each for {} {}, in {}", counted(nodes.count, "node"),
                          counted(nodes.gpus, "process"), launch.engine, launch.release, options.out);
}

} // namespace

void launch_verb(const LaunchOptions& options) {
    if (modes(options) != 1)
        refuse("launch: say for what: one of --slurm, --mpi and --k8s, or of --megatron-lm, --megatron-bridge, "
               "--torchtitan, --automodel and --megatron-core");
    if (options.kubernetes && options.image.empty())
        refuse("launch --k8s: needs --image, a container image with moe-plan in its PATH");
    const plan::Plan plan = plan::load_plan(options.plan);
    stack_of_plan(plan, options.plan); // refused here, where the file's name is known
    if (for_execute(options)) return launch_execute(options, plan);
    launch_engine(options, plan);
}

} // namespace moe::tools
