// New tokens' rows, the weights of checkpoints, and what there is to say of weights that were loaded.
#include "engine/train/initial_weights.hpp"

#include "engine/train/merge_adapters.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace moe::train {

std::optional<ExpertName> expert_name(const std::string& name) {
    const std::string marker = ".experts.";
    const std::size_t at = name.find(marker);
    if (at == std::string::npos) return std::nullopt;
    const std::size_t number = at + marker.size(), end = name.find('.', number);
    if (end == std::string::npos || end == number || end - number > 9) return std::nullopt;
    std::int64_t expert = 0;
    for (std::size_t i = number; i < end; ++i) {
        if (name[i] < '0' || name[i] > '9') return std::nullopt;
        expert = 10 * expert + (name[i] - '0');
    }
    return ExpertName{name.substr(0, number), expert, name.substr(end + 1)};
}

bool has_token_rows(const std::string& parameter) {
    return parameter == "model.embed_tokens.weight" || parameter == "lm_head.weight";
}

void check_finite(const std::string& path, const std::string& tensor, std::int64_t first,
                  std::span<const float> values) {
    const auto wrong = std::find_if(values.begin(), values.end(), [](float value) { return !std::isfinite(value); });
    if (wrong != values.end())
        refuse("{}: {} holds {} at element {} of the parameter: the file is damaged, or of a run that diverged", path,
               shown(tensor), *wrong, first + (wrong - values.begin()));
}

ReadPart with_more_rows(const ReadPart& read, std::int64_t stored, std::int64_t cols) {
    std::vector<double> sum(static_cast<std::size_t>(cols), 0.0);
    std::vector<float> row(static_cast<std::size_t>(cols));
    for (std::int64_t r = 0; r < stored; ++r) {
        read(r * cols, row);
        for (std::size_t c = 0; c < row.size(); ++c) sum[c] += static_cast<double>(row[c]);
    }
    std::transform(sum.begin(), sum.end(), row.begin(),
                   [stored](double s) { return static_cast<float>(s / static_cast<double>(stored)); });
    return [read, mean = std::move(row), stored, cols](std::int64_t first, std::span<float> out) {
        const std::int64_t here =
            std::clamp<std::int64_t>(stored * cols - first, 0, static_cast<std::int64_t>(out.size()));
        if (here > 0) read(first, out.first(static_cast<std::size_t>(here)));
        for (auto i = static_cast<std::size_t>(here); i < out.size(); ++i)
            out[i] = mean[static_cast<std::size_t>((first + static_cast<std::int64_t>(i)) % cols)];
    };
}

LoadReport load_weights(Trainer& trainer, const weights::StoredCheckpoint& checkpoint) {
    const model::Model& model = *trainer.plan().model;
    const std::string& path = checkpoint.path();
    LoadReport report;
    if (const std::string& lora = checkpoint.state().lora; !lora.empty() && !trainer.plan().lora.on())
        refuse("{}: holds adapters of lora = {}, which this run has not: take what export --checkpoint makes of it",
               path, shown(lora));
    report.difference =
        differing_fields(model, families::model_from_json(checkpoint.state().config, path + ": config"), path);
    std::vector<std::pair<std::string, ReadPart>> readers;
    for (const auto& [name, shape] : trainer.parameters()) {
        const auto found = checkpoint.shapes().find(name);
        if (found == checkpoint.shapes().end() && is_adapter(name)) continue; // It begins as it was drawn.
        if (found == checkpoint.shapes().end())
            refuse("{}: is of {} and holds no parameter {}", path, checkpoint.state().model, name);
        const weights::StoredCheckpoint::Shape& has = found->second;
        const bool grows = has_token_rows(name) && has.cols == shape.cols && has.rows < shape.rows;
        if (!grows && (has.rows != shape.rows || has.cols != shape.cols))
            refuse("{}: {} is {} x {}, the plan's model has {} x {}", path, name, has.rows, has.cols, shape.rows,
                   shape.cols);
        ReadPart read = [&checkpoint, name = name](std::int64_t first, std::span<float> out) {
            checkpoint.read(name, weights::StateKind::weight, first, out);
        };
        if (grows) {
            report.grown_from = has.rows;
            read = with_more_rows(read, has.rows, has.cols);
        }
        readers.emplace_back(name, std::move(read));
    }
    report.grown_to = model.vocab;
    for (const auto& [name, read] : readers) {
        trainer.fill_weight(name, read);
        ++report.loaded;
    }
    for (const auto& [name, shape] : checkpoint.shapes())
        if (trainer.parameters().count(name) == 0) report.unused.push_back(name);
    return report;
}

std::string describe(const LoadReport& report) {
    std::string text;
    if (!report.unused.empty()) {
        constexpr std::size_t named = 8;
        const std::vector<std::string> first(report.unused.begin(),
                                             report.unused.begin() +
                                                 static_cast<std::ptrdiff_t>(std::min(named, report.unused.size())));
        text =
            fmt::format("{} tensors of the checkpoint are not used: {}{}", report.unused.size(),
                        shown(fmt::format("{}", fmt::join(first, ", "))), report.unused.size() > named ? ", ..." : "");
    }
    if (report.grown_from > 0)
        text += fmt::format("{}the vocabulary grows from {} to {} tokens: rows of new ones are the mean of the others",
                            text.empty() ? "" : "; ", report.grown_from, report.grown_to);
    if (!report.difference.empty())
        text += fmt::format("{}the checkpoint's config.json differs in {}", text.empty() ? "" : "; ",
                            fmt::join(report.difference, ", "));
    return text;
}

} // namespace moe::train
