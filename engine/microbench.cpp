// Measured op costs: runs of models of growing size, op times gathered by kind and size of work.
#include "engine/microbench.hpp"

#include "engine/backend.hpp"
#include "engine/trainer.hpp"
#include "planner/error.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace moe {

namespace {

enum class Family { qwen3, qwen2, deepseek };

struct Point {
    Family family;
    Precision precision;
    int hidden;
    std::int64_t seq, mbs;
    bool expert_tensor; // ETP 2 instead of EP 4
    bool one_rank;
};

struct Size {
    int hidden;
    std::int64_t seq, mbs;
    bool all_families, fp32;
};

// Small to large, so that a budget that runs out costs the far end and never a kind of op.
std::vector<Point> grid(bool one_rank) {
    const std::vector<Size> of_cores{{64, 64, 1, true, true},   {128, 128, 1, true, true},  {128, 256, 2, false, true},
                                     {256, 256, 1, true, true}, {512, 256, 1, false, true}, {512, 512, 2, false, true}};
    const std::vector<Size> of_gpus{{256, 256, 1, true, true},    {512, 512, 1, true, true},
                                    {1024, 1024, 1, true, true},  {1024, 2048, 2, true, false},
                                    {2048, 2048, 1, true, false}, {2048, 4096, 1, true, false}};
    std::vector<Point> points;
    for (const Size& size : one_rank ? of_gpus : of_cores)
        for (const Precision precision : {Precision::fp32, Precision::bf16}) {
            if (precision == Precision::fp32 && !size.fp32) continue;
            points.push_back({Family::qwen3, precision, size.hidden, size.seq, size.mbs, false, one_rank});
            if (!size.all_families) continue;
            points.push_back({Family::qwen2, precision, size.hidden, size.seq, size.mbs, true, one_rank});
            points.push_back({Family::deepseek, precision, size.hidden, size.seq, size.mbs, false, one_rank});
        }
    return points;
}

// Heads are as wide as real ones where sizes are; a machine's cores get narrow ones, of which small sizes have several.
struct Widths {
    int heads, kv_heads, head_dim, mla, mla_rope, experts, top_k;
};
Widths widths_of(const Point& p) {
    if (p.one_rank) return {p.hidden / 64, p.hidden / 256, 128, 128, 64, 16, 4};
    return {p.hidden / 16, p.hidden / 32, 32, 16, 16, 8, 2};
}

std::shared_ptr<const Model> model_of(const Point& p) {
    const Widths w = widths_of(p);
    const int expert = p.hidden;
    std::string config = fmt::format(
        R"({{"vocab_size": {}, "hidden_size": {}, "num_hidden_layers": 2, "num_attention_heads": {}, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": false, "rope_theta": 10000.0, "hidden_act": "silu", "moe_intermediate_size": {}, "intermediate_size": {},
        "num_experts_per_tok": {}, )",
        4 * p.hidden, p.hidden, w.heads, expert, 3 * p.hidden, w.top_k);
    switch (p.family) {
    case Family::qwen3:
        config += fmt::format(
            R"("architectures": ["Qwen3MoeForCausalLM"], "num_key_value_heads": {}, "head_dim": {}, "num_experts": {},
            "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []}})",
            w.kv_heads, w.head_dim, w.experts);
        break;
    case Family::qwen2:
        config += fmt::format(R"("architectures": ["Qwen2MoeForCausalLM"], "num_key_value_heads": {}, "num_experts": {},
            "shared_expert_intermediate_size": {}, "norm_topk_prob": false, "decoder_sparse_step": 1, "mlp_only_layers": []}})",
                              w.heads, w.experts, 2 * p.hidden);
        break;
    case Family::deepseek:
        config += fmt::format(
            R"("architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": {}, "n_routed_experts": {},
            "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "q_lora_rank": {}, "kv_lora_rank": {}, "qk_nope_head_dim": {}, "qk_rope_head_dim": {}, "v_head_dim": {},
            "num_nextn_predict_layers": 0}})",
            w.heads, w.experts, p.hidden / 2, p.hidden / 4, w.mla, w.mla_rope, w.mla);
        break;
    }
    return std::make_shared<const Model>(model_from_json(config, "microbench"));
}

// Eight ranks: TP 2, PP 2, DP 2, and experts over EP 4 (folded over TP x DP) or EP 2 x ETP 2. Two micro-batches.
Plan plan_of(const Point& p, const Backend& backend) {
    Plan plan;
    plan.model = model_of(p);
    auto hardware = std::make_shared<Hardware>();
    hardware->name = "cpu-local";
    hardware->cpu = !backend.can_replay;
    for (const Precision precision : {Precision::fp32, Precision::bf16})
        hardware->peak_flops[static_cast<std::size_t>(precision)] = 1e9;
    plan.hardware = hardware;
    plan.stack = "moe-plan";
    if (!p.one_rank) {
        plan.gpus = 8;
        plan.tp = plan.pp = plan.dp = 2;
        plan.ep = p.expert_tensor ? 2 : 4;
        plan.etp = p.expert_tensor ? 2 : 1;
        plan.edp = 8 / (plan.pp * plan.ep * plan.etp);
    }
    // Launched one by one, small ops would wait for the host, and their times would say so.
    if (backend.can_replay) plan.cuda_graph = CudaGraph::full;
    plan.seq = p.seq;
    plan.mbs = p.mbs;
    plan.gbs = 2 * plan.dp * plan.mbs;
    plan.precision = p.precision;
    return plan;
}

struct Sample {
    double work = 0.0, seconds = 0.0;
};
using Samples = std::map<std::string, std::vector<Sample>>;

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

std::string key_of(const Program& program, const Op& op) {
    for (const std::vector<TensorId>* operands : {&op.in, &op.out})
        for (const TensorId id : *operands)
            if (id != no_tensor) return measured_key(op.kind, program.tensors[static_cast<std::size_t>(id)].dtype);
    return measured_key(op.kind, Dtype::f32);
}

// The median over steps of every op of every rank: a step that another process disturbed does not count.
void gather(const Trainer& trainer, const Plan& plan, std::int64_t steps, double stamp, Samples& samples) {
    const Mesh mesh(plan);
    for (int rank = 0; rank < plan.gpus; ++rank) {
        const Program& program =
            trainer.programs()[static_cast<std::size_t>(mesh.coordinate(Domain::dense, axis::pipeline, rank))];
        std::vector<std::vector<TimelineRow>> rows;
        for (std::int64_t step = trainer.steps_done() - steps; step < trainer.steps_done(); ++step)
            rows.push_back(trainer.recorder(rank).rows(static_cast<std::size_t>(step)));
        std::vector<double> busy(rows.size());
        for (std::size_t i = 0; i < rows[0].size(); ++i) {
            const TimelineRow& row = rows[0][i];
            const Slot& slot = program.slots[static_cast<std::size_t>(row.slot)];
            const Op& op =
                program.templates[static_cast<std::size_t>(slot.index)].ops[static_cast<std::size_t>(row.op)];
            for (std::size_t s = 0; s < rows.size(); ++s) busy[s] = rows[s][i].busy;
            const double work = op.flops > 0.0 ? op.flops : op.bytes;
            const double seconds = median(busy);
            // A clock that ticks in half microseconds may find an op shorter than the stamp behind it.
            if (work > 0.0) samples[key_of(program, op)].push_back({work, std::max(seconds - stamp, 0.1 * seconds)});
        }
    }
}

void measure(const Point& point, const MicrobenchOptions& options, Microbench& result, Samples& samples) {
    using Clock = std::chrono::steady_clock;
    constexpr int most_steps = 9, fewest_steps = 3;
    constexpr double enough_seconds = 0.8;
    const Plan plan = plan_of(point, backend_named(options.backend));
    TrainOptions train_options;
    train_options.permits = options.permits;
    train_options.backend = options.backend;
    train_options.steps = 1; // where recording costs time, the first step is then recorded already
    train_options.kept_steps = most_steps;
    train_options.lr = 1e-4;
    Trainer trainer(plan, train_options);
    const auto vocab = static_cast<std::uint64_t>(plan.model->vocab);
    const SampleSource source = [&](std::int64_t sample, std::span<std::int32_t> tokens) {
        std::uint64_t x = static_cast<std::uint64_t>(sample) * 0x9e3779b97f4a7c15u + 1;
        for (std::int32_t& token : tokens) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            token = static_cast<std::int32_t>((x >> 33) % vocab);
        }
    };
    trainer.step(source); // touches memory for the first time, fills the message pools
    const Clock::time_point start = Clock::now();
    int steps = 0;
    while (steps < fewest_steps ||
           (steps < most_steps && std::chrono::duration<double>(Clock::now() - start).count() < enough_seconds)) {
        trainer.step(source);
        ++steps;
    }
    gather(trainer, plan, steps, result.stamp_seconds, samples);
    result.device = trainer.device_name();
    // The first and smallest run has loaded every kernel; later ones hold fragments of freed arenas.
    if (result.context_bytes == 0.0 && trainer.memory_gib() > trainer.arena_gib())
        result.context_bytes = (trainer.memory_gib() - trainer.arena_gib()) * (1 << 30);
}

// The host's time for a launch, and a stamp's in a step as it is replayed.
void measure_queue(const Backend& backend, Microbench& result) {
    using Clock = std::chrono::steady_clock;
    constexpr std::size_t calls = 1000;
    const std::unique_ptr<Device> device = backend.open(backend.can_replay);
    Queue* queue = device->queue();
    if (queue == nullptr) return;
    char* memory = device->allocate(256);
    if (memory == nullptr) fail("microbench: {} has not 256 bytes free", device->name());
    for (int round = 0; round < 2; ++round) { // the first loads the kernel
        queue->wait();
        const Clock::time_point start = Clock::now();
        for (std::size_t i = 0; i < calls; ++i) backend.kernels->zero({memory, Type::f32}, 64, queue->stream());
        result.launch_seconds = std::chrono::duration<double>(Clock::now() - start).count() / calls;
    }
    queue->wait();
    const auto stamps = [queue] {
        for (std::size_t i = 0; i <= calls; ++i) queue->stamp(i);
    };
    queue->reserve(calls + 1);
    queue->prepare(true, stamps);
    for (int round = 0; round < 2; ++round) {
        queue->play(true, stamps);
        queue->wait();
    }
    result.stamp_seconds = queue->seconds(calls) / calls;
    device->release(memory);
}

// One call per bin of work: the mean over its ops, because predictions add ops up.
std::vector<MeasuredCall> binned(std::vector<Sample> samples) {
    constexpr double bin = 1.25;
    std::sort(samples.begin(), samples.end(), [](const Sample& a, const Sample& b) { return a.work < b.work; });
    std::vector<MeasuredCall> calls;
    for (std::size_t first = 0; first < samples.size();) {
        std::size_t last = first;
        MeasuredCall sum;
        for (; last < samples.size() && samples[last].work <= bin * samples[first].work; ++last) {
            sum.work += samples[last].work;
            sum.seconds += samples[last].seconds;
        }
        const double count = static_cast<double>(last - first);
        calls.push_back({sum.work / count, std::max(sum.seconds / count, 1e-9)});
        first = last;
    }
    return calls;
}

// Rate of the largest quarter of the calls of these kinds.
double best_rate(const std::map<std::string, std::vector<MeasuredCall>>& measured,
                 std::initializer_list<std::string> keys) {
    double best = 0.0;
    for (const std::string& key : keys) {
        const auto found = measured.find(key);
        if (found == measured.end()) continue;
        const std::vector<MeasuredCall>& calls = found->second;
        for (std::size_t i = calls.size() - (calls.size() + 3) / 4; i < calls.size(); ++i)
            best = std::max(best, calls[i].work / calls[i].seconds);
    }
    return best;
}

} // namespace

Microbench run_microbench(const MicrobenchOptions& options) {
    using Clock = std::chrono::steady_clock;
    if (!(options.seconds > 0.0)) refuse("microbench: a budget of {} seconds measures nothing", options.seconds);
    const Clock::time_point start = Clock::now();
    const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    const std::vector<Point> points = grid(options.one_rank);
    Microbench result;
    measure_queue(backend_named(options.backend), result);
    Samples samples;
    std::size_t done = 0;
    double longest = 0.0;
    for (const Point& point : points) {
        // The next run takes about as long as the longest so far, or twice that where sizes grow.
        const double before = elapsed();
        if (done > 0 && before + 1.5 * longest > options.seconds) break;
        if (options.progress)
            options.progress(fmt::format("measuring {} of {}: hidden {}, seq {}, mbs {}, {}", done + 1, points.size(),
                                         point.hidden, point.seq, point.mbs, to_string(point.precision)));
        measure(point, options, result, samples);
        longest = std::max(longest, elapsed() - before);
        ++done;
    }
    for (auto& [key, list] : samples) result.measured[key] = binned(std::move(list));
    result.fp32_flops = best_rate(result.measured, {"gemm"});
    result.bf16_flops = best_rate(result.measured, {"gemm.bf16"});
    result.memory_bandwidth = best_rate(result.measured, {"add", "add.bf16", "zero"});
    return result;
}

} // namespace moe
