// The command moe-plan: reads the command line, runs one verb, and turns every error into one line and an exit status.
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "tools/verbs/verbs.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <string>
#include <vector>

namespace {

using namespace moe::tools;

// One verb: its name, its line in the overview and an example, its options, and what runs when it is chosen.
CLI::App* add_verb(CLI::App& app, const std::string& name, const std::string& about, const std::string& example,
                   std::function<void()> run) {
    CLI::App* verb = app.add_subcommand(name, about);
    verb->footer("Example:\n  " + example);
    verb->callback(std::move(run));
    return verb;
}

void add_json(CLI::App* verb, bool& json) {
    verb->add_flag("--json", json, "one JSON document on stdout, everything else on stderr");
}

// What a request consists of; `required`: there is no plan that could stand for it.
void add_request(CLI::App* verb, SearchOptions& o, bool required) {
    verb->add_option("--model", o.model, "Hugging Face config.json, or the name of a model profile")
        ->required(required);
    verb->add_option("--hardware", o.hardware, "hardware profile, or the name of one")->required(required);
    verb->add_option("--gpus", o.gpus, "GPUs of the job (CPU: ranks)")->required(required);
    verb->add_option("--gbs", o.gbs, "global batch, sequences per step")->required(required);
    verb->add_option("--seq", o.seq, "tokens per sequence")->required(required);
    verb->add_option("--precision", o.precisions, "fp32 bf16 fp8-tensor fp8-blockwise mxfp8 nvfp4; several as A,B");
    verb->add_option("--stack", o.stack, "software generation (default: the hardware's newest)");
    verb->add_option("--fix", o.fix, "pin a plan field, FIELD=VALUE; may be repeated")
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
}

void add_search(CLI::App& app, SearchOptions& o) {
    CLI::App* verb = add_verb(app, "search", "explore the whole plan space and rank it",
                              "moe-plan search --model DeepSeek-V3 --hardware gb200-nvl72 --gpus 256 --gbs 4096 "
                              "--seq 4096 --precision mxfp8 --out plan.json",
                              [&o] { search_verb(o); });
    add_request(verb, o, true);
    verb->add_option("--top", o.top, "how many plans to show, each of another mapping (TP, CP, DP, PP, EP, ETP)")
        ->capture_default_str();
    verb->add_option("--optimize-for", o.optimize_for,
                     "steps to rank by where --fix routing=dirichlet:A, zipf:S or a histogram's file: mean p50 p99")
        ->capture_default_str();
    verb->add_option(
            "--memory-headroom", o.memory_headroom,
            "share of a GPU's memory that plans leave free, such as 0.1: memory under --stack moe-plan is exact, "
            "that of published stacks is met within about a tenth")
        ->capture_default_str();
    verb->add_option("--out", o.out, "write the best plan to this file");
    add_json(verb, o.json);
}

void add_replay(CLI::App& app, ReplayOptions& o) {
    CLI::App* verb =
        add_verb(app, "replay", "simulate a plan event by event",
                 "moe-plan replay plan.json --trace trace.json --report report.html", [&o] { replay_verb(o); });
    verb->add_option("PLAN", o.plan, "plan.json")->required();
    verb->add_option("--trace", o.trace, "write the timeline as Chrome trace JSON (opens in ui.perfetto.dev)");
    verb->add_option("--report", o.report, "write a self-contained HTML page");
    add_json(verb, o.json);
}

void add_explain(CLI::App& app, ExplainOptions& o) {
    CLI::App* verb = add_verb(app, "explain", "why this plan: its walls, what each single change would do",
                              "moe-plan explain plan.json --versus other.json", [&o] { explain_verb(o); });
    verb->add_option("PLAN", o.plan,
                     "plan.json; without one, a request as for search: its best plan, or why it has none");
    add_request(verb, o.request, false);
    verb->add_option("--versus", o.versus, "another plan.json: what differs, by op kind and by class of memory");
    add_json(verb, o.json);
}

void add_execute(CLI::App& app, ExecuteOptions& o) {
    CLI::App* verb = add_verb(
        app, "execute", "train with exactly that plan; under mpirun, srun or torchrun every process is one rank",
        "moe-plan execute plan.json --data text --steps 300 --run-dir runs/first", [&o] { execute_verb(o); });
    verb->add_option("PLAN", o.plan, "plan.json")->required();
    verb->add_option("--data", o.data,
                     "[W] PREFIX of a Megatron .bin/.idx pair, drawn from by weight W; may be repeated")
        ->required()
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    verb->add_option("--steps", o.steps, "training steps")->capture_default_str();
    verb->add_option("--backend", o.backend, "cpu, or cuda: a GPU for every rank")->capture_default_str();
    verb->add_option("--init-from", o.init_from, "Hugging Face folder: start from its weights (safetensors)");
    verb->add_option("--run-dir", o.run_dir,
                     "folder for plan.json, run.json, predicted.json, measured.json and routing.csv");
    verb->add_option("--trace", o.trace, "write the measured timeline as Chrome trace JSON");
    verb->add_option(
        "--checkpoint", o.checkpoint,
        "folder of checkpoints: one at the end, and one when SIGTERM or Ctrl-C ends the run (exit status 0)");
    verb->add_option("--save-interval", o.save_interval, "also save every N steps");
    verb->add_flag("--resume", o.resume,
                   "go on from the newest whole checkpoint, of this or any other plan for the same model");
    verb->add_option("--shuffle", o.shuffle, "on or off: order of the samples")->capture_default_str();
    verb->add_option("--lr", o.lr, "peak learning rate")->capture_default_str();
    verb->add_option("--lr-schedule", o.lr_schedule, "constant or cosine")->capture_default_str();
    verb->add_option("--warmup", o.warmup, "steps over which the learning rate rises")->capture_default_str();
    verb->add_option("--betas", o.betas, "AdamW's decay rates, A,B")->capture_default_str();
    verb->add_option("--eps", o.eps, "AdamW's epsilon")->capture_default_str();
    verb->add_option("--weight-decay", o.weight_decay, "AdamW's weight decay")->capture_default_str();
    verb->add_option("--grad-clip", o.grad_clip, "largest global gradient norm, 0 = no clipping")
        ->capture_default_str();
    verb->add_option("--aux-loss", o.aux_loss, "coefficient of the balancing loss, in place of the plan's aux_loss");
    verb->add_option("--balance", o.balance, "natural, or forced: experts evenly loaded whatever the router says");
    verb->add_option("--seed", o.seed, "seed of weights and sample order")->capture_default_str();
    verb->add_option("--hang-timeout", o.hang_timeout,
                     "seconds in one op after which a rank hangs and the run ends (0: never)")
        ->capture_default_str();
    add_json(verb, o.json);
}

void add_compare(CLI::App& app, CompareOptions& o) {
    CLI::App* verb = add_verb(app, "compare", "line up predicted and measured, op by op", "moe-plan compare runs/first",
                              [&o] { compare_verb(o); });
    verb->add_option("TRACES", o.traces, "PREDICTED MEASURED, or one run directory")->required()->expected(1, 2);
    add_json(verb, o.json);
}

void add_calibrate(CLI::App& app, CalibrateOptions& o) {
    CLI::App* verb = add_verb(app, "calibrate", "measure this machine and write a hardware profile",
                              "moe-plan calibrate --backend cpu --out here.json", [&o] { calibrate_verb(o); });
    verb->add_option("--backend", o.backend, "cpu: this machine's cores, or cuda: its GPUs")->capture_default_str();
    verb->add_option("--gpus", o.gpus, "cuda: communication is measured among 2, 4, .. of so many (0: all there are)")
        ->capture_default_str();
    verb->add_option("--from", o.from,
                     "cuda: a profile measured on one GPU of this kind; only communication is measured. With --runs: "
                     "the profile to add to (default: that of the first run's plan)");
    verb->add_option("--runs", o.runs,
                     "RUN_DIR.. of execute: what their ops took joins the profile, and nothing is measured now");
    verb->add_option("--out", o.out, "the hardware profile")->required();
    add_json(verb, o.json);
}

void add_validate(CLI::App& app, ValidateOptions& o) {
    CLI::App* verb = add_verb(app, "validate", "predict published runs, each with the very plan of its row",
                              "moe-plan validate runs.csv --json", [&o] { validate_verb(o); });
    verb->add_option("RUNS", o.runs, "CSV file of runs, or the name of one in profiles/runs (default: all of these)");
    verb->add_option("--row", o.row, "only runs whose id contains this");
    verb->add_option("--worst", o.worst, "how many of the widest misses to show")->capture_default_str();
    verb->add_flag("--improve", o.improve,
                   "search the same GPUs for a plan that is predicted faster than each published one (seconds a row)");
    add_json(verb, o.json);
}

void add_tokenize(CLI::App& app, TokenizeOptions& o) {
    CLI::App* verb =
        add_verb(app, "tokenize", "text files to a Megatron .bin/.idx pair",
                 "moe-plan tokenize /usr/share/common-licenses/GPL-3 --out text", [&o] { tokenize_verb(o); });
    verb->add_option("TEXT", o.texts, "text files, one document each")->required();
    verb->add_option("--out", o.out, "prefix of the pair")->required();
    verb->add_option("--vocab", o.vocab, "bytes: token ids are the bytes 0-255; or a Hugging Face tokenizer.json")
        ->capture_default_str();
    add_json(verb, o.json);
}

void add_export(CLI::App& app, ExportVerbOptions& o) {
    CLI::App* verb =
        add_verb(app, "export", "checkpoint to a Hugging Face folder",
                 "moe-plan export --checkpoint runs/first/checkpoints --out exported", [&o] { export_verb(o); });
    verb->add_option("--checkpoint", o.checkpoint,
                     "folder of execute --checkpoint; its newest whole checkpoint is taken")
        ->required();
    verb->add_option("--out", o.out, "folder for safetensors and config.json")->required();
    verb->add_option("--dtype", o.dtype, "fp32: master weights bit for bit, or bf16")->capture_default_str();
    add_json(verb, o.json);
}

void add_launch(CLI::App& app, LaunchOptions& o) {
    CLI::App* verb = add_verb(app, "launch", "the job file that executes a plan, a process per rank",
                              "moe-plan launch plan.json --slurm --data text --arguments '--steps 300' --out job.sh",
                              [&o] { launch_verb(o); });
    verb->add_option("PLAN", o.plan, "plan.json, where the job finds it as well")->required();
    verb->add_flag("--slurm", o.slurm, "a script for sbatch");
    verb->add_flag("--mpi", o.mpi, "a script that calls Open MPI's mpirun");
    verb->add_flag("--k8s", o.kubernetes, "a Kubernetes Job with a pod per node, its Service, and the plan");
    verb->add_option("--data", o.data, "prefix of the dataset where the job runs")->capture_default_str();
    verb->add_option("--arguments", o.arguments, "more options of execute, as one word");
    verb->add_option("--gpus-per-node", o.per_node, "processes of a node (default: as the plan's hardware has GPUs)");
    verb->add_option("--image", o.image, "--k8s: container image with moe-plan in its PATH");
    verb->add_option("--claim", o.claim, "--k8s: volume claim that is mounted at /work")->capture_default_str();
    verb->add_option("--out", o.out, "file to write (default: stdout)");
    add_json(verb, o.json);
}

bool is_number(const std::string& text) {
    double value = 0.0;
    return !text.empty() && CLI::detail::lexical_cast(text, value);
}

// The command line without the program's name. The two words of "--data W PREFIX" become one, since CLI11 could not
// tell whether an option's optional second word is not the next positional argument.
std::vector<std::string> words_of(int argc, char** argv) {
    std::vector<std::string> words;
    for (int i = 1; i < argc; ++i) {
        words.emplace_back(argv[i]);
        if (words.back() != "--data" || i + 2 >= argc || !is_number(argv[i + 1]) || argv[i + 2][0] == '-') continue;
        words.push_back(std::string(argv[i + 1]) + " " + argv[i + 2]);
        i += 2;
    }
    return words;
}

std::vector<std::string> verb_names(const CLI::App& app) {
    std::vector<std::string> names;
    for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; }))
        names.push_back(verb->get_name());
    return names;
}

// "moe-plan", or "moe-plan VERB" once the verb is known.
std::string place(const CLI::App& app) {
    const auto chosen = app.get_subcommands();
    return chosen.empty() ? "moe-plan" : "moe-plan " + chosen.front()->get_name();
}

// What CLI11 could not place, with the option that was probably meant.
std::string unexpected_text(const CLI::App& verb) {
    const std::vector<std::string> words = verb.remaining();
    const auto option = std::find_if(words.begin(), words.end(), [](const auto& word) { return word[0] == '-'; });
    if (option == words.end()) return "unexpected argument" + (words.empty() ? "" : " '" + words.front() + "'");
    std::vector<std::string> known;
    for (const CLI::Option* candidate : verb.get_options())
        for (const std::string& name : candidate->get_lnames()) known.push_back("--" + name);
    const std::string name = option->substr(0, option->find('='));
    return "unknown option " + name + moe::did_you_mean(name, known);
}

// The line for a command line that does not parse.
std::string usage_line(const CLI::App& app, const CLI::ParseError& error) {
    const auto chosen = app.get_subcommands();
    const CLI::App& verb = chosen.empty() ? app : *chosen.front();
    const std::vector<std::string> left = verb.remaining();
    std::string text = error.what();
    // A mistyped option first: whatever else is wrong, such as a required one missing, follows from it.
    if (std::any_of(left.begin(), left.end(), [](const auto& word) { return word[0] == '-'; }) ||
        dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr)
        text = unexpected_text(verb);
    else if (chosen.empty() && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr)
        text = "a verb is needed: " + fmt::format("{}", fmt::join(verb_names(app), ", "));
    return place(app) + ": " + text + "; see " + place(app) + " --help";
}

int complain(std::string line, moe::Fault fault) {
    std::replace(line.begin(), line.end(), '\n', ' ');
    std::fputs((line + "\n").c_str(), stderr);
    return static_cast<int>(fault);
}

int run(int argc, char** argv) {
    CLI::App app{"Plans Mixture-of-Experts training: search a plan, replay it, execute it, compare both.", "moe-plan"};
    app.set_version_flag("--version", std::string("moe-plan ") + MOE_PLAN_VERSION);
    app.require_subcommand(1);
    app.footer("Exit status: 0 success, 2 bad input, 1 failure while running. Each verb has --help with an example.");

    SearchOptions search;
    ReplayOptions replay;
    ExplainOptions explain;
    ExecuteOptions execute;
    CompareOptions compare;
    CalibrateOptions calibrate;
    TokenizeOptions tokenize;
    ExportVerbOptions exported;
    LaunchOptions launch;
    ValidateOptions validate;
    add_search(app, search);
    add_replay(app, replay);
    add_explain(app, explain);
    add_execute(app, execute);
    add_compare(app, compare);
    add_calibrate(app, calibrate);
    add_tokenize(app, tokenize);
    add_export(app, exported);
    add_launch(app, launch);
    add_validate(app, validate);

    const std::vector<std::string> verbs = verb_names(app);
    if (argc > 1 && argv[1][0] != '-' && std::find(verbs.begin(), verbs.end(), argv[1]) == verbs.end())
        return complain(fmt::format("moe-plan: unknown verb '{}'{}; see moe-plan --help", argv[1],
                                    moe::did_you_mean(argv[1], verbs)),
                        moe::Fault::bad_input);
    try {
        std::vector<std::string> words = words_of(argc, argv);
        execute.command = "moe-plan";
        for (const std::string& word : words) execute.command += " " + word;
        std::reverse(words.begin(), words.end()); // CLI11 takes them from the back
        app.parse(words);
    } catch (const CLI::Success& request) { // --help, --version
        return app.exit(request);
    } catch (const CLI::ParseError& error) {
        return complain(usage_line(app, error), moe::Fault::bad_input);
    }
    return 0;
}

} // namespace

int main(int argc, char** argv) {
    // A closed pipe and a file over the size limit are failed writes like any other.
    std::signal(SIGPIPE, SIG_IGN);
    std::signal(SIGXFSZ, SIG_IGN);
    try {
        return run(argc, argv);
    } catch (const moe::Error& error) {
        return complain(fmt::format("moe-plan: {}", error.what()), error.fault());
    } catch (const std::bad_alloc&) {
        return complain("moe-plan: out of memory", moe::Fault::failure);
    } catch (const std::exception& error) {
        return complain(fmt::format("moe-plan: {}", error.what()), moe::Fault::failure);
    }
}
