// Defines every verb with its options, their kinds of values, a line of explanation and an example.
#include "tools/cli/commands.hpp"

#include "planner/base/error.hpp"
#include "tools/cli/command_parts.hpp"
#include "tools/cli/description.hpp"
#include "tools/cli/help.hpp"
#include "tools/cli/texts.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <filesystem>
#include <functional>

namespace moe::tools {

std::string check_whole(const std::string& name, const std::string& text) {
    const std::size_t sign = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
    const std::string digits = text.substr(sign);
    if (digits.size() > 1 && digits[0] == '0' && std::isxdigit(static_cast<unsigned char>(digits.back())) != 0)
        refuse("{} {}: must be a whole number in plain decimal digits", name, text);
    std::int64_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error == std::errc::result_out_of_range) refuse("{} {}: must be a whole number within 64 bits", name, text);
    return {};
}

CLI::Option* add_written(CLI::App* verb, const std::string& name, std::string& value, const std::string& about) {
    return add(verb, name, value, "FILE", about)->check([name](const std::string& path) {
        std::error_code ignored;
        const std::filesystem::path folder = std::filesystem::path(path).parent_path();
        if (std::filesystem::is_directory(path, ignored)) refuse("{} {}: is a folder: name a file", name, path);
        if (!folder.empty() && !std::filesystem::is_directory(folder, ignored))
            refuse("{} {}: there is no folder {}", name, path, folder.string());
        return std::string();
    });
}

CLI::App* add_verb(CLI::App& app, OutputOptions& o, const std::string& name, const std::string& about,
                   const std::string& example, std::function<void()> run) {
    CLI::App* verb = app.add_subcommand(name, about)->group("Verbs");
    verb->footer("Example:\n  " + example);
    verb->add_flag("--json", o.json, "one JSON document on stdout, everything else on stderr")->group("Output");
    verb->add_flag("--verbose", o.verbose, "all columns of tables, and details")->group("Output");
    verb->add_flag("--quiet", o.quiet, "results, warnings and errors alone")->group("Output");
    verb->callback([&o, run = std::move(run)] {
        if (o.verbose && o.quiet) refuse("--verbose --quiet: leave one of them out");
        run();
    });
    return verb;
}

namespace {

// "auto", a number, or several as "256,512".
void read_gpus(SearchOptions& o, const std::string& text) {
    o.more_gpus.clear();
    o.gpus = SearchOptions::fewest_gpus;
    if (text == "auto") return;
    std::vector<std::int64_t> numbers;
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t comma = std::min(text.find(',', at), text.size());
        std::int64_t number = 0;
        const char* end = text.data() + comma;
        const auto [last, error] = std::from_chars(text.data() + at, end, number);
        if (error != std::errc{} || last != end || number < 1)
            refuse("--gpus {}: must be a whole number of 1 or more, or auto, or several such as 64,128", text);
        if (std::find(numbers.begin(), numbers.end(), number) == numbers.end()) numbers.push_back(number);
        at = comma + 1;
    }
    o.gpus = numbers.front();
    o.more_gpus.assign(numbers.begin() + 1, numbers.end());
}

void add_spare_experts(CLI::App* verb, std::int64_t& spare_experts) {
    add(verb, "--spare-experts", spare_experts, "N",
        "with skewed routing: slots of each rank for copies of hot experts, of which is said what they would give")
        ->capture_default_str();
}

void add_neighbours(CLI::App* verb, bool& off) {
    verb->add_flag("--no-neighbours", off, "do not correct predictions by the residuals of published runs nearby");
}

void add_lengths(CLI::App* verb, std::string& lengths, const char* text) {
    add(verb, "--lengths", lengths, "FILE", text);
}

// Adds the options of a request; `required`: there is no plan that could stand for it.
void add_request(CLI::App* verb, SearchOptions& o, bool required) {
    add(verb, "--model", o.model, "MODEL", "Hugging Face config.json, or the name of a model profile")
        ->required(required);
    add(verb, "--hardware", o.hardware, "HARDWARE", "hardware profile, or the name of one")->required(required);
    verb->add_option_function<std::string>(
            "--gpus", [&o](const std::string& text) { read_gpus(o, text); },
            "GPUs of the job (CPU: ranks); auto: the fewest for which there is a plan; search: several as A,B, ranked "
            "by "
            "GPU-hours")
        ->type_name("N|auto")
        ->required(required);
    add(verb, "--gbs", o.gbs, "N", "global batch, sequences per step")->required(required);
    add(verb, "--seq", o.seq, "N", "tokens per sequence")->required(required);
    add(verb, "--precision", o.precisions, "PRECISION,..",
        "fp32 bf16 fp8-tensor fp8-blockwise mxfp8 nvfp4; several as A,B");
    add(verb, "--stack", o.stack, "STACK", "software generation (default: the hardware's newest)");
    add(verb, "--fix", o.fix, "FIELD=VALUE", "pin a plan field; may be repeated")
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    add_lengths(verb, o.lengths,
                "histogram of document lengths, lines of length,documents: plans mask documents, attention is priced "
                "within them, and step times have a p50 and a p99");
    add(verb, "--memory-headroom", o.memory_headroom, "SHARE",
        "share of a GPU's memory that plans leave free, such as 0.1; by default the stack's own: 0.05 for published "
        "stacks, whose allocator reserves more than it gives out, and 0 for moe-plan, whose memory is exact");
    add_neighbours(verb, o.no_neighbours);
}

// What a run costs and how long it takes: GPU-hours rank where --gpus has several numbers or one of these is given.
void add_money(CLI::App* verb, MoneyOptions& o) {
    add(verb, "--price", o.price, "DOLLARS", "of a GPU-hour: what plans cost");
    add(verb, "--mtbf", o.mtbf, "HOURS",
        "mean time between failures of one GPU, such as 50000: goodput, with checkpoints and restarts (default: "
        "failures "
        "are left out)");
    add(verb, "--tokens", o.tokens, "T", "tokens to train on, such as 15e12 or 15T (default: figures are of 1T)");
    add(verb, "--deadline", o.deadline, "HOURS",
        "for --tokens: plans that end later are left out; with --gpus auto, numbers of GPUs that may do it are "
        "searched");
    add(verb, "--storage-bandwidth", o.storage_bandwidth, "GB/S",
        "of each GPU while all write a checkpoint, for which training stops (default: 0.122, as 2 TB/s for 16,384 "
        "GPUs)");
    add(verb, "--restart", o.restart, "MINUTES", "from a failure until training goes on (default: 10)");
    add(verb, "--checkpoint-interval", o.checkpoint_interval, "MINUTES",
        "of training between two checkpoints (default: the best by Daly's formula, for each plan)");
}

void add_search(CLI::App& app, SearchOptions& o) {
    CLI::App* verb = add_verb(app, o, "search", "explore the whole plan space and rank it",
                              "moe-plan search --model DeepSeek-V3 --hardware gb200-nvl72 --gpus 256 --gbs 4096 "
                              "--seq 4096 --precision mxfp8 --out plan.json",
                              [&o] { search_verb(o); });
    add_request(verb, o, true);
    add(verb, "--top", o.top, "N", "how many plans to show, each of another mapping (TP, CP, DP, PP, EP, ETP)")
        ->capture_default_str();
    add(verb, "--optimize-for", o.optimize_for, "mean|p50|p99",
        "steps to rank by where --fix routing=dirichlet:A, zipf:S or a histogram's file: mean p50 p99")
        ->capture_default_str();
    add_spare_experts(verb, o.spare_experts);
    add_written(verb, "--out", o.out, "write the best plan to this file");
    add_money(verb, o.money);
}

void add_replay(CLI::App& app, ReplayOptions& o) {
    CLI::App* verb =
        add_verb(app, o, "replay", "simulate a plan event by event",
                 "moe-plan replay plan.json --trace trace.json --report report.html", [&o] { replay_verb(o); });
    add(verb, "PLAN", o.plan, "FILE", "plan.json")->required();
    add_written(verb, "--trace", o.trace,
                "write the timeline, which ui.perfetto.dev opens: Chrome trace JSON (NAME.json.gz: compressed), or "
                "NAME.pftrace "
                "in Perfetto's own format with memory, links and arrows");
    add_written(verb, "--report", o.report, "write a self-contained HTML page, or its data where FILE ends in .json");
    add(verb, "--set", o.set, "FIELD=VALUE", "change a field of the plan first; may be repeated")
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    add_lengths(verb, o.lengths,
                "histogram of document lengths, lines of length,documents, in place of the plan's own; the plan must "
                "mask documents");
    add_spare_experts(verb, o.spare_experts);
    add_neighbours(verb, o.no_neighbours);
}

void add_explain(CLI::App& app, ExplainOptions& o) {
    CLI::App* verb = add_verb(app, o, "explain", "why this plan: its walls, what each single change would do",
                              "moe-plan explain plan.json --versus other.json", [&o] { explain_verb(o); });
    add(verb, "PLAN", o.plan, "FILE",
        "plan.json; without one, a request as for search: its best plan, or why it has none");
    add_request(verb, o.request, false);
    add(verb, "--versus", o.versus, "PLAN", "another plan.json: what differs, by op kind and by class of memory");
    add_spare_experts(verb, o.request.spare_experts);
}

void add_compare(CLI::App& app, CompareOptions& o) {
    CLI::App* verb = add_verb(app, o, "compare", "line up predicted and measured, op by op",
                              "moe-plan compare runs/first", [&o] { compare_verb(o); });
    add(verb, "RUN_DIR", o.traces, "FILE",
        "a run directory, or two traces: PREDICTED MEASURED; with --log or --profile the plan that ran")
        ->required()
        ->expected(1, 2);
    add(verb, "--log", o.log, "FILE",
        "training log of Megatron-LM, torchtitan, NeMo or another known engine (also .gz)");
    add(verb, "--profile", o.profile, "FILE",
        "trace of PyTorch's profiler (.json, .json.gz), or SQLite export of Nsight Systems");
    add(verb, "--steps", o.steps, "N", "with --profile: steps that it holds (default: its ProfilerStep#N)");
    add(verb, "--rank", o.rank, "N", "with --profile: the rank whose it is (default: as it says, else 0)");
    add(verb, "--kernels", o.kernels, "FILE",
        "with --profile: table of kernel names, or the name of one in profiles/kernels (default: the stack's)");
    add_written(verb, "--report", o.report,
                "write a self-contained HTML page of traces or a run directory, or its data where FILE ends in .json");
    add_neighbours(verb, o.no_neighbours);
}

void add_validate(CLI::App& app, ValidateOptions& o) {
    CLI::App* verb = add_verb(app, o, "validate", "predict published runs, each with the very plan of its row",
                              "moe-plan validate runs.csv --json", [&o] { validate_verb(o); });
    add(verb, "RUNS", o.runs, "FILE", "CSV file of runs, or the name of one in profiles/runs (default: all of these)");
    add(verb, "--row", o.row, "TEXT", "only runs whose id contains this");
    add(verb, "--worst", o.worst, "N", "how many of the widest misses to show")->capture_default_str();
    verb->add_flag("--improve", o.improve,
                   "search the same GPUs for a plan that is predicted faster than each published one (seconds a row)");
    add_neighbours(verb, o.no_neighbours);
}

void add_launch(CLI::App& app, LaunchOptions& o) {
    CLI::App* verb = add_verb(app, o, "launch", "the file that runs a plan: a job of execute, or another engine's",
                              "moe-plan launch plan.json --slurm --data text --arguments '--steps 300' --out job.sh",
                              [&o] { launch_verb(o); });
    add(verb, "PLAN", o.plan, "FILE", "plan.json, where the job finds it as well")->required();
    verb->add_flag("--slurm", o.slurm, "a script for sbatch");
    verb->add_flag("--mpi", o.mpi, "a script that calls Open MPI's mpirun");
    verb->add_flag("--k8s", o.kubernetes, "a Kubernetes Job with a pod per node, its Service, and the plan");
    verb->add_flag("--megatron-lm", o.megatron_lm, "a bash script that trains with Megatron-LM");
    verb->add_flag("--megatron-bridge", o.megatron_bridge, "YAML of overrides of a recipe of Megatron-Bridge");
    verb->add_flag("--torchtitan", o.torchtitan, "TOML of torchtitan's job configuration");
    verb->add_flag("--automodel", o.automodel, "YAML of NeMo AutoModel's benchmarking recipe");
    verb->add_flag("--megatron-core", o.megatron_core, "Megatron-Core's keyword arguments, as JSON");
    add(verb, "--data", o.data, "PREFIX", "prefix of the dataset where the job runs")->capture_default_str();
    add(verb, "--arguments", o.arguments, "TEXT", "more options of execute, as one word");
    add(verb, "--gpus-per-node", o.per_node, "N", "processes of a node (default: as the plan's hardware has GPUs)");
    add(verb, "--image", o.image, "IMAGE", "--k8s: container image with moe-plan in its PATH");
    add(verb, "--claim", o.claim, "CLAIM", "--k8s: volume claim that is mounted at /work")->capture_default_str();
    add_written(verb, "--out", o.out, "file to write (default: stdout)");
}

void add_import(CLI::App& app, ImportVerbOptions& o) {
    CLI::App* verb =
        add_verb(app, o, "import", "read another engine's launch file as a plan, and what speaks against it",
                 "moe-plan import pretrain.sh --hardware h100 --out plan.json", [&o] { import_verb(o); });
    add(verb, "FILE", o.files, "FILE",
        "launch script, argument list, YAML, TOML, or a log that prints its arguments; later files over earlier ones")
        ->required();
    add(verb, "--from", o.from, "megatron-lm|megatron-bridge|torchtitan|automodel",
        "whose file it is (default: as the file tells)");
    add(verb, "--model", o.model, "MODEL",
        "Hugging Face config.json, or the name of a model profile (default: as the file's sizes say)");
    add(verb, "--hardware", o.hardware, "HARDWARE", "hardware profile, or the name of one")->required();
    add(verb, "--gpus", o.gpus, "N", "GPUs of the job (default: nodes times processes of each, as the file says)");
    add(verb, "--seq", o.seq, "S", "tokens of a sequence (default: as the file says)");
    verb->add_flag("--alone", o.alone, "read the given files alone, and none that a script reads or starts");
    add(verb, "--stack", o.stack, "STACK", "software generation (default: the hardware's newest)");
    add_written(verb, "--out", o.out, "write the plan to this file");
}

void add_show(CLI::App& app, ShowOptions& o) {
    CLI::App* verb = add_verb(app, o, "show", "what a model, a machine, a stack or a plan was read as",
                              "moe-plan show model DeepSeek-V3 --seq 4096", [&o] { show_verb(o); });
    add(verb, "WHAT", o.topic, "models|hardware|stacks|model|stack|plan",
        "models, hardware or stacks: all names; model M, hardware H, stack S or plan PLAN: one of them")
        ->required();
    add(verb, "NAME", o.name, "NAME", "a name of that list, or a file");
    add(verb, "--seq", o.seq, "N", "model: tokens per sequence, by which its FLOPs per token go")
        ->capture_default_str();
    add(verb, "--hardware", o.hardware, "HARDWARE", "stack: the machine (default: one whose default stack it is)");
}

void add_ui(CLI::App& app, UiOptions& o) {
    CLI::App* verb = add_verb(app, o, "ui", "a local page to plan on; prints its address with a token",
                              "moe-plan ui --port 8080", [&o] { ui_verb(o); });
    add(verb, "--port", o.port, "N", "port (default: a free one)");
    add(verb, "--listen", o.listen, "ADDRESS",
        "address of this machine to listen on; others than 127.0.0.1 can be reached from outside, without encryption")
        ->capture_default_str();
}

void add_completion(CLI::App& app, TextOptions& o) {
    CLI::App* verb = add_verb(app, o, "completion", "the script that completes this command line in a shell",
                              "moe-plan completion bash > ~/.local/share/bash-completion/completions/moe-plan",
                              [&o, &app] { print_completion(o, describe(app)); });
    add(verb, "SHELL", o.kind, "bash|zsh|fish", "bash, zsh or fish")->required();
}

void add_man(CLI::App& app, ManOptions& o) {
    CLI::App* verb = add_verb(app, o, "man", "the manual page, for man -l -", "moe-plan man | man -l -",
                              [&o, &app] { print_manual(o, describe(app)); });
    verb->add_flag("--markdown", o.markdown, "as docs/reference/verbs.md");
}

} // namespace

struct Commands::Options {
    SearchOptions search;
    ReplayOptions replay;
    ExplainOptions explain;
    ExecuteOptions execute;
    EvaluateOptions evaluate;
    GenerateOptions generate;
    CompareOptions compare;
    CalibrateOptions calibrate;
    TokenizeOptions tokenize;
    ExportVerbOptions exported;
    LaunchOptions launch;
    ImportVerbOptions imported;
    ValidateOptions validate;
    ShowOptions show;
    UiOptions ui;
    TextOptions completion;
    ManOptions man;
};

Commands::Commands()
    : options_(std::make_unique<Options>()),
      app_(std::make_unique<CLI::App>(
          "Plans Mixture-of-Experts training: search a plan, replay it, execute it, compare both.", "moe-plan")) {
    CLI::App& app = *app_;
    app.formatter(help_formatter());
    app.set_help_flag("-h,--help", "print this help");
    app.set_version_flag("--version", std::string("moe-plan ") + MOE_PLAN_VERSION, "print the version");
    app.require_subcommand(1);
    app.footer("Exit status: 0 success, 1 failure while running, 2 bad input, 3 a sound\n"
               "request that no plan satisfies. Each verb has --help with an example.");
    Options& o = *options_;
    add_search(app, o.search);
    add_replay(app, o.replay);
    add_explain(app, o.explain);
    add_execute(app, o.execute);
    add_evaluate(app, o.evaluate);
    add_generate(app, o.generate);
    add_compare(app, o.compare);
    add_calibrate(app, o.calibrate);
    add_tokenize(app, o.tokenize);
    add_export(app, o.exported);
    add_launch(app, o.launch);
    add_import(app, o.imported);
    add_validate(app, o.validate);
    add_show(app, o.show);
    add_ui(app, o.ui);
    add_completion(app, o.completion);
    add_man(app, o.man);
}

Commands::~Commands() = default;

CLI::App& Commands::app() { return *app_; }

void Commands::remember(const std::string& typed) {
    options_->execute.command = options_->replay.command = options_->compare.command = typed;
}

} // namespace moe::tools
