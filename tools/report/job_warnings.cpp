// Holds what a log or a profile says of its job, and what its figures imply, to the plan.
#include "tools/report/job_warnings.hpp"

#include "planner/base/counted.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "tools/measured/settled.hpp"
#include "tools/print/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <utility>

namespace moe::tools {

namespace {

// Engines count FLOPs in ways that differ by some per cent, as with causal attention; above this the plan is another.
constexpr double odd_flops = 0.15;
constexpr double odd_tokens = 0.1, odd_peak = 0.1, odd_memory = 0.1, odd_spread = 0.25;
// Percentages are logged to two decimals; below these nothing can be divided by them.
constexpr double least_mfu = 1.0, least_memory_percent = 5.0;
constexpr std::size_t few_iterations = 3;
// Shares of a step or of its kernels that a profile may lack.
constexpr double much = 0.05, much_unmatched = 0.3;

bool apart(double a, double b, double share) { return std::abs(std::log(a / b)) > share; }

// The median over lines of what the function finds in them, where it finds something.
std::optional<double> median_of(const std::vector<const LogValues*>& lines,
                                const std::function<std::optional<double>(const LogValues&)>& of) {
    std::vector<double> values;
    for (const LogValues* line : lines)
        if (const auto value = of(*line); value && *value > 0.0) values.push_back(*value);
    if (values.empty()) return std::nullopt;
    std::sort(values.begin(), values.end());
    return quantile(values, 0.5);
}

std::optional<double> product(const std::optional<double>& a, const std::optional<double>& b) {
    return a && b ? std::optional(*a * *b) : std::nullopt;
}
std::optional<double> quotient(const std::optional<double>& a, const std::optional<double>& b) {
    return a && b && *b > 0.0 ? std::optional(*a / *b) : std::nullopt;
}

// GPUs that the log tells, by itself or by rates of the job and of a GPU. AutoModel's is that of a data-parallel rank.
std::optional<double> gpus_of(const plan::Plan& plan, const TrainingLog& log,
                              const std::vector<const LogValues*>& used) {
    if (const auto& gpus = value_of(log.facts, LogField::gpus)) return gpus;
    const auto ratio = median_of(used, [](const LogValues& step) {
        return quotient(value_of(step, LogField::tokens_per_second),
                        value_of(step, LogField::tokens_per_second_per_gpu));
    });
    if (!ratio || std::round(*ratio) * plan.tp * plan.pp == plan.gpus) return std::nullopt;
    return std::round(*ratio);
}

std::string job_differences(const plan::Plan& plan, const TrainingLog& log, const std::optional<double>& gpus) {
    std::string all;
    const auto differs = [&](const char* name, const std::optional<double>& logged, double planned) {
        if (logged && std::abs(*logged - planned) > 0.5)
            all += fmt::format("{}{} {} (plan: {})", all.empty() ? "" : ", ", name, *logged, planned);
    };
    const auto fact = [&](LogField field) { return value_of(log.facts, field); };
    differs("GPUs", gpus, plan.gpus);
    differs("seq", fact(LogField::seq), static_cast<double>(plan.seq));
    differs("mbs", fact(LogField::micro_batch), static_cast<double>(plan.mbs));
    differs("tp", fact(LogField::tensor_parallel), plan.tp);
    differs("cp", fact(LogField::context_parallel), plan.cp);
    differs("pp", fact(LogField::pipeline_parallel), plan.pp);
    differs("ep", fact(LogField::expert_parallel), plan.ep);
    if (plan.model) {
        differs("hidden size", fact(LogField::hidden), static_cast<double>(plan.model->hidden));
        // Hybrids count layers of one part each.
        if (!plan.model->hybrid)
            differs("layers", fact(LogField::layers), static_cast<double>(plan.model->layers.size()));
    }
    return all;
}

// Lines of warnings, each behind whose log or profile it is.
class Warnings {
public:
    explicit Warnings(std::string subject) : subject_(std::move(subject)) {}
    template <typename... Args>
    void operator()(fmt::format_string<Args...> text, Args&&... args) {
        lines_.push_back(subject_ + ": " + fmt::format(text, std::forward<Args>(args)...));
    }
    std::vector<std::string> lines() const { return lines_; }

private:
    std::string subject_;
    std::vector<std::string> lines_;
};

// A rate by the plan's own FLOPs that its GPUs cannot reach says that the job did less.
void check_rate(const machine::Hardware& hardware, double tflops, Warnings& warn) {
    const double peak = *std::max_element(hardware.peak_flops.begin(), hardware.peak_flops.end()) / 1e12;
    if (peak > 0.0 && tflops > peak)
        warn("by the plan's FLOPs a GPU would do {:.4g} TFLOP/s, and the plan's {} can do {:.4g}: model, batch, "
             "sequence "
             "or GPUs are others than the plan's",
             tflops, hardware.name, peak);
}

// capacity: GiB of a GPU, where it is known.
void check_capacity(const machine::Hardware& hardware, const std::optional<double>& capacity, Warnings& warn) {
    if (capacity && apart(*capacity, gib(hardware.memory_bytes), odd_memory))
        warn("its GPUs have {:.4g} GiB, the plan's {} has {:.4g}: the GPUs may be others", *capacity, hardware.name,
             gib(hardware.memory_bytes));
}

} // namespace

std::vector<std::string> profile_warnings(const plan::Plan& plan, const DeviceProfile& profile,
                                          const ProfileComparison& comparison, double tflops) {
    Warnings warn(profile.source);
    if (plan.hardware && plan.hardware->memory_bytes > 0.0) {
        check_capacity(*plan.hardware, profile.gpu_gib, warn);
        check_rate(*plan.hardware, tflops, warn);
    }
    std::string missing;
    for (const ProfileRow& row : comparison.rows)
        if (row.kernels == 0.0 && row.predicted > much * comparison.predicted.step)
            missing += (missing.empty() ? "" : ", ") + row.name;
    if (!missing.empty())
        warn("no kernel of it is of kinds that take more than {:.0f}% of the plan's step: {}", 100.0 * much, missing);
    if (comparison.kernel_seconds > 0.0 && comparison.unmatched_seconds > much_unmatched * comparison.kernel_seconds)
        warn("{:.0f}% of the kernels' time is of names that no rule knows: give rules with --kernels",
             100.0 * comparison.unmatched_seconds / comparison.kernel_seconds);
    return warn.lines();
}

std::vector<std::string> log_warnings(const plan::Plan& plan, const TrainingLog& log,
                                      const std::vector<const LogValues*>& used, const LogComparison& comparison) {
    Warnings warn(log.engine);
    const auto gpus = gpus_of(plan, log, used);
    if (const std::string all = job_differences(plan, log, gpus); !all.empty())
        warn("the job is another than the plan's: {}", all);

    const double sequences = static_cast<double>(plan.gbs), tokens = sequences * static_cast<double>(plan.seq);
    const auto per_gpu = median_of(used, [](const LogValues& step) {
        return product(value_of(step, LogField::tokens_per_second_per_gpu), value_of(step, LogField::seconds));
    });
    if (const auto logged = product(per_gpu, gpus.value_or(plan.gpus)); logged && apart(*logged, tokens, odd_tokens))
        warn("its step time and tokens per second and GPU make {:.4g} tokens a step, the plan has {:.4g}: batch, "
             "sequence or GPUs may be others",
             *logged, tokens);
    const auto samples = median_of(used, [](const LogValues& step) {
        return product(value_of(step, LogField::samples_per_second), value_of(step, LogField::seconds));
    });
    if (samples && apart(*samples, sequences, odd_tokens))
        warn("its step time and samples per second make a batch of {:.4g} sequences, the plan has {}", *samples,
             plan.gbs);
    if (comparison.logged_tflops && apart(*comparison.logged_tflops, comparison.measured_tflops, odd_flops))
        warn("it counts {:.2f} times the FLOPs of the plan: model, sequence or GPUs may be others than the plan's",
             *comparison.logged_tflops / comparison.measured_tflops);

    if (plan.hardware && plan.hardware->memory_bytes > 0.0) {
        const machine::Hardware& hardware = *plan.hardware;
        const auto peak = median_of(used, [](const LogValues& step) -> std::optional<double> {
            const auto& mfu = value_of(step, LogField::mfu);
            if (!mfu || *mfu < least_mfu) return std::nullopt;
            return quotient(product(value_of(step, LogField::tflops), 100.0), mfu);
        });
        const double planned = hardware.peak_flops[static_cast<std::size_t>(machine::Precision::bf16)] / 1e12;
        if (peak && planned > 0.0 && apart(*peak, planned, odd_peak))
            warn("its MFU is of a peak of {:.4g} TFLOP/s, the plan's {} has {:.4g} in BF16: the GPUs may be others",
                 *peak, hardware.name, planned);
        const auto by_percent = median_of(used, [](const LogValues& step) -> std::optional<double> {
            const auto& percent = value_of(step, LogField::reserved_percent);
            if (!percent || *percent < least_memory_percent) return std::nullopt;
            return quotient(product(value_of(step, LogField::reserved_gib), 100.0), percent);
        });
        const auto& told = value_of(log.facts, LogField::capacity_gib);
        const auto capacity = told ? told : by_percent;
        check_capacity(hardware, capacity, warn);
        check_rate(hardware, comparison.measured_tflops, warn);
        const double held = std::max(log.allocated_gib.value_or(0.0), log.reserved_gib.value_or(0.0));
        if (!capacity && held > gib(hardware.memory_bytes))
            warn("it held {:.4g} GiB of a GPU, the plan's {} has {:.4g}: the GPUs may be others", held, hardware.name,
                 gib(hardware.memory_bytes));
    }

    if (const double spread = (comparison.high - comparison.low) / comparison.measured_seconds; spread > odd_spread)
        warn("80% of its steps lie {:.0f}% apart: they scatter too much, or change, for one figure", 100.0 * spread);
    if (!used.empty() && value_of(*used.front(), LogField::skipped).value_or(0.0) > 0.0)
        warn("the optimizer left out steps in every logged iteration: they may be faster than whole ones");
    if (used.size() == 1 && value_of(*used.front(), LogField::iteration).value_or(0.0) <= 1.0)
        warn("its only iteration is the first, with all of the start-up: give a log of more iterations");
    else if (used.size() < few_iterations)
        warn("the median is of {}: give a log of more iterations", counted(used.size(), "iteration"));
    return warn.lines();
}

} // namespace moe::tools
