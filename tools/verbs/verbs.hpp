// The verbs of the command: what each takes, and the function that carries it out.
#pragma once

#include "tools/print/output.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

// Every verb throws Error; what it returns normally has been printed and written completely.

struct MoneyOptions {                          // of search; empty = not given
    std::optional<double> price;               // dollars per GPU and hour
    std::optional<double> mtbf;                // hours between failures of one GPU
    std::string tokens;                        // to train on: a number, or one with K, M, B or T
    std::optional<double> deadline;            // hours
    std::optional<double> storage_bandwidth;   // GB/s of a GPU
    std::optional<double> restart;             // minutes
    std::optional<double> checkpoint_interval; // minutes
};

struct SearchOptions : OutputOptions {
    std::string model, hardware;                           // files, or names in profiles/
    static constexpr std::int64_t fewest_gpus = 0;         // --gpus auto
    static constexpr std::int64_t most_for_fewest = 16384; // and up to how many are looked at
    std::int64_t gpus = 1, gbs = 0, seq = 0;               // gbs: sequences per step; seq: tokens per sequence
    std::vector<std::int64_t> more_gpus;                   // further numbers that are searched beside `gpus`
    std::string precisions;                                // comma-separated, empty = the search's own choice
    std::string stack;                                     // empty = the hardware's default
    std::vector<std::string> fix;                          // FIELD=VALUE
    std::int64_t top = 5;
    std::string lengths;                   // file of document lengths, empty = samples are whole or the plan's own
    std::string optimize_for = "mean";     // of skewed routing: mean, p50 or p99
    std::int64_t spare_experts = 2;        // of skewed routing: slots of a rank for copies of hot experts
    std::optional<double> memory_headroom; // share of a GPU's memory that plans leave free; empty = the stack's own
    std::string out;                       // plan.json of the best plan, empty = not written
    MoneyOptions money;
    bool no_neighbours = false; // predictions are not corrected by runs nearby
};
void search_verb(const SearchOptions& options);

struct ReplayOptions : OutputOptions {
    std::string plan;
    std::string lengths;            // as search's
    std::vector<std::string> set;   // FIELD=VALUE, changes of the plan before it is replayed
    std::string trace, report;      // empty = not written
    std::string command;            // as typed, for the report
    std::int64_t spare_experts = 2; // as search's
    bool no_neighbours = false;     // as in SearchOptions
};
void replay_verb(const ReplayOptions& options);

struct ExplainOptions : OutputOptions {
    std::string plan;      // empty: the best plan of `request`, or why it has none
    SearchOptions request; // only without a plan
    std::string versus;    // another plan, empty = none
};
void explain_verb(const ExplainOptions& options);

struct ExecuteOptions : OutputOptions {
    std::string plan;
    std::vector<std::string> data; // prefixes of .bin/.idx pairs, each with or without "WEIGHT " before it
    std::int64_t steps = 100;
    std::string backend = "cpu";
    std::string run_dir, trace;        // empty = not written
    std::string report;                // likewise
    std::string metrics;               // folder of the history, empty = none
    std::string valid_data;            // prefix of a .bin/.idx pair, empty = no evaluation
    std::int64_t eval_interval = 0;    // steps, 0 = only behind the last one
    std::int64_t eval_batches = 0;     // global batches of the validation data, 0 = all of it
    std::string init_from;             // folder of initial weights (Hugging Face or checkpoints), empty = random
    std::string from_torch_dist;       // folder of a Megatron-Core checkpoint, in place of init_from
    bool upcycle = false;              // init_from holds a dense model, of which the experts are made
    std::string checkpoint;            // folder, empty = none
    std::int64_t save_interval = 0;    // steps, 0 = only at the end
    std::int64_t keep_checkpoints = 0; // newest ones that stay, 0 = all
    bool resume = false;
    std::vector<std::string> allow_change; // fields in which a resumed run may differ from its checkpoint's
    std::string shuffle = "on";
    double lr = 1e-3;
    std::string lr_schedule = "constant";
    double min_lr = -1.0;            // below 0: a tenth of lr
    std::int64_t lr_decay_steps = 0; // of wsd, 0 = a tenth of the steps
    std::int64_t warmup = 0;         // steps
    std::string betas = "0.9,0.95";
    double eps = 1e-8, weight_decay = 0.1, grad_clip = 1.0;
    std::string rampup_batch_size;              // as train::BatchRamp is written, empty = none
    double ema = 0.0;                           // decay of the average of the weights, 0 = none
    double qk_clip = 0.0, qk_clip_alpha = 0.5;  // of train::QkClip
    std::vector<std::string> freeze, lr_groups; // patterns; PATTERN=FACTOR[,decay=W]
    bool skip_bad_steps = false;                // those whose norm is not finite
    double spike_norm = 0.0;     // and those with so many times the median of the norms before, 0 = none of them
    std::int64_t back_after = 0; // bad steps in a row behind which the run goes back to its checkpoint, 0 = never
    // Plan fields of these names, empty = as in the plan; where neither chooses a balance, plan::own_balance() does.
    std::string aux_loss, bias_update, balance, optimizer;
    std::string record_routing, replay_routing; // folders of router replay, empty = none
    std::string lora, lora_alpha, lora_targets; // of plan::Lora
    std::int64_t seed = 1;
    std::string listen;            // address at which rank 0 waits for the others, empty = that of MASTER_ADDR
    double hang_timeout = 20.0;    // seconds that an op may take
    std::int64_t log_interval = 1; // steps between lines of the log
    std::string command;           // as typed, for run.json and the report
};
void execute_verb(const ExecuteOptions& options);

// Weights that are used as they are: a Hugging Face folder or a folder of checkpoints, one of the two.
struct WeightsOptions : OutputOptions {
    std::string model, checkpoint;
    std::string backend = "cpu";
    std::string precision; // empty: fp32 on the CPU, bf16 on GPUs
};

struct EvaluateOptions : WeightsOptions {
    std::string data;         // prefix of a .bin/.idx pair
    std::string plan;         // how it is run, empty: one rank
    std::int64_t seq = 0;     // tokens per sequence, 0 = as the plan, else what the model takes, up to 1024
    std::int64_t batch = 1;   // sequences at once, without a plan
    std::int64_t batches = 0; // of the data, 0 = all of it
};
void evaluate_verb(const EvaluateOptions& options);

struct GenerateOptions : WeightsOptions {
    std::string prompt;
    std::string tokenizer;    // tokenizer.json, empty: the model folder's, or bytes where the vocabulary is 256
    std::int64_t tokens = 64; // at most
    double temperature = 0.0; // 0: the likeliest token each time
    std::int64_t top_k = 0;   // 0: all
    double top_p = 1.0;
    std::int64_t seed = 1;
};
void generate_verb(const GenerateOptions& options);

struct CompareOptions : OutputOptions {
    std::vector<std::string> traces; // predicted and measured, one run directory, or a plan with one of the two below
    std::string log;                 // a training log of another engine, empty = none
    std::string profile;             // a profile of another engine, empty = none
    std::string kernels;             // with a profile: a kernel table, empty = that of the plan's stack
    std::int64_t steps = 0;          // with a profile: steps that it holds, 0 = as it says
    std::int64_t rank = -1;          // with a profile: whose it is, -1 = as it says
    bool no_neighbours = false;      // with a log: as in SearchOptions
    std::string report;              // of traces or a run directory, empty = not written
    std::string command;             // as typed, for the report
};
void compare_verb(const CompareOptions& options);
// Its part for logs and profiles of other engines.
void compare_with_plan(const CompareOptions& options);

struct CalibrateOptions : OutputOptions {
    std::string backend = "cpu";
    int gpus = 0; // of this machine, 0 = all
    // A profile measured on one such GPU: only what lies between GPUs is measured. With runs: what they are added to.
    std::string from;
    std::vector<std::string> runs;  // folders of execute: nothing else is measured
    std::vector<std::string> merge; // profiles of single cards, written as one of their kind: nothing is measured
    // The user's own runs of another engine, as CSV files and as PLAN.json:LOG: they move the coefficients of `stack`,
    // which is written as a file; nothing is measured.
    std::vector<std::string> anchors;
    std::string stack;
    std::string out;
};
void calibrate_verb(const CalibrateOptions& options);
// Its part for anchors.
void calibrate_anchors(const CalibrateOptions& options);

struct ValidateOptions : OutputOptions {
    std::string runs; // CSV file, name in profiles/runs, or a folder; empty = all of profiles/runs
    std::string row;  // part of the ids of the rows to predict, empty = all
    std::int64_t worst = 10;
    bool improve = false;       // search for a better plan than each published one
    bool no_neighbours = false; // as in SearchOptions
};
void validate_verb(const ValidateOptions& options);

struct TokenizeOptions : OutputOptions {
    std::vector<std::string> texts;
    std::string out; // prefix of the .bin/.idx pair
    std::string vocab = "bytes";
    bool append_eod = false; // every document ends with the end-of-document token
    bool chat = false;       // the texts are JSON lines of messages
};
void tokenize_verb(const TokenizeOptions& options);

struct ExportVerbOptions : OutputOptions {
    std::string checkpoint; // folder of checkpoints, of which the newest whole one is taken
    std::string out;        // Hugging Face folder
    std::string dtype = "fp32";
    bool ema = false;      // the average of the weights in their place
    std::string tokenizer; // folder whose tokenizer and generation config go with the weights, empty = none
};
void export_verb(const ExportVerbOptions& options);

struct LaunchOptions : OutputOptions {
    std::string plan;
    // One of them: launchers of execute, then other engines.
    bool slurm = false, mpi = false, kubernetes = false;
    bool megatron_core = false, megatron_lm = false, megatron_bridge = false;
    bool torchtitan = false, automodel = false;
    std::string data = "text";             // prefix of the dataset where the job runs
    std::string arguments;                 // more words for execute
    std::string image, claim = "moe-plan"; // Kubernetes: container image, volume claim
    std::int64_t per_node = 0;             // GPUs of a node, 0 = as the hardware profile says
    std::string out;                       // file, empty = stdout
};
void launch_verb(const LaunchOptions& options);

struct ImportVerbOptions : OutputOptions {
    std::vector<std::string> files;
    std::string from;                      // engine, empty = as the files tell
    std::string model, hardware, stack;    // empty model: as the files say; empty stack: the hardware's default
    std::optional<std::int64_t> gpus, seq; // none = as the files say
    bool alone = false;                    // files that scripts read or start are not read
    std::string out;                       // plan.json, empty = not written
};
void import_verb(const ImportVerbOptions& options);

struct ShowOptions : OutputOptions {
    std::string topic;       // models, hardware, stacks, model, stack or plan
    std::string name;        // empty: all of the topic
    std::string hardware;    // of a stack, whose figures go by machine; empty = a machine whose default it is
    std::int64_t seq = 4096; // tokens per sequence, which a model's FLOPs per token go by
};
void show_verb(const ShowOptions& options);

struct UiOptions : OutputOptions {
    std::int64_t port = 0;            // 0 = a free one
    std::string listen = "127.0.0.1"; // address
};
void ui_verb(const UiOptions& options);

} // namespace moe::tools
