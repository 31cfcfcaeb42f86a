// DeepSeek sparse attention: the choice of keys, attention over them, and the gradient of the indexer's loss.
//
// A query's keys are gathered, so that all heads' products with them are one. With P the softmax of a head over them
// and dP = do V^T, the gradients are those of attention: dS = P (dP - sum of do o), dq = scale dS K, dk = scale dS^T q,
// to whose first columns P^T do comes. Of the indexer's loss the gradient of a score is softmax(scores) - p.
#include "kernels/cpu/rows.hpp"

#include <Eigen/Core>

#include <cmath>
#include <limits>

namespace moe::cpu {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using Vector = Eigen::VectorXf;
using Map = Eigen::Map<Matrix>;
using In = Eigen::Map<const Matrix>;

// The keys of one sequence in order of their positions.
In read_keys(const PickedKeys& s, std::int64_t sequence, Src k, std::int64_t dim, Slot slot) {
    float* rows = scratch(slot, s.seq_k * dim);
    for (std::int64_t at = 0; at < s.seq_k; ++at)
        load(k, (s.place(at) * s.batch + sequence) * dim, dim, rows + at * dim);
    return In(rows, s.seq_k, dim);
}

void write_keys(const PickedKeys& s, std::int64_t sequence, const float* rows, std::int64_t dim, Dst k) {
    for (std::int64_t at = 0; at < s.seq_k; ++at)
        store(k, (s.place(at) * s.batch + sequence) * dim, dim, rows + at * dim);
}

// What a query sees: positions [first, first + count).
struct Seen {
    std::int64_t first = 0, count = 0;
};
Seen seen_by(const PickedKeys& s, std::int64_t i, std::int64_t row) {
    const std::int64_t first = s.document_start != nullptr ? s.document_start[row] : 0;
    return {first, s.position(i) + 1 - first};
}

// Rows of x [rows, heads * dim], as [heads, dim].
In read_heads(Src x, std::int64_t row, std::int64_t heads, std::int64_t dim, Slot slot) {
    float* to = scratch(slot, heads * dim);
    load(x, row * heads * dim, heads * dim, to);
    return In(to, heads, dim);
}

// Products of an indexer's heads and keys [heads, keys], negative ones 0, and what the weights and the scale make of
// them.
struct Scores {
    Matrix products;
    Vector scores;
};
void score(const IndexShape& s, const In& q, const Vector& w, const Eigen::Ref<const Matrix>& k, Scores& z) {
    z.products.noalias() = q * k.transpose();
    z.products = (z.products.array() > 0.0f).select(z.products, 0.0f);
    z.scores.noalias() = static_cast<float>(s.scale) * (z.products.transpose() * w);
}

Vector read_weights(Src w, std::int64_t row, int heads) {
    Vector weights(heads);
    load(w, row * heads, heads, weights.data());
    return weights;
}

void pick_keys(const IndexShape& s, Src q, Src k, Src w, std::int32_t* keys, void*) {
    const PickedKeys& z = s.keys;
    Scores of;
    std::int32_t* const order = index_scratch(z.seq_k);
    for (std::int64_t b = 0; b < z.batch; ++b) {
        const In all = read_keys(z, b, k, s.dim, Slot::a);
        for (std::int64_t i = 0; i < z.seq_q; ++i) {
            const std::int64_t row = i * z.batch + b;
            const Seen seen = seen_by(z, i, row);
            std::int32_t* const picked = keys + row * z.top_k;
            const std::int64_t count = std::min(seen.count, z.top_k);
            for (std::int64_t j = 0; j < seen.count; ++j) order[j] = static_cast<std::int32_t>(j);
            if (count < seen.count) {
                score(s, read_heads(q, row, s.heads, s.dim, Slot::b), read_weights(w, row, s.heads),
                      all.middleRows(seen.first, seen.count), of);
                for (float& x : of.scores)
                    if (std::isnan(x)) x = -std::numeric_limits<float>::infinity();
                std::nth_element(order, order + count, order + seen.count, [&of](std::int32_t a, std::int32_t c) {
                    return of.scores[a] > of.scores[c] || (of.scores[a] == of.scores[c] && a < c);
                });
                std::sort(order, order + count, [](std::int32_t a, std::int32_t c) { return a < c; });
            }
            for (std::int64_t j = 0; j < count; ++j) picked[j] = static_cast<std::int32_t>(seen.first) + order[j];
            std::fill_n(picked + count, z.top_k - count, -1);
        }
    }
}

// Positions of a query's keys, as listed or, without a list, all that it sees.
struct KeyList {
    const std::int32_t* at;
    std::int64_t count;
};
KeyList keys_of(const PickedKeys& s, const std::int32_t* keys, std::int64_t i, std::int64_t row) {
    if (keys != nullptr) {
        const std::int32_t* const list = keys + row * s.top_k;
        std::int64_t count = 0;
        while (count < s.top_k && list[count] >= 0) ++count;
        return {list, count};
    }
    const Seen seen = seen_by(s, i, row);
    std::int32_t* const all = index_scratch(s.seq_k);
    for (std::int64_t j = 0; j < seen.count; ++j) all[j] = static_cast<std::int32_t>(seen.first + j);
    return {all, seen.count};
}

void gather_rows(const In& all, const KeyList& list, Matrix& rows) {
    rows.resize(list.count, all.cols());
    for (std::int64_t j = 0; j < list.count; ++j) rows.row(j) = all.row(list.at[j]);
}

void add_rows(const Matrix& rows, const KeyList& list, Map to) {
    for (std::int64_t j = 0; j < list.count; ++j) to.row(list.at[j]) += rows.row(j);
}

// Rows of logits become those of their softmax; the log of each one's sum.
void softmax(Matrix& x, float* lse, std::int64_t stride) {
    for (Eigen::Index h = 0; h < x.rows(); ++h) {
        const float top = x.row(h).maxCoeff();
        x.row(h) = (x.row(h).array() - top).exp();
        const float sum = x.row(h).sum();
        x.row(h) /= sum;
        if (lse != nullptr) lse[h * stride] = top + std::log(sum);
    }
}

void attention_picked(const LatentShape& s, Src q, Src k, const std::int32_t* keys, Dst o, float* lse, void*) {
    const PickedKeys& z = s.keys;
    Matrix key, p, out;
    for (std::int64_t b = 0; b < z.batch; ++b) {
        const In all = read_keys(z, b, k, s.qk_dim, Slot::a);
        for (std::int64_t i = 0; i < z.seq_q; ++i) {
            const std::int64_t row = i * z.batch + b;
            const KeyList list = keys_of(z, keys, i, row);
            gather_rows(all, list, key);
            p.noalias() =
                static_cast<float>(s.scale) * (read_heads(q, row, s.heads, s.qk_dim, Slot::b) * key.transpose());
            for (Eigen::Index h = 0; s.largest != nullptr && h < p.rows(); ++h)
                s.largest[h] = std::max(s.largest[h], p.row(h).maxCoeff());
            softmax(p, lse + row, z.rows());
            out.noalias() = p * key.leftCols(s.v_dim);
            store(o, row * s.heads * s.v_dim, s.heads * s.v_dim, out.data());
        }
    }
}

void attention_picked_grad(const LatentShape& s, Src dout, Src q, Src k, Src o, const float* lse,
                           const std::int32_t* keys, Dst dq, Dst dk, void*) {
    const PickedKeys& z = s.keys;
    const auto scale = static_cast<float>(s.scale);
    Matrix key, p, dp, dquery, dkey;
    float* const sums = scratch(Slot::c, z.seq_k * s.qk_dim);
    for (std::int64_t b = 0; b < z.batch; ++b) {
        const In all = read_keys(z, b, k, s.qk_dim, Slot::a);
        Map dall(sums, z.seq_k, s.qk_dim);
        dall.setZero();
        for (std::int64_t i = 0; i < z.seq_q; ++i) {
            const std::int64_t row = i * z.batch + b;
            const In query = read_heads(q, row, s.heads, s.qk_dim, Slot::b);
            const In dvalue = read_heads(dout, row, s.heads, s.v_dim, Slot::d);
            const In value = read_heads(o, row, s.heads, s.v_dim, Slot::e);
            const KeyList list = keys_of(z, keys, i, row);
            gather_rows(all, list, key);
            p.noalias() = scale * (query * key.transpose());
            dp.noalias() = dvalue * key.leftCols(s.v_dim).transpose();
            for (Eigen::Index h = 0; h < s.heads; ++h) {
                p.row(h) = (p.row(h).array() - lse[h * z.rows() + row]).exp();
                const float along = dvalue.row(h).dot(value.row(h));
                dp.row(h) = p.row(h).array() * (dp.row(h).array() - along) * scale;
            }
            dquery.noalias() = dp * key;
            store(dq, row * s.heads * s.qk_dim, s.heads * s.qk_dim, dquery.data());
            dkey.noalias() = dp.transpose() * query;
            dkey.leftCols(s.v_dim).noalias() += p.transpose() * dvalue;
            add_rows(dkey, list, dall);
        }
        write_keys(z, b, sums, s.qk_dim, dk);
    }
}

double sum_of_xlogx(const float* x, std::int64_t n) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < n; ++i)
        if (x[i] > 0.0f) sum += static_cast<double>(x[i]) * std::log(static_cast<double>(x[i]));
    return sum;
}

void xlogx(const float* x, double factor, float* s, std::int64_t n, void*) {
    *s += static_cast<float>(factor * sum_of_xlogx(x, n));
}

// -sum of p log softmax(scores).
double cross_entropy_of(const Vector& p, const Vector& scores) {
    const float most = scores.maxCoeff();
    const float log_sum = most + std::log((scores.array() - most).exp().sum());
    double sum = 0.0;
    for (Eigen::Index j = 0; j < p.size(); ++j)
        sum += static_cast<double>(p[j]) * static_cast<double>(log_sum - scores[j]);
    return sum;
}

void pick_keys_grad(const IndexLossShape& s, Src q, Src k, Src index_q, Src index_k, Src w, const std::int32_t* keys,
                    Dst dindex_q, Dst dindex_k, Dst dw, float*, float* loss, float* shares, void*) {
    const PickedKeys& z = s.index.keys;
    const std::int64_t heads = s.index.heads, dim = s.index.dim;
    Matrix key, index_key, p, chosen(1, 1), dproducts, dquery, dkey;
    Scores of;
    Vector target, dscores, dweights;
    float* const sums = scratch(Slot::c, z.seq_k * dim);
    double sum = 0.0; // over queries
    for (std::int64_t b = 0; b < z.batch; ++b) {
        const In all = read_keys(z, b, k, s.core.qk_dim, Slot::a);
        const In all_index = read_keys(z, b, index_k, dim, Slot::f);
        Map dall(sums, z.seq_k, dim);
        dall.setZero();
        for (std::int64_t i = 0; i < z.seq_q; ++i) {
            const std::int64_t row = i * z.batch + b;
            const KeyList list = keys_of(z, s.all_keys ? nullptr : keys, i, row);
            gather_rows(all, list, key);
            gather_rows(all_index, list, index_key);
            p.noalias() = static_cast<float>(s.core.scale) *
                          (read_heads(q, row, s.core.heads, s.core.qk_dim, Slot::b) * key.transpose());
            softmax(p, nullptr, 0);
            const In query = read_heads(index_q, row, heads, dim, Slot::d);
            const Vector weights = read_weights(w, row, s.index.heads);
            score(s.index, query, weights, index_key, of);
            chosen = of.scores.transpose();
            softmax(chosen, nullptr, 0);
            const float share = 1.0f / static_cast<float>(s.all_heads);
            target = p.colwise().sum().transpose() * share;
            if (loss != nullptr) sum += cross_entropy_of(target, of.scores);
            if (shares != nullptr) {
                std::copy_n(target.data(), target.size(), shares + row * s.width());
                std::fill_n(shares + row * s.width() + target.size(), s.width() - target.size(), 0.0f);
            } else if (loss != nullptr) {
                sum += sum_of_xlogx(target.data(), target.size());
            }
            dscores = chosen.row(0).transpose() * (static_cast<float>(s.core.heads) * share) - target;
            dscores *= static_cast<float>(s.factor * s.index.scale);
            dweights.noalias() = of.products * dscores;
            store(dw, row * heads, heads, dweights.data());
            dproducts.noalias() = weights * dscores.transpose();
            dproducts = (of.products.array() > 0.0f).select(dproducts, 0.0f);
            dquery.noalias() = dproducts * index_key;
            store(dindex_q, row * heads * dim, heads * dim, dquery.data());
            dkey.noalias() = dproducts.transpose() * query;
            add_rows(dkey, list, dall);
        }
        write_keys(z, b, sums, dim, dindex_k);
    }
    if (loss != nullptr) *loss += static_cast<float>(s.factor * sum);
}

void cache_rows(Src x, const std::int32_t* positions, Dst cache, std::int64_t rows, std::int64_t cols, void*) {
    for (std::int64_t r = 0; r < rows; ++r) move(x, r * cols, cache, positions[r] * cols, cols);
}

} // namespace

void add_sparse(Kernels& table) {
    table.pick_keys = pick_keys;
    table.pick_keys_grad = pick_keys_grad;
    table.xlogx = xlogx;
    table.attention_picked = attention_picked;
    table.attention_picked_grad = attention_picked_grad;
    table.cache_rows = cache_rows;
}

} // namespace moe::cpu
