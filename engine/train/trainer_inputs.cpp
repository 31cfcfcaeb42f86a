// What a step reads: samples of the batch, and the rows of tokens, labels, documents and chunks of every rank.
#include "engine/train/trainer.hpp"

#include "engine/weights/parameters.hpp"
#include "kernels/deviate.hpp"
#include "planner/model/model.hpp"

#include <algorithm>
#include <array>
#include <numeric>

namespace moe::train {

// Reads the samples [first, end) into the batch; what is left of it has no tokens.
void Trainer::take_samples(const SampleSource& source, std::int64_t first, std::int64_t end) {
    const auto row = static_cast<std::size_t>(plan_.seq + 1);
    for (std::int64_t s = 0; s < plan_.gbs; ++s) {
        const std::span<std::int32_t> tokens = std::span(tokens_).subspan(static_cast<std::size_t>(s) * row, row);
        if (first + s < end)
            source(first + s, tokens);
        else
            std::fill(tokens.begin(), tokens.end(), -1);
        const std::span<std::int32_t> counts = std::span(counts_).subspan(static_cast<std::size_t>(s) * row, row);
        std::fill(counts.begin(), counts.end(), 1);
        if (first + s < end && source.counts) source.counts(first + s, counts);
        if (starts_.empty()) continue;
        const std::span<std::int32_t> starts = std::span(starts_).subspan(static_cast<std::size_t>(s) * row, row);
        std::fill(starts.begin(), starts.end(), 0);
        if (first + s < end && source.documents) source.documents(first + s, starts);
    }
}

// Micro-batch j of data-parallel rank d holds samples (j * DP + d) * mbs and following; rows are (place in this rank's
// positions) * mbs + sequence.
void Trainer::fill_inputs(Rank& r) {
    const program::Program& program = program_of(r);
    write_routing(r);
    for (std::size_t d = 0; d < program.io.label_shares.size(); ++d)
        r.device->write(r.arena->at(program.io.label_shares[d]), &label_shares_[d], sizeof label_shares_[d]);
    for (int j = 0; j < micro_batches(); ++j) {
        if (plan_.masks_documents()) write_documents(r, j);
        if (program.io.chunk_starts != program::no_tensor) write_chunks(r, j);
    }
    if (program.io.noise != program::no_tensor) write_noise(r);
    const bool embedding =
        std::any_of(program.chunks.begin(), program.chunks.end(), [](const plan::Stage& s) { return s.embedding; });
    const bool labels = std::any_of(program.chunks.begin(), program.chunks.end(),
                                    [](const plan::Stage& s) { return s.loss || s.mtp > 0; });
    if (!embedding && !labels) return;
    for (int j = 0; j < micro_batches(); ++j) {
        if (embedding) write_tokens(r, program.io.ids, j, 0);
        if (labels) write_tokens(r, program.io.labels, j, 1);
        for (std::size_t d = 0; labels && d < program.io.mtp_labels.size(); ++d)
            write_tokens(r, program.io.mtp_labels[d], j, static_cast<std::int64_t>(d) + 2);
    }
}

void Trainer::write_tokens(Rank& r, program::TensorId input, int micro_batch, std::int64_t ahead) {
    write_rows(r, input, micro_batch, r.positions, [&](std::int64_t sample, std::int32_t position) {
        if (ahead > 0 && (position + ahead > plan_.seq || !labels(sample, position, ahead))) return -1;
        return tokens_[static_cast<std::size_t>(sample * (plan_.seq + 1) + position + ahead)];
    });
}

template <class Value>
void Trainer::write_rows(Rank& r, program::TensorId input, int micro_batch, std::span<const std::int32_t> positions,
                         Value value) {
    const auto mbs = static_cast<std::size_t>(plan_.mbs);
    const std::int64_t first = (micro_batch * plan_.dp + r.data) * plan_.mbs;
    r.tokens.resize(mbs * positions.size());
    for (std::size_t b = 0; b < mbs; ++b)
        for (std::size_t i = 0; i < positions.size(); ++i)
            r.tokens[i * mbs + b] = value(first + static_cast<std::int64_t>(b), positions[i]);
    r.device->write(r.arena->at(input, micro_batch), r.tokens.data(), r.tokens.size() * sizeof r.tokens[0]);
}

void Trainer::write_documents(Rank& r, int micro_batch) {
    const program::ProgramIo& io = program_of(r).io;
    const auto start = [&](std::int64_t sample, std::int32_t position) {
        return starts_[static_cast<std::size_t>(sample * (plan_.seq + 1) + position)];
    };
    write_rows(r, io.document_starts, micro_batch, r.queries, start);
    if (io.sequence_starts != program::no_tensor) {
        r.sequence.resize(static_cast<std::size_t>(plan_.seq));
        std::iota(r.sequence.begin(), r.sequence.end(), 0);
        write_rows(r, io.sequence_starts, micro_batch, r.sequence, start);
    }
    write_rows(r, io.document_positions, micro_batch, r.positions,
               [&](std::int64_t sample, std::int32_t position) { return position - start(sample, position); });
}

// The key is that of the seed and the step alone: the samples' numbers within the step are the same under every plan.
void Trainer::write_noise(Rank& r) {
    const std::uint64_t key =
        splitmix(weights::random_stream(options_.seed, "input_jitter") ^ splitmix(static_cast<std::uint64_t>(done_)));
    for (int j = 0; j < micro_batches(); ++j) {
        const std::array<std::uint32_t, 3> noise{
            static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32),
            static_cast<std::uint32_t>((std::int64_t{j} * plan_.dp + r.data) * plan_.mbs)};
        r.device->write(r.arena->at(program_of(r).io.noise, j), noise.data(), sizeof noise);
    }
}

// Chunks are counted from where a document begins, as positions are.
void Trainer::write_chunks(Rank& r, int micro_batch) {
    std::int64_t chunk = 1;
    for (const model::LayerKind& kind : plan_.model->kinds) chunk = std::max(chunk, kind.attention.chunk);
    write_rows(r, program_of(r).io.chunk_starts, micro_batch, r.queries,
               [&](std::int64_t sample, std::int32_t position) {
                   const std::int32_t start =
                       starts_.empty() ? 0 : starts_[static_cast<std::size_t>(sample * (plan_.seq + 1) + position)];
                   return start + static_cast<std::int32_t>((position - start) / chunk * chunk);
               });
}

bool Trainer::labels(std::int64_t sample, std::int64_t position, std::int64_t ahead) const {
    const auto at = static_cast<std::size_t>(sample * (plan_.seq + 1) + position + ahead);
    return counts_[at] != 0 && (starts_.empty() || starts_[at] <= position);
}

// The scale of a loss is that of all labels; where documents mask some, the share makes it that of the others.
void Trainer::count_labels() {
    label_shares_.clear();
    for (std::size_t depth = 0; depth <= plan_.model->mtp.size(); ++depth) {
        const auto ahead = static_cast<std::int64_t>(depth) + 1;
        std::int64_t all = 0, counted = 0;
        for (std::int64_t s = 0; s < batch_; ++s)
            for (std::int64_t at = 0; at + ahead <= plan_.seq; ++at, ++all) counted += labels(s, at, ahead) ? 1 : 0;
        label_shares_.push_back(
            counted > 0 ? static_cast<float>(static_cast<double>(all) / static_cast<double>(counted)) : 0.0f);
    }
}

void Trainer::set_hyper(double lr) {
    // Moments have moved in the steps that were taken alone.
    const double t = static_cast<double>(done_ + 1 - bad_.skipped());
    const double values[9] = {lr,
                              options_.beta1,
                              options_.beta2,
                              options_.eps,
                              options_.weight_decay,
                              options_.clip,
                              1.0 - std::pow(options_.beta1, t),
                              1.0 - std::pow(options_.beta2, t),
                              options_.skip_bad ? static_cast<double>(bad_.limit(options_.spike)) : 0.0};
    std::transform(values, values + 9, hyper_.begin(), [](double v) { return static_cast<float>(v); });
}

} // namespace moe::train
