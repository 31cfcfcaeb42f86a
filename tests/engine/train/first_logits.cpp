// Embedding, norm, projections and rotations of the first layer, plainly.
#include "tests/engine/train/first_logits.hpp"

#include "planner/model/model.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <string>

using namespace moe;

namespace {

constexpr double nowhere = -std::numeric_limits<double>::infinity();

using Row = std::vector<double>;

// A trainer's weight in double, as rows.
struct Weight {
    Weight(const train::Trainer& trainer, const std::string& name) {
        const std::vector<float> read = trainer.read_weight(name);
        values.assign(read.begin(), read.end());
        cols = static_cast<std::size_t>(trainer.parameters().at(name).cols);
    }
    Row times(const Row& x) const {
        Row y(values.size() / cols, 0.0);
        for (std::size_t i = 0; i < y.size(); ++i)
            y[i] = std::inner_product(x.begin(), x.end(), values.begin() + static_cast<std::ptrdiff_t>(i * cols), 0.0);
        return y;
    }

    Row values;
    std::size_t cols = 1;
};

Row normed(const Row& x, const Row& gain, double eps) {
    const double square = std::inner_product(x.begin(), x.end(), x.begin(), 0.0) / static_cast<double>(x.size());
    Row y(x.size());
    for (std::size_t i = 0; i < y.size(); ++i) y[i] = x[i] / std::sqrt(square + eps) * gain[i];
    return y;
}

// Turns x[first, first + width): halves of it, or neighbours where interleaved.
void turn(Row& x, std::size_t first, std::size_t width, std::int64_t position, double theta, bool interleaved) {
    for (std::size_t i = 0; i < width / 2; ++i) {
        const double angle =
            static_cast<double>(position) * std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(width));
        double &a = x[first + (interleaved ? 2 * i : i)], &b = x[first + (interleaved ? 2 * i + 1 : i + width / 2)];
        const double before = a;
        a = before * std::cos(angle) - b * std::sin(angle);
        b = b * std::cos(angle) + before * std::sin(angle);
    }
}

// Queries and keys of a token in layer 0, head by head one behind the other, keys once for each query head.
struct QueryKey {
    Row q, k;
};

class FirstLayer {
public:
    explicit FirstLayer(const train::Trainer& trainer)
        : a_(trainer.plan().model->kinds[static_cast<std::size_t>(trainer.plan().model->layers[0])].attention),
          trainer_(trainer) {}

    QueryKey of(std::int32_t token, std::int64_t position) const {
        const auto row = embedding_.values.begin() + token * static_cast<std::ptrdiff_t>(embedding_.cols);
        const Row x = normed({row, row + static_cast<std::ptrdiff_t>(embedding_.cols)}, norm_.values, eps_);
        return a_.kind == model::AttentionKind::mla ? latent(x, position) : grouped(x, position);
    }
    Row largest(const train::SampleSource& source, std::int64_t samples) const {
        Row most(static_cast<std::size_t>(a_.heads), nowhere);
        std::vector<std::int32_t> tokens(static_cast<std::size_t>(trainer_.plan().seq + 1));
        const auto width = static_cast<std::size_t>(a_.qk_dim);
        for (std::int64_t sample = 0; sample < samples; ++sample) {
            source(sample, tokens);
            std::vector<QueryKey> rows;
            for (std::size_t i = 0; i + 1 < tokens.size(); ++i) {
                rows.push_back(of(tokens[i], static_cast<std::int64_t>(i)));
                for (const QueryKey& seen : rows)
                    for (std::size_t h = 0; h < most.size(); ++h) {
                        const auto at = static_cast<std::ptrdiff_t>(h * width);
                        const double dot = std::inner_product(seen.k.begin() + at, seen.k.begin() + at + a_.qk_dim,
                                                              rows.back().q.begin() + at, 0.0);
                        most[h] = std::max(most[h], dot / std::sqrt(static_cast<double>(width)));
                    }
            }
        }
        return most;
    }

private:
    QueryKey grouped(const Row& x, std::int64_t position) const {
        const auto width = static_cast<std::size_t>(a_.qk_dim);
        Row q = weight("q_proj.weight").times(x), few = weight("k_proj.weight").times(x);
        if (a_.qkv_bias) {
            const Row dq = weight("q_proj.bias").values, dk = weight("k_proj.bias").values;
            std::transform(q.begin(), q.end(), dq.begin(), q.begin(), std::plus<>());
            std::transform(few.begin(), few.end(), dk.begin(), few.begin(), std::plus<>());
        }
        for (Row* of : {&q, &few})
            for (std::size_t at = 0; at < of->size(); at += width) turn(*of, at, width, position, theta_, false);
        Row k;
        for (int h = 0; h < a_.heads; ++h) {
            const auto at = few.begin() + h / (a_.heads / a_.kv_heads) * static_cast<std::ptrdiff_t>(width);
            k.insert(k.end(), at, at + static_cast<std::ptrdiff_t>(width));
        }
        return {q, k};
    }
    QueryKey latent(const Row& x, std::int64_t position) const {
        const auto width = static_cast<std::size_t>(a_.qk_dim), rope = static_cast<std::size_t>(a_.rope_dim),
                   nope = width - rope, values = static_cast<std::size_t>(a_.v_dim);
        const Row down = weight("kv_a_proj_with_mqa.weight").times(x);
        const Row kv =
            weight("kv_b_proj.weight")
                .times(normed({down.begin(), down.begin() + a_.kv_lora}, weight("kv_a_layernorm.weight").values, eps_));
        Row shared(down.begin() + a_.kv_lora, down.end()), k;
        turn(shared, 0, rope, position, theta_, true);
        Row q =
            a_.q_lora > 0
                ? weight("q_b_proj.weight")
                      .times(normed(weight("q_a_proj.weight").times(x), weight("q_a_layernorm.weight").values, eps_))
                : weight("q_proj.weight").times(x);
        for (std::size_t h = 0; h < static_cast<std::size_t>(a_.heads); ++h) {
            turn(q, h * width + nope, rope, position, theta_, true);
            const auto at = kv.begin() + static_cast<std::ptrdiff_t>(h * (nope + values));
            k.insert(k.end(), at, at + static_cast<std::ptrdiff_t>(nope));
            k.insert(k.end(), shared.begin(), shared.end());
        }
        return {q, k};
    }
    const Weight& weight(const std::string& name) const {
        const auto known = weights_.find(name);
        if (known != weights_.end()) return known->second;
        return weights_.emplace(name, Weight(trainer_, "model.layers.0.self_attn." + name)).first->second;
    }

    const model::Attention& a_;
    const train::Trainer& trainer_;
    const double eps_ = trainer_.plan().model->norm_eps, theta_ = trainer_.plan().model->rope_of(a_).theta;
    const Weight embedding_{trainer_, "model.embed_tokens.weight"},
        norm_{trainer_, "model.layers.0.input_layernorm.weight"};
    mutable std::map<std::string, Weight> weights_;
};

} // namespace

std::vector<double> first_logits(const train::Trainer& trainer, const train::SampleSource& source,
                                 std::int64_t samples) {
    return FirstLayer(trainer).largest(source, samples);
}
