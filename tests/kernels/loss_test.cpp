// Cross-entropy cut into vocabulary slices against the whole softmax in double; the embedding's look-up and gradient.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace moe::test {
namespace {

// The four pieces over `slices` ranks, with the reductions between them done here, or all at once over one slice.
struct LossData {
    std::int64_t rows, vocab, local;
    int slices; // 0: one, at once
    double scale, gradient_scale;
    Index labels;
    std::vector<Tensor> logits, dlogits;
    Tensor max, stat, loss;

    LossShape shape(int slice) const { return {rows, local, vocab, slice * local, scale}; }
    Vec row(const std::vector<Tensor>& parts, std::int64_t r) const {
        Vec out;
        for (const Tensor& part : parts) {
            for (const double x : part.values(r * local, local)) out.push_back(x);
        }
        return out;
    }
    void run() {
        const auto& k = table();
        if (slices == 0) {
            max = Tensor(Type::f32, rows), stat = Tensor(Type::f32, 2 * rows);
            return k.cross_entropy(shape(0), gradient_scale, logits[0].src(), labels.data(), max.f32(), stat.f32(),
                                   loss.f32(), dlogits[0].dst(), nullptr);
        }
        Vec best(static_cast<std::size_t>(rows), -std::numeric_limits<double>::infinity()),
            sums(static_cast<std::size_t>(2 * rows), 0.0);
        for (int s = 0; s < slices; ++s) {
            Tensor part(Type::f32, rows);
            k.ce_max(shape(s), logits[static_cast<std::size_t>(s)].src(), part.f32(), nullptr);
            for (std::int64_t r = 0; r < rows; ++r)
                best[static_cast<std::size_t>(r)] = std::max(best[static_cast<std::size_t>(r)], part.at(r));
        }
        max = Tensor(Type::f32, best);
        for (int s = 0; s < slices; ++s) {
            Tensor part(Type::f32, 2 * rows);
            k.ce_sum(shape(s), logits[static_cast<std::size_t>(s)].src(), max.f32(), labels.data(), part.f32(),
                     nullptr);
            sums = plus(sums, part.values());
        }
        stat = Tensor(Type::f32, sums);
        k.ce_loss(shape(0), max.f32(), stat.f32(), loss.f32(), nullptr);
        for (int s = 0; s < slices; ++s) {
            const auto i = static_cast<std::size_t>(s);
            k.ce_grad(shape(s), logits[i].src(), max.f32(), stat.f32(), labels.data(), dlogits[i].dst(), nullptr);
        }
    }
    double row_loss(const Vec& x, std::int32_t label) const {
        const double best = *std::max_element(x.begin(), x.begin() + vocab);
        double sum = 0.0;
        for (std::int64_t j = 0; j < vocab; ++j) sum += std::exp(x[static_cast<std::size_t>(j)] - best);
        return best + std::log(sum) - x[static_cast<std::size_t>(label)];
    }
};

Case loss_case(std::int64_t rows, std::int64_t vocab, std::int64_t local, int slices, double spread, Type type) {
    Case out;
    out.name = fmt::format("cross{}entropy rows {} vocabulary {} in {} slices of {} spread {} {}",
                           slices == 0 ? "_" : "-", rows, vocab, std::max(slices, 1), local, spread, name_of(type));
    Random random(out.name);
    auto d = std::make_shared<LossData>(LossData{rows,
                                                 vocab,
                                                 local,
                                                 slices,
                                                 1.0 / 7.0,
                                                 (slices == 0 ? 3.0 : 1.0) / 7.0,
                                                 random.indices(rows, static_cast<std::int32_t>(vocab)),
                                                 {},
                                                 {},
                                                 Tensor(Type::f32, std::int64_t{0}),
                                                 Tensor(Type::f32, std::int64_t{0}),
                                                 Tensor(Type::f32, Vec{0.5})});
    for (int s = 0; s < std::max(slices, 1); ++s) {
        d->logits.push_back(random.tensor(type, rows * local, spread));
        d->dlogits.emplace_back(type, rows * local);
        // Padding columns hold the largest numbers of all, so that a kernel that looks at them is caught.
        for (std::int64_t i = 0; i < rows * local; ++i) {
            if (s * local + i % local >= vocab) d->logits.back().set(i, 1e4);
        }
    }
    out.tolerance = tolerance(type);
    const auto elements = static_cast<double>(rows * local * std::max(slices, 1));
    out.flops = 6.0 * elements;
    // Read by three pieces and written by one, or each once.
    out.bytes = (slices == 0 ? 2.0 : 4.0) * elements * static_cast<double>(size_of(type));
    out.call = [d] { d->run(); };
    out.error = [d] {
        double loss = 0.5;
        Vec got, want;
        for (std::int64_t r = 0; r < d->rows; ++r) {
            const Vec x = d->row(d->logits, r), dx = d->row(d->dlogits, r);
            const std::int32_t label = d->labels[static_cast<std::size_t>(r)];
            loss += d->scale * d->row_loss(x, label);
            const Vec g = gradient([&](const Vec& at) { return Vec{d->row_loss(at, label)}; }, x, {d->gradient_scale});
            got.insert(got.end(), dx.begin(), dx.end());
            want.insert(want.end(), g.begin(), g.end());
            for (std::size_t j = static_cast<std::size_t>(d->vocab); j < dx.size(); ++j) {
                if (dx[j] != 0.0) return demand(false);
            }
        }
        return worst({relative_error(d->loss, {loss}), relative_error(got, want)});
    };
    return out;
}

Case embedding_case(bool grad, std::int64_t rows, std::int64_t cols, std::int64_t vocab, std::int64_t first,
                    std::int64_t local, Type type) {
    struct Data {
        std::int64_t rows, cols, first, local;
        Index ids;
        Tensor table, x, dx, dtable;
        Vec before;
    };
    Case out;
    out.name = fmt::format("embedding{} {}x{} of {}, slice {}+{} {}", grad ? "_grad" : "", rows, cols, vocab, first,
                           local, name_of(type));
    Random random(out.name);
    auto d = std::make_shared<Data>(Data{rows,
                                         cols,
                                         first,
                                         local,
                                         random.indices(rows, static_cast<std::int32_t>(vocab)),
                                         random.tensor(type, local * cols),
                                         Tensor(type, rows * cols),
                                         random.tensor(type, rows * cols),
                                         random.tensor(Type::f32, local * cols),
                                         {}});
    d->before = d->dtable.values();
    out.tolerance = grad ? f32_tolerance : 0.0;
    out.flops = grad ? static_cast<double>(rows * cols) : 0.0;
    const auto width = static_cast<double>(size_of(type));
    out.bytes = static_cast<double>(rows * cols) * (grad ? width + 8.0 : 2.0 * width);
    out.call = [d, grad] {
        if (grad) {
            table().embedding_grad(d->ids.data(), d->dx.src(), d->dtable.f32(), d->rows, d->cols, d->first, d->local,
                                   nullptr);
        } else {
            table().embedding(d->ids.data(), d->table.src(), d->x.dst(), d->rows, d->cols, d->first, d->local, nullptr);
        }
    };
    out.error = [d, grad] {
        Vec x(static_cast<std::size_t>(d->rows * d->cols), 0.0), dtable = d->before;
        for (std::int64_t i = 0; i < d->rows * d->cols; ++i) {
            const std::int64_t id = d->ids[static_cast<std::size_t>(i / d->cols)] - d->first;
            if (id < 0 || id >= d->local) continue;
            x[static_cast<std::size_t>(i)] = d->table.at(id * d->cols + i % d->cols);
            dtable[static_cast<std::size_t>(id * d->cols + i % d->cols)] += d->dx.at(i);
        }
        return grad ? relative_error(d->dtable, dtable) : relative_error(d->x, x);
    };
    return out;
}

} // namespace

TEST_CASE("cross-entropy: one slice, several, padding, a slice of padding only") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check(loss_case(5, 11, 11, 1, 2.0, type));
        check(loss_case(4, 13, 16, 1, 2.0, type));
        check(loss_case(6, 21, 8, 3, 2.0, type));
        check(loss_case(3, 7, 4, 4, 2.0, type));
        check(loss_case(1, 1, 2, 1, 2.0, type));
        check(loss_case(4, 9, 3, 3, 60.0, type));
        check(loss_case(1, 2060, 2100, 1, 1.0, type));
    }
}

TEST_CASE("cross-entropy at once: padding, one column, few and many packs") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check(loss_case(5, 11, 11, 0, 2.0, type));
        check(loss_case(4, 13, 16, 0, 2.0, type));
        check(loss_case(1, 1, 2, 0, 2.0, type));
        check(loss_case(4, 9, 24, 0, 60.0, type));
        check(loss_case(1, 2060, 2104, 0, 1.0, type));
    }
}

TEST_CASE("embedding and its gradient: slices of the vocabulary") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool grad : {false, true}) {
            check(embedding_case(grad, 9, 5, 7, 0, 7, type));
            check(embedding_case(grad, 40, 3, 12, 4, 4, type));
            check(embedding_case(grad, 6, 4, 5, 8, 4, type));
        }
    }
}

std::vector<Case> loss_benchmarks() {
    std::vector<Case> out;
    for (const Type type : {Type::f32, Type::bf16}) {
        out.push_back(loss_case(256, 32000, 32000, 1, 2.0, type));
        out.push_back(loss_case(256, 32000, 32000, 0, 2.0, type));
        out.push_back(embedding_case(false, 4096, 1024, 4096, 0, 4096, type));
        out.push_back(embedding_case(true, 4096, 1024, 4096, 0, 4096, type));
    }
    return out;
}

} // namespace moe::test
