// Defines the verbs that train, and those that read and write what training needs.
#include "tools/cli/command_parts.hpp"
#include "tools/cli/description.hpp"
#include "tools/cli/texts.hpp"

namespace moe::tools {

namespace {

void add_weights(CLI::App* verb, WeightsOptions& o) {
    add(verb, "--model", o.model, "DIR", "Hugging Face folder: config.json and safetensors");
    add(verb, "--checkpoint", o.checkpoint, "DIR", "or a folder of execute --checkpoint, of which the newest is taken");
    add(verb, "--backend", o.backend, "cpu|cuda", "cpu or cuda")->capture_default_str();
    add(verb, "--precision", o.precision, "fp32|bf16", "fp32 or bf16 (default: fp32 on the CPU, bf16 on GPUs)");
}

} // namespace

void add_execute(CLI::App& app, ExecuteOptions& o) {
    CLI::App* verb = add_verb(
        app, o, "execute", "train with exactly that plan; under mpirun, srun or torchrun every process is one rank",
        "moe-plan execute plan.json --data text --steps 300 --run-dir runs/first", [&o] { execute_verb(o); });
    add(verb, "PLAN", o.plan, "FILE", "plan.json")->required();
    add(verb, "--data", o.data, "[W] PREFIX",
        "[W] PREFIX of a Megatron .bin/.idx pair, drawn from by weight W; may be repeated")
        ->required()
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    add(verb, "--steps", o.steps, "N", "training steps")->capture_default_str();
    add(verb, "--backend", o.backend, "cpu|cuda", "cpu, or cuda: a GPU for every rank")->capture_default_str();
    add(verb, "--init-from", o.init_from, "DIR",
        "start from the weights of a Hugging Face folder (safetensors), or of the newest checkpoint of a run; "
        "the plan's vocabulary may be larger");
    add(verb, "--from-torch-dist", o.from_torch_dist, "DIR",
        "start from the weights of a Megatron-Core distributed checkpoint (torch_dist): the folder of one iteration")
        ->excludes("--init-from");
    verb->add_flag("--upcycle", o.upcycle,
                   "with --init-from: DIR holds a dense model, of whose MLPs the experts are made")
        ->needs("--init-from");
    add(verb, "--run-dir", o.run_dir, "DIR",
        "folder for plan.json, run.json, predicted.json, measured.json and routing.csv");
    add(verb, "--metrics", o.metrics, "DIR",
        "folder of the history: metrics.jsonl, a line per step, and events for TensorBoard; kept through --resume");
    add(verb, "--valid-data", o.valid_data, "PREFIX",
        "tokens of PREFIX.bin and PREFIX.idx that are not trained on: their loss behind the last step");
    add(verb, "--eval-interval", o.eval_interval, "N", "with --valid-data: also every N steps");
    add(verb, "--eval-batches", o.eval_batches, "N",
        "with --valid-data: global batches that are evaluated (default: all of it)");
    add(verb, "--trace", o.trace, "FILE",
        "write the measured timeline as Chrome trace JSON, NAME.json.gz or NAME.pftrace (see replay)");
    add(verb, "--report", o.report, "FILE",
        "write a self-contained HTML page of the run, or its data where FILE ends in .json");
    add(verb, "--checkpoint", o.checkpoint, "DIR",
        "folder of checkpoints: one at the end, and one when SIGTERM or Ctrl-C ends the run (exit status 0)");
    add(verb, "--save-interval", o.save_interval, "N", "also save every N steps");
    add(verb, "--keep-checkpoints", o.keep_checkpoints, "N",
        "remove all checkpoints but the newest N (default: all stay)");
    add(verb, "--log-interval", o.log_interval, "N", "a line of the log for every N-th step")->capture_default_str();
    verb->add_flag("--resume", o.resume,
                   "go on from the newest whole checkpoint, of this or any other plan for the same model");
    add(verb, "--allow-change", o.allow_change, "FIELD",
        "with --resume: a field that may differ from the checkpoint's, such as rope_theta, data, shuffle or seed; may "
        "be repeated")
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    add(verb, "--shuffle", o.shuffle, "on|off", "on or off: order of the samples")->capture_default_str();
    add(verb, "--lr", o.lr, "X", "peak learning rate")->capture_default_str();
    add(verb, "--lr-schedule", o.lr_schedule, "constant|cosine|linear|wsd|inverse-sqrt",
        "constant, cosine, linear, wsd (falls at the end alone) or inverse-sqrt")
        ->capture_default_str();
    add(verb, "--min-lr", o.min_lr, "X", "lowest learning rate behind the warm-up (default: a tenth of --lr)")
        ->check(CLI::NonNegativeNumber);
    add(verb, "--lr-decay-steps", o.lr_decay_steps, "N",
        "with wsd: last steps over which the rate falls (default: a tenth of --steps)");
    add(verb, "--warmup", o.warmup, "N", "steps over which the learning rate rises")->capture_default_str();
    add(verb, "--optimizer", o.optimizer, "adamw|adamw+bf16_moments|adamw+fp8_exp_avg|muon",
        "in place of the plan's optimizer; muon moves the matrices of layers, and AdamW all else");
    add(verb, "--lora", o.lora, "RANK",
        "freeze every weight and train low-rank adapters of this rank in its place (none: the plan's are left out)");
    add(verb, "--lora-alpha", o.lora_alpha, "A", "with --lora: adapters count A / RANK (default: 32)");
    add(verb, "--lora-targets", o.lora_targets, "LIST",
        "with --lora: what gets adapters, of attention,dense,experts (default: all; dense: MLPs and shared experts)");
    add(verb, "--betas", o.betas, "A,B", "AdamW's decay rates, A,B")->capture_default_str();
    add(verb, "--eps", o.eps, "X", "AdamW's epsilon")->capture_default_str();
    add(verb, "--weight-decay", o.weight_decay, "X", "AdamW's weight decay")->capture_default_str();
    add(verb, "--grad-clip", o.grad_clip, "X", "largest global gradient norm, 0 = no clipping")->capture_default_str();
    CLI::Option* qk_clip = add(verb, "--qk-clip", o.qk_clip, "X",
                               "QK-clip: behind a step, weights of queries and keys of attention heads whose largest "
                               "logit was above X are scaled down to it (0: off)")
                               ->capture_default_str();
    add(verb, "--qk-clip-alpha", o.qk_clip_alpha, "A",
        "with --qk-clip: the share of the scale that queries take, keys take the rest")
        ->capture_default_str()
        ->needs(qk_clip);
    add(verb, "--rampup-batch-size", o.rampup_batch_size, "START,INCREMENT,SAMPLES",
        "samples of the first steps: from START up by INCREMENT to the plan's batch, which it has behind SAMPLES "
        "samples");
    add(verb, "--ema", o.ema, "DECAY",
        "keep an average of the weights in the host's memory, which moves by 1 - DECAY of the way to them at every "
        "step; export --ema takes it (0: none)")
        ->capture_default_str();
    add(verb, "--freeze", o.freeze, "PATTERN",
        "weights that keep every bit: names such as embed*, *experts*, *router* or layers.0-3; may be repeated")
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    add(verb, "--lr-group", o.lr_groups, "PATTERN=X[,decay=W]",
        "weights whose learning rate is X times the others', and whose weight decay is W; may be repeated")
        ->allow_extra_args(false)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
    add(verb, "--aux-loss", o.aux_loss, "X",
        "coefficient of the balancing loss or none, in place of the plan's aux_loss (a plan without balance gets the "
        "model's own)");
    add(verb, "--bias-update", o.bias_update, "X",
        "step of the selection bias or none, in place of the plan's bias_update (likewise)");
    add(verb, "--balance", o.balance, "natural|forced",
        "natural, or forced: experts evenly loaded whatever the router says");
    add(verb, "--record-routing", o.record_routing, "DIR",
        "router replay: write which experts every token goes to, a file for each step");
    add(verb, "--replay-routing", o.replay_routing, "DIR",
        "router replay: send the same tokens to the recorded experts, under any plan; their weights are by the logits");
    add(verb, "--seed", o.seed, "N", "seed of weights and sample order")->capture_default_str();
    add(verb, "--listen", o.listen, "ADDRESS",
        "address at which the process of rank 0 waits for the others (default: that of MASTER_ADDR)");
    verb->add_flag("--skip-bad-steps", o.skip_bad_steps,
                   "a step whose gradients have no finite norm changes no weight, and the run goes on");
    add(verb, "--spike-norm", o.spike_norm, "X",
        "with --skip-bad-steps: a step is bad, too, whose norm is above X times the median of the last 32 steps (0: "
        "none)")
        ->capture_default_str();
    add(verb, "--back-after", o.back_after, "N",
        "with --skip-bad-steps: behind N bad steps in a row go back to the last checkpoint and on with other data (0: "
        "never)")
        ->capture_default_str();
    add(verb, "--hang-timeout", o.hang_timeout, "SECONDS",
        "seconds in one op after which a rank hangs and the run ends (0: never)")
        ->capture_default_str();
}

void add_evaluate(CLI::App& app, EvaluateOptions& o) {
    CLI::App* verb = add_verb(app, o, "evaluate", "loss and perplexity of a model over a text",
                              "moe-plan evaluate --model exported --data runs/text", [&o] { evaluate_verb(o); });
    add_weights(verb, o);
    add(verb, "--data", o.data, "PREFIX", "tokens of PREFIX.bin and PREFIX.idx, each predicted once")->required();
    add(verb, "--plan", o.plan, "PLAN", "run it by this plan for the same model (default: one rank)");
    add(verb, "--seq", o.seq, "N", "tokens per sequence (default: as the model takes, up to 1024)");
    add(verb, "--batch", o.batch, "N", "sequences at once")->capture_default_str();
    add(verb, "--batches", o.batches, "N", "batches of the data that are evaluated (default: all of it)");
}

void add_generate(CLI::App& app, GenerateOptions& o) {
    CLI::App* verb =
        add_verb(app, o, "generate", "text by a model, to see what it has learned",
                 "moe-plan generate --model exported --prompt 'This program is'", [&o] { generate_verb(o); });
    add_weights(verb, o);
    add(verb, "--prompt", o.prompt, "TEXT", "text that is gone on with")->required();
    add(verb, "--tokenizer", o.tokenizer, "FILE",
        "tokenizer.json or tokenizer.model (default: the model folder's, or bytes where the vocabulary is 256)");
    add(verb, "--tokens", o.tokens, "N", "most tokens; the model's end of text ends it before")->capture_default_str();
    add(verb, "--temperature", o.temperature, "T", "divides the logits; 0 takes the likeliest token")
        ->capture_default_str();
    add(verb, "--top-k", o.top_k, "K", "draw from the K likeliest tokens (0: all)")->capture_default_str();
    add(verb, "--top-p", o.top_p, "P", "draw from the fewest tokens whose probabilities come to P")
        ->capture_default_str();
    add(verb, "--seed", o.seed, "N", "seed of the draws")->capture_default_str();
}

void add_calibrate(CLI::App& app, CalibrateOptions& o) {
    CLI::App* verb = add_verb(app, o, "calibrate", "measure this machine, or fit a stack to runs of one's own",
                              "moe-plan calibrate --backend cpu --out here.json", [&o] { calibrate_verb(o); });
    add(verb, "--backend", o.backend, "cpu|cuda", "cpu: this machine's cores, or cuda: its GPUs")
        ->capture_default_str();
    add(verb, "--gpus", o.gpus, "N", "cuda: communication is measured among 2, 4, .. of so many (0: all there are)")
        ->capture_default_str();
    add(verb, "--from", o.from, "HARDWARE",
        "cuda: a profile measured on one GPU of this kind; only communication is measured. With --runs: "
        "the profile to add to (default: that of the first run's plan)");
    add(verb, "--runs", o.runs, "DIR",
        "RUN_DIR.. of execute: what their ops took joins the profile, and nothing is measured now");
    add(verb, "--merge", o.merge, "FILE",
        "profiles of single cards, two or more: writes one of their kind, whose calls are the means over the cards, "
        "and measures nothing");
    add(verb, "--anchor", o.anchors, "FILE",
        "RUNS.csv or PLAN.json:LOG of the engine's own log, one to ten runs: with --stack, writes a stack whose "
        "coefficients have seen them, and nothing is measured now");
    add(verb, "--stack", o.stack, "STACK", "with --anchor: the published stack that they were run with");
    add_written(verb, "--out", o.out, "the hardware profile; with --anchor the stack")->required();
}

void add_tokenize(CLI::App& app, TokenizeOptions& o) {
    CLI::App* verb =
        add_verb(app, o, "tokenize", "text files to a Megatron .bin/.idx pair",
                 "moe-plan tokenize /usr/share/common-licenses/GPL-3 --out text", [&o] { tokenize_verb(o); });
    add(verb, "TEXT", o.texts, "FILE", "text files, one document each")->required();
    add(verb, "--out", o.out, "PREFIX", "prefix of the pair")->required();
    add(verb, "--vocab", o.vocab, "bytes|FILE",
        "bytes: token ids are the bytes 0-255; or a Hugging Face tokenizer.json or SentencePiece's tokenizer.model")
        ->capture_default_str();
    verb->add_flag(
        "--append-eod", o.append_eod,
        "end every document with the end-of-document token: the eos_token of the tokenizer_config.json beside "
        "--vocab FILE, or the one that its added tokens have");
    verb->add_flag(
        "--chat", o.chat,
        "texts are JSON lines of {\"messages\": [{\"role\", \"content\"}, ..]}: written by the chat template "
        "beside --vocab FILE, with a loss mask over the answers (PREFIX.loss.bin and .idx)");
}

void add_export(CLI::App& app, ExportVerbOptions& o) {
    CLI::App* verb =
        add_verb(app, o, "export", "checkpoint to a Hugging Face folder",
                 "moe-plan export --checkpoint runs/first/checkpoints --out exported", [&o] { export_verb(o); });
    add(verb, "--checkpoint", o.checkpoint, "DIR",
        "folder of execute --checkpoint; its newest whole checkpoint is taken")
        ->required();
    add(verb, "--out", o.out, "DIR", "folder for safetensors and config.json")->required();
    add(verb, "--dtype", o.dtype, "fp32|bf16", "fp32: master weights bit for bit, or bf16")->capture_default_str();
    verb->add_flag("--ema", o.ema, "the average that execute --ema has kept, in place of the weights");
    add(verb, "--tokenizer", o.tokenizer, "DIR",
        "folder of a tokenizer, such as the model's that was fine-tuned: its files and generation_config.json are "
        "copied");
}

} // namespace moe::tools
