// Keeps the lines of a run's own past, and appends each step's as it ends.
#include "tools/history/metrics.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <string_view>
#include <system_error>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

// The step of a line, or -1 where it is none.
std::int64_t step_of(std::string_view line) {
    try {
        const Json json = parse_json<Json>(line, "line");
        const auto step = json.is_object() ? json.find("step") : json.end();
        return step != json.end() && step->is_number_integer() ? step->get<std::int64_t>() : -1;
    } catch (const Error&) {
        return -1;
    }
}

struct Past {
    std::string kept, replaced; // whole lines
    bool torn = false;          // half a line stood at the end
};

Past past_of(const std::string& path, const std::string& text, std::int64_t done) {
    Past past;
    std::size_t number = 0;
    for (std::size_t begin = 0; begin < text.size();) {
        const std::size_t end = text.find('\n', begin);
        if (end == std::string::npos) { // killed while it was written
            past.torn = true;
            break;
        }
        const std::string_view line = std::string_view(text).substr(begin, end - begin);
        ++number;
        const std::int64_t step = step_of(line);
        if (step < 0) refuse("{}: line {} is no step of a training: choose another folder", path, number);
        (step <= done ? past.kept : past.replaced) += fmt::format("{}\n", line);
        begin = end + 1;
    }
    return past;
}

} // namespace

std::string metrics_line(const StepRecord& step, const StepContext& context) {
    Json line = step_json(step);
    if (step.valid_loss) line["valid_loss"] = *step.valid_loss;
    line["memory_gib"] = context.memory_gib;
    line["time"] = std::round(context.wall_seconds * 1e3) / 1e3;
    return line.dump();
}

Metrics::Metrics(const std::string& folder, std::int64_t done, bool resumes) {
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    if (error || !std::filesystem::is_directory(folder)) fail("cannot make the folder {}: {}", folder, error.message());
    path_ = (std::filesystem::path(folder) / "metrics.jsonl").string();
    if (std::filesystem::exists(path_)) {
        const std::string text = read_file(path_);
        const Past past = past_of(path_, text, done);
        if (!resumes && !text.empty())
            refuse("{}: holds the history of a run: add --resume to go on with it, or choose another folder", path_);
        const std::string old = (std::filesystem::path(folder) / "metrics.replaced.jsonl").string();
        if (!past.replaced.empty())
            write_file(old, (std::filesystem::exists(old) ? read_file(old) : "") + past.replaced);
        if (past.torn || !past.replaced.empty()) write_file(path_, past.kept);
    }
    lines_.reset(std::fopen(path_.c_str(), "abe"));
    if (!lines_) fail("cannot write {}: {}", path_, std::generic_category().message(errno));
    const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
    events_ = std::make_unique<EventFile>(folder, now.count(), done + 1);
}

void Metrics::add(const StepRecord& step, const StepContext& context) {
    const std::string line = metrics_line(step, context) + "\n";
    if (std::fwrite(line.data(), 1, line.size(), lines_.get()) != line.size() || std::fflush(lines_.get()) != 0)
        fail("cannot write {}: {}", path_, std::generic_category().message(errno));
    Scalars scalars{{"train/loss", step.loss},
                    {"train/grad_norm", step.grad_norm},
                    {"train/learning_rate", step.lr},
                    {"speed/step_seconds", step.seconds},
                    {"speed/tokens_per_second", static_cast<double>(step.tokens) / step.seconds},
                    {"speed/tflops_per_gpu", step.tflops_per_gpu},
                    {"memory/gib", context.memory_gib}};
    if (step.valid_loss) scalars.emplace_back("valid/loss", *step.valid_loss);
    if (step.mtp_loss != 0.0) scalars.emplace_back("train/mtp_loss", step.mtp_loss);
    if (step.max_logit) {
        scalars.emplace_back("attention/max_logit", *step.max_logit);
        scalars.emplace_back("attention/clipped_heads", step.clipped_heads);
    }
    if (step.overflow > 0.0) scalars.emplace_back("router/overflow", step.overflow);
    for (const RouterRecord& router : step.routers) {
        scalars.emplace_back(fmt::format("router/load_max_over_mean/layer_{}", router.layer),
                             router.load_max_over_mean);
        if (router.bias_spread)
            scalars.emplace_back(fmt::format("router/bias_spread/layer_{}", router.layer), *router.bias_spread);
        if (router.dropped) scalars.emplace_back(fmt::format("router/dropped/layer_{}", router.layer), *router.dropped);
        scalars.emplace_back(fmt::format("router/load_entropy/layer_{}", router.layer), router.load_entropy);
    }
    if (const std::optional<double> loss = step.indexer_loss()) scalars.emplace_back("train/indexer_loss", *loss);
    for (const IndexerRecord& indexer : step.indexers)
        scalars.emplace_back(fmt::format("indexer/loss/layer_{}", indexer.layer), indexer.loss);
    events_->add(context.wall_seconds, step.step, scalars);
}

} // namespace moe::tools
