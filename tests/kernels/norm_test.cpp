// RMSNorm, additions and biases against double references; gradients against central differences.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace moe::test {
namespace {

constexpr double eps = 1e-6;

Vec rmsnorm_reference(const Vec& x, const Vec& w) {
    Vec y(x.size());
    for (std::size_t row = 0; row < x.size(); row += w.size()) {
        double squares = 0.0;
        for (std::size_t j = 0; j < w.size(); ++j) squares += x[row + j] * x[row + j];
        const double scale = 1.0 / std::sqrt(squares / static_cast<double>(w.size()) + eps);
        for (std::size_t j = 0; j < w.size(); ++j) y[row + j] = x[row + j] * scale * w[j];
    }
    return y;
}

struct NormData {
    std::int64_t rows, cols, stride;
    Tensor x, w, dy, residual, y, rstd, dx, dw;
    Vec dw_before;
    Vec packed(const Tensor& t) const {
        Vec out;
        for (std::int64_t r = 0; r < rows; ++r) {
            for (const double v : t.values(r * stride, cols)) out.push_back(v);
        }
        return out;
    }
    bool gaps_untouched(const Tensor& t) const {
        for (std::int64_t r = 0; r < rows; ++r) {
            if (!t.untouched(r * stride + cols, stride - cols)) return false;
        }
        return true;
    }
};

std::shared_ptr<NormData> norm_data(const std::string& name, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                                    Type type) {
    Random random(name);
    auto d = std::make_shared<NormData>(NormData{rows,
                                                 cols,
                                                 stride,
                                                 random.tensor(type, rows * stride),
                                                 random.tensor(type, cols),
                                                 random.tensor(type, rows * cols),
                                                 random.tensor(type, rows * cols),
                                                 Tensor(type, rows * cols),
                                                 Tensor(Type::f32, rows),
                                                 Tensor(type, rows * stride),
                                                 random.tensor(Type::f32, cols),
                                                 {}});
    d->dw_before = d->dw.values();
    return d;
}

Case rmsnorm_case(std::int64_t rows, std::int64_t cols, std::int64_t stride, Type type) {
    Case out;
    out.name = fmt::format("rmsnorm {}x{} stride {} {}", rows, cols, stride, name_of(type));
    auto d = norm_data(out.name, rows, cols, stride, type);
    out.tolerance = tolerance(type);
    out.flops = 4.0 * static_cast<double>(rows * cols);
    out.bytes = 2.0 * static_cast<double>(rows * cols) * static_cast<double>(size_of(type));
    out.call = [d] {
        table().rmsnorm(d->x.src(), d->w.src(), d->y.dst(), d->rstd.f32(), d->rows, d->cols, d->stride, eps, nullptr);
    };
    out.error = [d] {
        const Vec x = d->packed(d->x);
        Vec rstd;
        for (std::int64_t r = 0; r < d->rows; ++r) {
            double squares = 0.0;
            for (std::int64_t j = 0; j < d->cols; ++j)
                squares += std::pow(x[static_cast<std::size_t>(r * d->cols + j)], 2);
            rstd.push_back(1.0 / std::sqrt(squares / static_cast<double>(d->cols) + eps));
        }
        return worst({relative_error(d->y, rmsnorm_reference(x, d->w.values())), relative_error(d->rstd, rstd)});
    };
    return out;
}

Case rmsnorm_grad_case(std::int64_t rows, std::int64_t cols, std::int64_t stride, bool residual, Type type) {
    Case out;
    out.name = fmt::format("rmsnorm_grad {}x{} stride {}{} {}", rows, cols, stride, residual ? " residual" : "",
                           name_of(type));
    auto d = norm_data(out.name, rows, cols, stride, type);
    out.tolerance = tolerance(type);
    out.flops = 11.0 * static_cast<double>(rows * cols);
    out.bytes = (residual ? 4.0 : 3.0) * static_cast<double>(rows * cols) * static_cast<double>(size_of(type));
    table().rmsnorm(d->x.src(), d->w.src(), d->y.dst(), d->rstd.f32(), rows, cols, stride, eps, nullptr);
    out.call = [d, residual] {
        table().rmsnorm_grad(d->dy.src(), d->x.src(), d->w.src(), d->rstd.f32(), residual ? d->residual.src() : Src{},
                             d->dx.dst(), d->dw.f32(), d->rows, d->cols, d->stride, nullptr);
    };
    out.error = [d, residual] {
        const Vec x = d->packed(d->x), w = d->w.values(), dy = d->dy.values();
        Vec dx = gradient([&](const Vec& at) { return rmsnorm_reference(at, w); }, x, dy);
        if (residual) dx = plus(dx, d->residual.values());
        const Vec dw = gradient([&](const Vec& at) { return rmsnorm_reference(x, at); }, w, dy);
        return worst({relative_error(d->packed(d->dx), dx), relative_error(d->dw, plus(d->dw_before, dw)),
                      demand(d->gaps_untouched(d->dx))});
    };
    return out;
}

Case elementwise_case(const std::string& op, std::int64_t rows, std::int64_t cols, Type type) {
    struct Data {
        std::int64_t rows, cols;
        Tensor a, b, bias, y, db;
        Vec before;
    };
    Case out;
    out.name = fmt::format("{} {}x{} {}", op, rows, cols, name_of(type));
    Random random(out.name);
    auto d = std::make_shared<Data>(Data{rows,
                                         cols,
                                         random.tensor(type, rows * cols),
                                         random.tensor(type, rows * cols),
                                         random.tensor(type, cols),
                                         Tensor(type, rows * cols),
                                         random.tensor(Type::f32, cols),
                                         {}});
    d->before = d->db.values();
    out.tolerance = op == "bias_grad" ? f32_tolerance : tolerance(type);
    out.flops = static_cast<double>(rows * cols);
    out.bytes = (op == "add"        ? 3.0
                 : op == "bias_add" ? 2.0
                                    : 1.0) *
                static_cast<double>(rows * cols) * static_cast<double>(size_of(type));
    out.call = [d, op] {
        if (op == "add") table().add(d->a.src(), d->b.src(), d->y.dst(), d->rows * d->cols, nullptr);
        if (op == "bias_add") table().bias_add(d->a.src(), d->bias.src(), d->y.dst(), d->rows, d->cols, nullptr);
        if (op == "bias_grad") table().bias_grad(d->a.src(), d->db.f32(), d->rows, d->cols, nullptr);
    };
    out.error = [d, op] {
        const Vec a = d->a.values();
        if (op == "add") return relative_error(d->y, plus(a, d->b.values()));
        Vec sum = a, db = d->before;
        for (std::int64_t i = 0; i < d->rows * d->cols; ++i) {
            sum[static_cast<std::size_t>(i)] += d->bias.at(i % d->cols);
            db[static_cast<std::size_t>(i % d->cols)] += a[static_cast<std::size_t>(i)];
        }
        return op == "bias_add" ? relative_error(d->y, sum) : relative_error(d->db, db);
    };
    return out;
}

struct GroupedBias {
    Index counts;
    std::int64_t cols, capacity, rows;
    bool probs_given;
    Tensor x, b, probs, y, db, dprobs;
    Vec db_before;
    float share; // of the bias: a quarter where routing weights are given, as if over four ranks

    std::size_t expert_of(std::int64_t row) const {
        std::size_t e = 0;
        for (std::int64_t end = counts[0]; row >= end; end += counts[e]) ++e;
        return e;
    }
    Vec forward(const Vec& b_at, const Vec& p_at) const {
        Vec out;
        for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t j = 0; j < cols; ++j) {
                const double bias = b_at[expert_of(r) * static_cast<std::size_t>(cols) + static_cast<std::size_t>(j)];
                out.push_back(x.at(r * cols + j) +
                              share * bias * (probs_given ? p_at[static_cast<std::size_t>(r)] : 1.0));
            }
        }
        return out;
    }
};

std::shared_ptr<GroupedBias> grouped_bias(const std::string& name, const Index& counts, std::int64_t cols,
                                          std::int64_t capacity, bool probs, Type type) {
    Random random(name);
    std::int64_t rows = 0;
    for (const int c : counts) rows += c;
    const auto groups = static_cast<std::int64_t>(counts.size());
    auto d = std::make_shared<GroupedBias>(GroupedBias{counts,
                                                       cols,
                                                       capacity,
                                                       rows,
                                                       probs,
                                                       Tensor(type, capacity * cols),
                                                       random.tensor(type, groups * cols),
                                                       Tensor(Type::f32, capacity),
                                                       Tensor(type, capacity * cols),
                                                       random.tensor(Type::f32, groups * cols),
                                                       Tensor(Type::f32, capacity),
                                                       {},
                                                       probs ? 0.25f : 1.0f});
    for (std::int64_t i = 0; i < rows * cols; ++i) d->x.set(i, random.normal(1)[0]);
    for (std::int64_t r = 0; r < rows; ++r) d->probs.set(r, random.normal(1)[0]);
    d->db_before = d->db.values();
    return d;
}

Case grouped_bias_case(bool grad, const Index& counts, std::int64_t cols, std::int64_t capacity, bool probs,
                       Type type) {
    Case out;
    out.name = fmt::format("grouped_bias_{} counts {} cols {} capacity {}{} {}", grad ? "grad" : "add",
                           fmt::join(counts, ","), cols, capacity, probs ? " probs" : "", name_of(type));
    auto d = grouped_bias(out.name, counts, cols, capacity, probs, type);
    const auto groups = static_cast<int>(counts.size());
    out.tolerance = grad ? f32_tolerance : tolerance(type);
    out.flops = 2.0 * static_cast<double>(d->rows * cols);
    out.bytes = (grad ? 1.0 : 2.0) * static_cast<double>(d->rows * cols) * static_cast<double>(size_of(type));
    out.call = [d, groups, grad] {
        const float* p = d->probs_given ? d->probs.f32() : nullptr;
        if (grad) {
            table().grouped_bias_grad(d->x.src(), d->counts.data(), d->b.src(), p, d->db.f32(),
                                      d->probs_given ? d->dprobs.f32() : nullptr, groups, d->cols, d->capacity,
                                      d->share, nullptr);
        } else {
            table().grouped_bias_add(d->x.src(), d->b.src(), d->counts.data(), p, d->y.dst(), groups, d->cols,
                                     d->capacity, d->share, nullptr);
        }
    };
    out.error = [d, grad] {
        const Vec b = d->b.values(), p = d->probs.values(0, d->rows), rows = d->x.values(0, d->rows * d->cols);
        if (!grad) {
            return worst({relative_error(d->y.values(0, d->rows * d->cols), d->forward(b, p)),
                          demand(d->y.untouched(d->rows * d->cols, (d->capacity - d->rows) * d->cols))});
        }
        const Vec db = gradient([&](const Vec& at) { return d->forward(at, p); }, b, rows);
        const double error = relative_error(d->db, plus(d->db_before, db));
        if (!d->probs_given) return error;
        const Vec dp = gradient([&](const Vec& at) { return d->forward(b, at); }, p, rows);
        return worst({error, relative_error(d->dprobs.values(0, d->rows), dp),
                      demand(d->dprobs.untouched(d->rows, d->capacity - d->rows))});
    };
    return out;
}

} // namespace

TEST_CASE("rmsnorm and its gradient: odd widths, strided rows, residual gradient") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const auto& [rows, cols, stride] :
             {std::array<std::int64_t, 3>{1, 1, 1}, {3, 7, 7}, {4, 33, 40}, {5, 64, 64}, {2, 130, 131}}) {
            check(rmsnorm_case(rows, cols, stride, type));
            if (cols == 1) continue; // y is the sign of x: the gradient is what eps leaves of zero
            check(rmsnorm_grad_case(rows, cols, stride, false, type));
            check(rmsnorm_grad_case(rows, cols, stride, true, type));
        }
    }
}

TEST_CASE("add, bias_add, bias_grad") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const char* op : {"add", "bias_add", "bias_grad"}) {
            check(elementwise_case(op, 1, 1, type));
            check(elementwise_case(op, 7, 19, type));
            check(elementwise_case(op, 3, 2051, type));
        }
    }
}

TEST_CASE("add, bias_add and the residual norm gradient work in place") {
    const auto& k = table();
    for (const Type type : {Type::f32, Type::bf16}) {
        Random random("in place " + name_of(type));
        Tensor x = random.tensor(type, 6 * 37), y = x;
        const Tensor b = random.tensor(type, 6 * 37), w = random.tensor(type, 37);
        Tensor want(type, 6 * 37), rstd(Type::f32, 6), dw(Type::f32, Vec(37, 0.0)), dw2 = dw;
        k.add(x.src(), b.src(), want.dst(), 6 * 37, nullptr);
        k.add(y.src(), b.src(), y.dst(), 6 * 37, nullptr);
        CHECK(y.values() == want.values());
        y = x;
        k.bias_add(x.src(), w.src(), want.dst(), 6, 37, nullptr);
        k.bias_add(y.src(), w.src(), y.dst(), 6, 37, nullptr);
        CHECK(y.values() == want.values());
        y = x;
        Tensor normed(type, 6 * 37);
        k.rmsnorm(b.src(), w.src(), normed.dst(), rstd.f32(), 6, 37, 0, eps, nullptr);
        k.rmsnorm_grad(normed.src(), b.src(), w.src(), rstd.f32(), x.src(), want.dst(), dw.f32(), 6, 37, 0, nullptr);
        k.rmsnorm_grad(normed.src(), b.src(), w.src(), rstd.f32(), y.src(), y.dst(), dw2.f32(), 6, 37, 0, nullptr);
        CHECK(y.values() == want.values());
    }
}

TEST_CASE("copy_columns moves or adds a range of columns and leaves the others") {
    const std::int64_t rows = 5;
    for (const Type from : {Type::f32, Type::bf16}) {
        for (const Type to : {Type::f32, Type::bf16}) {
            for (const bool accumulate : {false, true}) {
                const std::string name =
                    fmt::format("copy_columns {} to {} {}", name_of(from), name_of(to), accumulate);
                INFO(name, " MOE_TEST_SEED=", seed());
                Random random(name);
                const Tensor x = random.tensor(from, rows * 11);
                Tensor y = random.tensor(to, rows * 9);
                Vec want = y.values();
                for (std::int64_t r = 0; r < rows; ++r)
                    for (std::int64_t c = 0; c < 4; ++c) {
                        double& at = want[static_cast<std::size_t>(r * 9 + 2 + c)];
                        at = x.at(r * 11 + 6 + c) + (accumulate ? at : 0.0);
                    }
                table().copy_columns({rows, 4, 11, 6, 9, 2, accumulate}, x.src(), y.dst(), nullptr);
                CHECK(relative_error(y, want) <= (from == to && !accumulate ? 0.0 : tolerance(to)));
            }
        }
    }
}

TEST_CASE("grouped biases: empty experts and rows beyond the counts") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool grad : {false, true}) {
            for (const bool probs : {false, true}) {
                check(grouped_bias_case(grad, {2, 0, 1, 4}, 9, 10, probs, type));
                check(grouped_bias_case(grad, {0, 5, 0}, 33, 5, probs, type));
            }
        }
    }
}

std::vector<Case> norm_benchmarks() {
    std::vector<Case> out;
    for (const Type type : {Type::f32, Type::bf16}) {
        out.push_back(rmsnorm_case(2048, 1024, 1024, type));
        out.push_back(rmsnorm_grad_case(2048, 1024, 1024, true, type));
        for (const char* op : {"add", "bias_add", "bias_grad"}) out.push_back(elementwise_case(op, 2048, 1024, type));
        out.push_back(grouped_bias_case(false, Index(8, 256), 1024, 2048, true, type));
        out.push_back(grouped_bias_case(true, Index(8, 256), 1024, 2048, true, type));
    }
    return out;
}

} // namespace moe::test
