// Measured op costs: runs of models of growing size, op times gathered by kind and size of work.
#include "engine/bench/microbench.hpp"

#include "engine/backends/backends.hpp"
#include "engine/base/run_in_subprocess.hpp"
#include "engine/bench/measured_calls.hpp"
#include "engine/bench/microbench_grid.hpp"
#include "engine/ops/backend.hpp"
#include "engine/train/trainer.hpp"
#include "kernels/tiles.hpp"
#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/memory/library_memory.hpp"
#include "planner/model/model.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <span>

namespace moe::bench {

namespace {

double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

// Rows of the last steps, of one op of one rank after the other: [step][op].
using StepRows = std::vector<std::vector<program::TimelineRow>>;

StepRows last_rows(const train::Trainer& trainer, int rank, std::int64_t steps) {
    StepRows rows;
    for (std::int64_t step = trainer.steps_done() - steps; step < trainer.steps_done(); ++step)
        rows.push_back(trainer.recorder(rank).rows(static_cast<std::size_t>(step)));
    return rows;
}

const program::Program& program_of(const train::Trainer& trainer, const plan::Mesh& mesh, int rank) {
    return trainer
        .programs()[static_cast<std::size_t>(mesh.coordinate(plan::Domain::dense, plan::axis::pipeline, rank))];
}

// The last steps of a training: how many, and the mean clock of its devices, 0 where they do not say.
struct Recorded {
    std::int64_t steps = 0;
    double clock_hz = 0.0;
};

// The median over steps of every op of every rank: a step that another process disturbed does not count.
void gather(const train::Trainer& trainer, const plan::Plan& plan, const Recorded& recorded, CallSamples& samples) {
    const plan::Mesh mesh(plan);
    for (int rank = 0; rank < plan.gpus; ++rank) {
        const program::Program& program = program_of(trainer, mesh, rank);
        const StepRows rows = last_rows(trainer, rank, recorded.steps);
        std::vector<double> busy(rows.size());
        for (std::size_t i = 0; i < rows[0].size(); ++i) {
            const program::Op& op = *program::op_of(program, rows[0][i]);
            if (!has_own_time(op.kind, plan.offload)) continue;
            for (std::size_t s = 0; s < rows.size(); ++s) busy[s] = rows[s][i].busy;
            add_sample(samples, op, program, median(busy), recorded.clock_hz);
        }
    }
}

constexpr int most_steps = 9, fewest_steps = 3;

train::TrainOptions options_of(const std::string& backend, int permits) {
    train::TrainOptions options;
    options.permits = permits;
    options.backend = backend;
    options.steps = std::numeric_limits<int>::max(); // record_from_now() says which are recorded.
    options.kept_steps = most_steps;
    options.lr = 1e-4;
    return options;
}

// A GPU at the limit of its power needs a while to come to the clock that it can hold: an H200 begins at 1,980 MHz and
// trains large models at 1,300 to 1,700. One that draws clearly less has its top clock from the start.
void step_until_warm(train::Trainer& trainer, const train::SampleSource& source) {
    using Clock = std::chrono::steady_clock;
    constexpr double first_seconds = 0.2, calm_seconds = 0.4, warm_seconds = 1.5, calm_share = 0.9;
    const Clock::time_point start = Clock::now();
    const auto passed = [&start] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    const auto step_until = [&](double seconds) {
        while (passed() < seconds) trainer.step(source);
        return passed();
    };
    const double first = step_until(first_seconds);
    const device::PowerSample before = trainer.power_sample();
    const double calm = step_until(calm_seconds);
    const device::PowerSample now = trainer.power_sample();
    const double watts = (now.joules - before.joules) / (calm - first);
    if (watts > 0.0 && watts < calm_share * now.limit_watts && now.clock_hz == now.top_clock_hz) return;
    step_until(warm_seconds);
}

// Trains, and records the last steps.
Recorded record_steps(train::Trainer& trainer, const plan::Plan& plan, const std::string& backend) {
    using Clock = std::chrono::steady_clock;
    constexpr double enough_seconds = 0.8;
    const double log_vocab = std::log(static_cast<double>(plan.model->vocab) + 1.0);
    const train::SampleSource source = [&](std::int64_t sample, std::span<std::int32_t> tokens) {
        std::uint64_t x = static_cast<std::uint64_t>(sample) * 0x9e3779b97f4a7c15u + 1;
        for (std::int32_t& token : tokens) {
            x = x * 6364136223846793005u + 1442695040888963407u;
            // Tokens are as frequent as in text, by Zipf's law: the logarithms of their ranks are spread evenly.
            const double rank = std::exp(static_cast<double>(x >> 11) * 0x1p-53 * log_vocab);
            token =
                static_cast<std::int32_t>(std::min<std::int64_t>(static_cast<std::int64_t>(rank), plan.model->vocab)) -
                1;
        }
    };
    // Steps that are not recorded. The first one touches memory for the first time and fills the message pools; on a
    // device they say what the others would take without stamps.
    const bool device = backends::backend_named(backend).devices != nullptr;
    for (int step = 0; step < (device ? 4 : 1); ++step) trainer.step(source);
    if (device) step_until_warm(trainer, source);
    trainer.record_from_now();
    const Clock::time_point start = Clock::now();
    const auto passed = [&start] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    Recorded recorded;
    // The driver has a new clock ten times a second, and takes milliseconds to tell, in which the device has no work.
    constexpr double between_clocks = 0.1;
    double told = 0.0, sum = 0.0;
    int clocks = 0;
    const auto read_clock = [&] {
        sum += trainer.power_sample().clock_hz;
        ++clocks;
        told = passed();
    };
    while (recorded.steps < fewest_steps || (recorded.steps < most_steps && passed() < enough_seconds)) {
        trainer.step(source);
        ++recorded.steps;
        if (passed() - told >= between_clocks) read_clock();
    }
    if (clocks == 0) read_clock();
    recorded.clock_hz = sum / clocks;
    return recorded;
}

// The result of training one point.
struct Measured {
    CallSamples samples;
    std::string device;
    double event_overhead = 0.0;
    double beside_arena = 0.0; // bytes taken on the device beside the arena and the libraries' scratch
};

Measured measure(const Point& point, const MicrobenchOptions& options) {
    const plan::Plan plan = plan_of(point, backends::backend_named(options.backend));
    train::Trainer trainer(plan, options_of(options.backend, options.permits));
    Measured result;
    gather(trainer, plan, record_steps(trainer, plan, options.backend), result.samples);
    result.event_overhead = trainer.queued_step().event_overhead;
    result.device = trainer.device_name();
    result.beside_arena = (trainer.memory_gib() - trainer.arena_gib()) * (1 << 30) - memory::library_memory(plan);
    return result;
}

std::string to_text(const Measured& measured) {
    nlohmann::json families = nlohmann::json::object();
    for (const auto& [key, calls] : measured.samples)
        for (const machine::MeasuredCall& call : calls)
            families[key].push_back({call.work, call.seconds, call.sides, call.clock_hz});
    return nlohmann::json{families, measured.device, measured.event_overhead, measured.beside_arena}.dump();
}

Measured measured_from(const std::string& text) {
    const nlohmann::json from = parse_json<nlohmann::json>(text, "measured calls", long_json);
    Measured result{{}, from[1], from[2], from[3]};
    for (const auto& [key, calls] : from[0].items())
        for (const nlohmann::json& call : calls) result.samples[key].push_back({call[0], call[1], call[2], call[3]});
    return result;
}

// The host's time for a launch.
double launch_seconds(const ops::Backend& backend) {
    using Clock = std::chrono::steady_clock;
    constexpr std::size_t calls = 1000;
    const std::unique_ptr<device::Device> device = backend.open(backend.can_replay, 0);
    device::Queue* queue = device->queue();
    if (queue == nullptr) return 0.0;
    char* memory = device->allocate(256);
    if (memory == nullptr) fail("microbench: {} has not 256 bytes free", device->name());
    double seconds = 0.0;
    for (int round = 0; round < 2; ++round) { // The first round loads the kernel.
        queue->wait();
        const Clock::time_point start = Clock::now();
        for (std::size_t i = 0; i < calls; ++i) backend.kernels->zero({memory, Type::f32}, 64, queue->stream());
        seconds = std::chrono::duration<double>(Clock::now() - start).count() / calls;
    }
    queue->wait();
    device->release(memory);
    return seconds;
}

// Best rate among the largest quarter of the calls of the families whose key begins with `kind`, in one storage type:
// "" FP32, "bf16" or "fp8-blockwise".
double best_rate(const std::map<std::string, std::vector<machine::MeasuredCall>>& measured, const std::string& kind,
                 const std::string& type) {
    const auto type_of_key = [](const std::string& key) -> std::string {
        for (const char* type : {"bf16", "fp8-blockwise"})
            if (key.find(std::string(".") + type) != std::string::npos) return type;
        return "";
    };
    double best = 0.0;
    for (const auto& [key, calls] : measured) {
        const bool of_kind = key == kind || key.rfind(kind + ".", 0) == 0;
        if (!of_kind || type_of_key(key) != type) continue;
        for (std::size_t i = calls.size() - (calls.size() + 3) / 4; i < calls.size(); ++i)
            best = std::max(best, calls[i].work / calls[i].seconds);
    }
    return best;
}

// The tiles that the kernels choose from for a family of grouped products; none for other families.
std::vector<machine::ProductTile> tiles_of(const std::string& key) {
    const auto has = [&](const char* part) { return key.find(part) != std::string::npos; };
    if (key.rfind("grouped_gemm.", 0) != 0) return {};
    std::span<const TileKind> kinds;
    if (has(".fp8-blockwise"))
        kinds = scaled_tiles;
    else if (has(".bf16"))
        kinds = has(".wgrad") ? std::span<const TileKind>(gradient_tiles) : std::span<const TileKind>(row_tiles);
    std::vector<machine::ProductTile> tiles;
    for (const TileKind& k : kinds)
        tiles.push_back({tile_multiprocessors, k.down, k.across, k.depth, k.step_cycles, k.tile_cycles, k.swapped});
    return tiles;
}

} // namespace

Microbench run_microbench(const MicrobenchOptions& options) {
    using Clock = std::chrono::steady_clock;
    if (!(options.seconds > 0.0)) refuse("microbench: a budget of {} seconds measures nothing", options.seconds);
    const Clock::time_point start = Clock::now();
    const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    const std::vector<Point> points = options.one_rank ? grid_of_gpus() : grid_of_cores();
    Microbench result;
    const auto run = [&](const std::function<std::string()>& work) {
        return options.in_subprocess ? engine::run_in_subprocess(work) : work();
    };
    result.launch_seconds =
        parse_json<nlohmann::json>(
            run([&] { return fmt::format("{}", launch_seconds(backends::backend_named(options.backend))); }),
            "seconds of a launch")
            .get<double>();
    CallSamples samples;
    std::size_t done = 0;
    double longest = 0.0;
    std::array<double, machine::precision_count> beside_arena{};
    for (const Point& point : points) {
        // The next run takes about as long as the longest so far, or twice that where sizes grow.
        const double before = elapsed();
        if (done > 0 && (before + 1.5 * longest > options.seconds || done == options.most)) break;
        if (options.progress)
            options.progress(fmt::format("measuring {} of {}: hidden {}, seq {}, mbs {}, {}", done + 1, points.size(),
                                         point.hidden, point.seq, point.mbs, machine::to_string(point.precision)));
        Measured measured = measured_from(run([&] { return to_text(measure(point, options)); }));
        for (auto& [key, calls] : measured.samples) {
            std::vector<machine::MeasuredCall>& all = samples[key];
            all.insert(all.end(), std::make_move_iterator(calls.begin()), std::make_move_iterator(calls.end()));
        }
        result.device = measured.device;
        result.event_overhead = measured.event_overhead;
        double& first = beside_arena[static_cast<std::size_t>(point.precision)];
        // The smallest run counts: in one process, later ones hold fragments of freed arenas.
        if (first == 0.0) first = measured.beside_arena;
        longest = std::max(longest, elapsed() - before);
        ++done;
    }
    for (auto& [key, list] : samples) result.measured[key] = calls_of(std::move(list), options.one_rank);
    const ops::Backend& backend = backends::backend_named(options.backend);
    if (backend.tiled != nullptr && backend.tiled()) {
        for (const auto& [key, calls] : result.measured)
            if (std::vector<machine::ProductTile> tiles = tiles_of(key); !tiles.empty())
                result.product_tiles[key] = std::move(tiles);
    }
    result.context_bytes = std::max(0.0, *std::max_element(beside_arena.begin(), beside_arena.end()));
    result.fp32_flops = best_rate(result.measured, "gemm", "");
    result.bf16_flops = best_rate(result.measured, "gemm", "bf16");
    result.fp8_flops = best_rate(result.measured, "gemm", "fp8-blockwise");
    result.memory_bandwidth =
        std::max({best_rate(result.measured, "add", ""), best_rate(result.measured, "add", "bf16"),
                  best_rate(result.measured, "zero", "")});
    return result;
}

std::vector<std::vector<program::TimelineRow>> record_training(const plan::Plan& plan, const std::string& backend) {
    train::Trainer trainer(plan, options_of(backend, 0));
    const std::int64_t steps = record_steps(trainer, plan, backend).steps;
    std::vector<std::vector<program::TimelineRow>> ranks;
    for (int rank = 0; rank < plan.gpus; ++rank) {
        const StepRows recorded = last_rows(trainer, rank, steps);
        ranks.push_back(recorded.front());
        std::vector<double> busy(recorded.size());
        for (std::size_t i = 0; i < recorded.front().size(); ++i) {
            for (std::size_t s = 0; s < recorded.size(); ++s) busy[s] = recorded[s][i].busy;
            ranks.back()[i].busy = median(busy);
        }
    }
    return ranks;
}

} // namespace moe::bench
