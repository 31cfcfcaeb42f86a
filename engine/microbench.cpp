// Measured op costs: runs of models of growing size, op times gathered by kind and size of work.
#include "engine/microbench.hpp"

#include "engine/backend.hpp"
#include "engine/trainer.hpp"
#include "planner/error.hpp"
#include "planner/library_memory.hpp"
#include "planner/measured.hpp"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <tuple>

namespace moe {

namespace {

// A small model and the workload it runs. Sizes of one point differ from each other as those of real layers do.
struct Point {
    std::string family; // of model_of()
    int hidden, heads, kv_heads, head_dim;
    int ffn, experts, top_k, shared; // shared: FFN width of the shared expert, or of dense layers
    int vocab;
    std::int64_t seq, mbs;
    Precision precision = Precision::bf16;
    bool expert_tensor = false; // ETP 2 instead of EP 4, of eight ranks
};

// Small to large, so that a budget that runs out costs the far end and never a kind of op. Eight ranks share the cores.
std::vector<Point> grid_of_cores() {
    struct Size {
        int hidden;
        std::int64_t seq, mbs;
        bool all_families;
    };
    std::vector<Point> points;
    for (const Size& s : std::initializer_list<Size>{{64, 64, 1, true},
                                                     {128, 128, 1, true},
                                                     {128, 256, 2, false},
                                                     {256, 256, 1, true},
                                                     {512, 256, 1, false},
                                                     {512, 512, 2, false}})
        for (const Precision precision : {Precision::fp32, Precision::bf16}) {
            const int h = s.hidden;
            points.push_back({"qwen3", h, h / 16, h / 32, 32, h, 8, 2, 3 * h, 4 * h, s.seq, s.mbs, precision});
            if (!s.all_families) continue;
            points.push_back({"qwen2", h, h / 16, h / 16, 16, h, 8, 2, 2 * h, 4 * h, s.seq, s.mbs, precision, true});
            points.push_back({"deepseek", h, h / 16, h / 16, 16, h, 8, 2, 3 * h, 4 * h, s.seq, s.mbs, precision});
        }
    return points;
}

// One rank. Widths, experts and sequences of published MoE models and fractions of them, none of them a whole model.
std::vector<Point> grid_of_gpus() {
    constexpr Precision fp32 = Precision::fp32;
    return {{"qwen3", 256, 4, 1, 64, 256, 8, 2, 768, 1024, 256, 1, fp32},
            {"deepseek", 256, 4, 4, 64, 256, 8, 2, 768, 1024, 256, 1, fp32},
            {"qwen2", 256, 4, 4, 64, 256, 8, 2, 512, 1024, 256, 1, fp32},
            {"gptoss", 512, 8, 2, 64, 512, 8, 2, 0, 4096, 512, 1},
            {"qwen3", 512, 8, 2, 64, 256, 8, 2, 1536, 4096, 512, 2},
            {"qwen2", 512, 8, 8, 64, 512, 8, 4, 1024, 8192, 1024, 1},
            {"deepseek", 512, 8, 8, 64, 384, 16, 4, 1536, 8192, 512, 2},
            {"qwen3", 1024, 16, 8, 128, 768, 8, 2, 3072, 16384, 1024, 1},
            {"deepseek", 1024, 16, 16, 128, 512, 16, 4, 2048, 8192, 1024, 2},
            {"qwen3", 1024, 16, 4, 128, 384, 32, 8, 3072, 32768, 2048, 2},
            {"qwen2", 1024, 8, 8, 128, 704, 32, 4, 2816, 16384, 2048, 1},
            {"deepseek", 1536, 12, 12, 128, 768, 16, 2, 4096, 16384, 1024, 4},
            {"mixtral", 1536, 12, 4, 128, 2048, 8, 2, 0, 32768, 2048, 1},
            {"gptoss", 1024, 16, 4, 64, 1024, 16, 4, 0, 32768, 2048, 2},
            {"qwen3", 1024, 8, 2, 128, 512, 16, 4, 3072, 16384, 2048, 4},
            {"qwen3", 1536, 12, 4, 128, 512, 16, 4, 4096, 16384, 4096, 1},
            {"deepseek", 1536, 20, 20, 128, 640, 16, 4, 4096, 16384, 3072, 2},
            {"qwen3", 1536, 24, 8, 128, 640, 32, 4, 4096, 32768, 4096, 2},
            {"qwen3", 2048, 16, 4, 128, 1024, 16, 2, 6144, 32768, 1024, 4},
            {"mixtral", 2048, 32, 8, 64, 4096, 8, 2, 0, 32768, 2048, 2},
            {"deepseek", 2048, 16, 16, 128, 1408, 32, 6, 8192, 65536, 2048, 1},
            {"qwen3", 2048, 32, 4, 128, 768, 64, 8, 6144, 65536, 4096, 1},
            {"deepseek", 2048, 32, 32, 128, 1024, 16, 4, 8192, 32768, 4096, 1},
            {"qwen2", 2048, 16, 16, 128, 1408, 16, 4, 5632, 65536, 4096, 1},
            {"qwen3", 2048, 32, 4, 128, 768, 128, 8, 6144, 131072, 4096, 2},
            {"gptoss", 2880, 64, 8, 64, 2880, 8, 4, 0, 65536, 4096, 1},
            {"mixtral", 4096, 32, 8, 128, 7168, 4, 2, 0, 32768, 2048, 1},
            {"mixtral", 4096, 32, 8, 128, 14336, 4, 2, 0, 32768, 4096, 2},
            {"deepseek", 4096, 64, 64, 128, 2048, 16, 8, 12288, 65536, 4096, 1}};
}

std::shared_ptr<const Model> model_of(const Point& p) {
    std::string config = fmt::format(
        R"({{"vocab_size": {}, "hidden_size": {}, "num_hidden_layers": 2, "num_attention_heads": {}, "num_key_value_heads": {},
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "rope_theta": 10000.0, "hidden_act": "silu", "moe_intermediate_size": {},
        "num_experts_per_tok": {}, )",
        p.vocab, p.hidden, p.heads, p.kv_heads, p.ffn, p.top_k);
    if (p.family == "qwen3")
        config += fmt::format(
            R"("architectures": ["Qwen3MoeForCausalLM"], "head_dim": {}, "num_experts": {}, "intermediate_size": {},
            "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []}})",
            p.head_dim, p.experts, p.shared);
    else if (p.family == "qwen2")
        config += fmt::format(
            R"("architectures": ["Qwen2MoeForCausalLM"], "num_experts": {}, "shared_expert_intermediate_size": {},
            "intermediate_size": {}, "norm_topk_prob": false, "decoder_sparse_step": 1, "mlp_only_layers": []}})",
            p.experts, p.shared, p.shared);
    else if (p.family == "mixtral")
        config += fmt::format(
            R"("architectures": ["MixtralForCausalLM"], "head_dim": {}, "num_local_experts": {}, "intermediate_size": {}}})",
            p.head_dim, p.experts, p.ffn);
    else if (p.family == "gptoss")
        config += fmt::format(
            R"("architectures": ["GptOssForCausalLM"], "head_dim": {}, "num_local_experts": {}, "intermediate_size": {},
            "attention_bias": true, "sliding_window": 128, "swiglu_limit": 7.0}})",
            p.head_dim, p.experts, p.ffn);
    else
        config += fmt::format(
            R"("architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": {}, "intermediate_size": {},
            "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "routed_scaling_factor": 2.5, "norm_topk_prob": true, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "q_lora_rank": {}, "kv_lora_rank": {}, "qk_nope_head_dim": {}, "qk_rope_head_dim": {}, "v_head_dim": {},
            "num_nextn_predict_layers": 0}})",
            p.experts, p.shared, p.hidden / 2, p.hidden / 4, p.head_dim, p.head_dim >= 32 ? p.head_dim / 2 : p.head_dim,
            p.head_dim);
    return std::make_shared<const Model>(model_from_json(config, "microbench"));
}

// Eight ranks: TP 2, PP 2, DP 2, and experts over EP 4 (folded over TP x DP) or EP 2 x ETP 2. Two micro-batches.
Plan plan_of(const Point& p, const Backend& backend, bool one_rank) {
    Plan plan;
    plan.model = model_of(p);
    auto hardware = std::make_shared<Hardware>();
    hardware->name = "cpu-local";
    hardware->cpu = !backend.can_replay;
    for (const Precision precision : {Precision::fp32, Precision::bf16})
        hardware->peak_flops[static_cast<std::size_t>(precision)] = 1e9;
    plan.hardware = hardware;
    plan.stack = "moe-plan";
    if (!one_rank) {
        plan.gpus = 8;
        plan.tp = plan.pp = plan.dp = 2;
        plan.ep = p.expert_tensor ? 2 : 4;
        plan.etp = p.expert_tensor ? 2 : 1;
        plan.edp = 8 / (plan.pp * plan.ep * plan.etp);
    }
    // Launched one by one, small ops would wait for the host, and their times would say so.
    if (backend.can_replay) plan.cuda_graph = CudaGraph::full;
    if (one_rank) plan.router.forced = true; // plans are priced for balanced routing
    plan.seq = p.seq;
    plan.mbs = p.mbs;
    plan.gbs = 2 * plan.dp * plan.mbs;
    plan.precision = p.precision;
    return plan;
}

using Samples = std::map<std::string, std::vector<MeasuredCall>>; // by measured_key()

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
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
            CostPoint at = cost_point(op, program);
            const double seconds = median(busy);
            // A clock that ticks in half microseconds may find an op shorter than the stamp behind it.
            if (at.work > 0.0)
                samples[at.key].push_back({at.work, std::max(seconds - stamp, 0.1 * seconds), std::move(at.sides)});
        }
    }
}

// Bytes taken on the device beside the arena and the libraries' scratch.
double measure(const Point& point, const MicrobenchOptions& options, Microbench& result, Samples& samples) {
    using Clock = std::chrono::steady_clock;
    constexpr int most_steps = 9, fewest_steps = 3;
    constexpr double enough_seconds = 0.8;
    const Plan plan = plan_of(point, backend_named(options.backend), options.one_rank);
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
    return (trainer.memory_gib() - trainer.arena_gib()) * (1 << 30) - library_memory(plan);
}

// The host's time for a launch, and a stamp's in a step as it is replayed.
void measure_queue(const Backend& backend, Microbench& result) {
    using Clock = std::chrono::steady_clock;
    constexpr std::size_t calls = 1000;
    const std::unique_ptr<Device> device = backend.open(backend.can_replay, 0);
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
    queue->reserve(calls + 1, 0);
    queue->prepare(true, stamps);
    for (int round = 0; round < 2; ++round) {
        queue->play(true, stamps);
        queue->wait();
    }
    result.stamp_seconds = queue->seconds(calls) / calls;
    device->release(memory);
}

// One call for all samples between which `alike` sees no difference: their mean, because predictions add ops up.
template <class Alike>
std::vector<MeasuredCall> merged(const std::vector<MeasuredCall>& samples, const Alike& alike) {
    std::vector<MeasuredCall> calls;
    for (std::size_t first = 0, last = 0; first < samples.size(); first = last) {
        MeasuredCall sum{0.0, 0.0, samples[first].sides};
        for (; last < samples.size() && alike(samples[first], samples[last]); ++last) {
            sum.work += samples[last].work;
            sum.seconds += samples[last].seconds;
        }
        const double count = static_cast<double>(last - first);
        calls.push_back({sum.work / count, std::max(sum.seconds / count, 1e-9), sum.sides});
    }
    return calls;
}

// On a device of its own an op's time hardly scatters, and its shape decides. Ranks that share cores disturb each other
// by more than that: their calls are averaged over bins of like work.
std::vector<MeasuredCall> calls_of(std::vector<MeasuredCall> samples, bool by_shape) {
    const auto order = [](const MeasuredCall& c) { return std::tie(c.work, c.sides); };
    std::sort(samples.begin(), samples.end(), [&](const auto& a, const auto& b) { return order(a) < order(b); });
    if (by_shape) return merged(samples, [&](const auto& a, const auto& b) { return order(a) == order(b); });
    for (MeasuredCall& sample : samples) sample.sides.clear();
    return merged(samples, [](const auto& first, const auto& other) { return other.work <= 1.25 * first.work; });
}

// Best rate among the largest quarter of the calls of the families whose key begins with `kind`, in one storage type.
double best_rate(const std::map<std::string, std::vector<MeasuredCall>>& measured, const std::string& kind, bool bf16) {
    double best = 0.0;
    for (const auto& [key, calls] : measured) {
        const bool of_kind = key == kind || key.rfind(kind + ".", 0) == 0;
        if (!of_kind || bf16 != (key.find(".bf16") != std::string::npos)) continue;
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
    const std::vector<Point> points = options.one_rank ? grid_of_gpus() : grid_of_cores();
    Microbench result;
    measure_queue(backend_named(options.backend), result);
    Samples samples;
    std::size_t done = 0;
    double longest = 0.0;
    std::array<double, precision_count> beside_arena{};
    for (const Point& point : points) {
        // The next run takes about as long as the longest so far, or twice that where sizes grow.
        const double before = elapsed();
        if (done > 0 && before + 1.5 * longest > options.seconds) break;
        if (options.progress)
            options.progress(fmt::format("measuring {} of {}: hidden {}, seq {}, mbs {}, {}", done + 1, points.size(),
                                         point.hidden, point.seq, point.mbs, to_string(point.precision)));
        const double beside = measure(point, options, result, samples);
        double& first = beside_arena[static_cast<std::size_t>(point.precision)];
        if (first == 0.0) first = beside; // of the smallest run: later ones hold fragments of freed arenas
        longest = std::max(longest, elapsed() - before);
        ++done;
    }
    for (auto& [key, list] : samples) result.measured[key] = calls_of(std::move(list), options.one_rank);
    result.context_bytes = std::max(0.0, *std::max_element(beside_arena.begin(), beside_arena.end()));
    result.fp32_flops = best_rate(result.measured, "gemm", false);
    result.bf16_flops = best_rate(result.measured, "gemm", true);
    result.memory_bandwidth =
        std::max({best_rate(result.measured, "add", false), best_rate(result.measured, "add", true),
                  best_rate(result.measured, "zero", false)});
    return result;
}

} // namespace moe
