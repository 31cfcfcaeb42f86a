// Row movement: expert-major order, its inverse and sum, and the sorting of rows that arrive by source; all exact.
#include "tests/kernels/case.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

namespace moe::test {
namespace {

struct PermuteData {
    PermuteShape s;
    int experts;
    Index index, counts, row_of;
    Tensor x, rows, y;
    std::int64_t copies() const { return s.tokens * s.top_k; }
};

std::shared_ptr<PermuteData> permute_data(const std::string& name, PermuteShape s, int experts, bool all_on_one,
                                          Type type) {
    Random random(name);
    Index index = random.indices(s.tokens * s.top_k, experts);
    if (all_on_one) std::fill(index.begin(), index.end(), experts / 2);
    const std::int64_t copies = s.tokens * s.top_k, side = (s.per_copy ? copies : s.tokens) * s.cols;
    auto d = std::make_shared<PermuteData>(PermuteData{
        s, experts, index, Index(static_cast<std::size_t>(experts), -9), Index(static_cast<std::size_t>(copies), -9),
        random.tensor(type, side), Tensor(type, copies * s.cols), Tensor(type, side)});
    table().permute_map(d->index.data(), d->counts.data(), d->row_of.data(), nullptr, s.tokens, s.top_k, experts, 0,
                        nullptr);
    return d;
}

// The place of copy c: all copies for lower experts, and the earlier ones for its own, lie before it.
double map_error(const PermuteData& d) {
    Index place(d.index.size(), 0), counts(static_cast<std::size_t>(d.experts), 0);
    for (std::size_t c = 0; c < d.index.size(); ++c) {
        ++counts[static_cast<std::size_t>(d.index[c])];
        for (std::size_t other = 0; other < d.index.size(); ++other) {
            place[c] += d.index[other] < d.index[c] || (d.index[other] == d.index[c] && other < c) ? 1 : 0;
        }
    }
    return demand(place == d.row_of && counts == d.counts);
}

Case permute_case(bool back, PermuteShape s, int experts, bool all_on_one, Type type) {
    Case out;
    out.name =
        fmt::format("{} tokens {} cols {} top {} experts {}{}{} {}", back ? "unpermute" : "permute", s.tokens, s.cols,
                    s.top_k, experts, s.per_copy ? " per copy" : "", all_on_one ? " all on one" : "", name_of(type));
    auto d = permute_data(out.name, s, experts, all_on_one, type);
    out.tolerance = back && !s.per_copy ? tolerance(type) : 0.0;
    out.flops = back && !s.per_copy ? static_cast<double>(d->copies() * s.cols) : 0.0;
    out.bytes = static_cast<double>((d->copies() + (s.per_copy ? d->copies() : s.tokens)) * s.cols) *
                static_cast<double>(size_of(type));
    if (!back) {
        out.call = [d] { table().permute(d->s, d->x.src(), d->row_of.data(), d->rows.dst(), nullptr); };
        out.error = [d] {
            double error = map_error(*d);
            for (std::int64_t c = 0; c < d->copies(); ++c) {
                const std::int64_t from = d->s.per_copy ? c : c / d->s.top_k;
                error = worst({error, demand(d->rows.values(d->row_of[static_cast<std::size_t>(c)] * d->s.cols,
                                                            d->s.cols) == d->x.values(from * d->s.cols, d->s.cols))});
            }
            return error;
        };
        return out;
    }
    Random random(out.name + " rows");
    d->rows = random.tensor(type, d->copies() * s.cols);
    out.call = [d] { table().unpermute(d->s, d->rows.src(), d->row_of.data(), d->y.dst(), nullptr); };
    out.error = [d] {
        Vec want(static_cast<std::size_t>(d->y.size()), 0.0);
        for (std::int64_t c = 0; c < d->copies(); ++c) {
            const std::int64_t to = d->s.per_copy ? c : c / d->s.top_k;
            for (std::int64_t j = 0; j < d->s.cols; ++j) {
                want[static_cast<std::size_t>(to * d->s.cols + j)] +=
                    d->rows.at(d->row_of[static_cast<std::size_t>(c)] * d->s.cols + j);
            }
        }
        return relative_error(d->y, want);
    };
    return out;
}

PermuteShape shape(std::int64_t tokens, std::int64_t cols, int top_k, bool per_copy = false) {
    PermuteShape s;
    s.tokens = tokens, s.cols = cols, s.top_k = top_k, s.per_copy = per_copy;
    return s;
}

// One row per arriving copy, labelled (expert, arrival), so that the wanted order is a stable sort by expert.
struct SortData {
    RowsShape s;
    Index all_counts;
    std::vector<std::int32_t> expert_of_arrival;
    Tensor arrived, sorted, back;
};

std::shared_ptr<SortData> sort_data(const std::string& name, RowsShape s, std::int32_t most, bool lone, Type type) {
    Random random(name);
    const std::int64_t sources = std::int64_t{s.ep} * s.etp;
    auto d = std::make_shared<SortData>(SortData{s,
                                                 random.indices(sources * s.experts, most + 1),
                                                 {},
                                                 Tensor(type, std::int64_t{0}),
                                                 Tensor(type, std::int64_t{0}),
                                                 Tensor(type, std::int64_t{0})});
    for (std::size_t i = 0; lone && i < d->all_counts.size(); ++i) {
        if (static_cast<int>(i) % s.experts != s.first) d->all_counts[i] = 0;
    }
    for (int m = 0; m < s.etp; ++m) {
        for (int p = 0; p < s.ep; ++p) {
            for (int e = 0; e < s.local; ++e) {
                const int rows = d->all_counts[static_cast<std::size_t>((p * s.etp + m) * s.experts + s.first + e)];
                d->expert_of_arrival.insert(d->expert_of_arrival.end(), static_cast<std::size_t>(rows), e);
            }
        }
    }
    const auto rows = static_cast<std::int64_t>(d->expert_of_arrival.size());
    d->s.capacity = rows + 3;
    d->arrived = Tensor(type, d->s.capacity * s.cols), d->sorted = d->arrived, d->back = d->arrived;
    const Vec values = random.normal(rows * s.cols);
    for (std::size_t i = 0; i < values.size(); ++i) d->arrived.set(static_cast<std::int64_t>(i), values[i]);
    return d;
}

Case sort_case(RowsShape s, std::int32_t most, bool lone, Type type) {
    Case out;
    out.name = fmt::format("sort_rows and back cols {} experts {} here {}+{} ep {} etp {} up to {}{} {}", s.cols,
                           s.experts, s.first, s.local, s.ep, s.etp, most, lone ? " lone" : "", name_of(type));
    auto d = sort_data(out.name, s, most, lone, type);
    out.tolerance = 0.0;
    const auto rows = static_cast<std::int64_t>(d->expert_of_arrival.size());
    out.bytes = 4.0 * static_cast<double>(rows * s.cols) * static_cast<double>(size_of(type));
    out.call = [d] {
        table().sort_rows(d->s, d->arrived.src(), d->all_counts.data(), d->sorted.dst(), nullptr);
        table().unsort_rows(d->s, d->sorted.src(), d->all_counts.data(), d->back.dst(), nullptr);
    };
    out.error = [d, rows] {
        Index order(static_cast<std::size_t>(rows)), counts(static_cast<std::size_t>(d->s.local), -1),
            want(static_cast<std::size_t>(d->s.local), 0);
        std::iota(order.begin(), order.end(), 0);
        const auto expert = [&](int arrival) { return d->expert_of_arrival[static_cast<std::size_t>(arrival)]; };
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return expert(a) < expert(b); });
        for (const int e : d->expert_of_arrival) ++want[static_cast<std::size_t>(e)];
        table().expert_counts(d->all_counts.data(), counts.data(), d->s.ep * d->s.etp, d->s.experts, d->s.first,
                              d->s.local, nullptr);
        bool same = counts == want;
        for (std::int64_t i = 0; i < rows; ++i) {
            same = same && d->sorted.values(i * d->s.cols, d->s.cols) ==
                               d->arrived.values(order[static_cast<std::size_t>(i)] * d->s.cols, d->s.cols);
        }
        const std::int64_t used = rows * d->s.cols, rest = d->sorted.size() - used;
        return demand(same && d->back.values(0, used) == d->arrived.values(0, used) &&
                      d->sorted.untouched(used, rest) && d->back.untouched(used, rest));
    };
    return out;
}

RowsShape rows_shape(std::int64_t cols, int experts, int first, int local, int ep, int etp = 1) {
    RowsShape s;
    s.cols = cols, s.experts = experts, s.first = first, s.local = local, s.ep = ep, s.etp = etp;
    return s;
}

} // namespace

TEST_CASE("permute_map, permute, unpermute: random, empty and lone experts, values per copy") {
    for (const Type type : {Type::f32, Type::bf16}) {
        for (const bool back : {false, true}) {
            check(permute_case(back, shape(13, 7, 3), 5, false, type));
            check(permute_case(back, shape(4, 5, 2), 32, false, type));
            check(permute_case(back, shape(6, 3, 2), 4, true, type));
            check(permute_case(back, shape(1, 1, 1), 1, false, type));
            check(permute_case(back, shape(9, 1, 4, true), 6, false, type));
            check(permute_case(back, shape(5, 3, 2, true), 4, false, type));
        }
    }
}

TEST_CASE("expert_counts, sort_rows, unsort_rows: one or several sources, ETP members, a lone expert, nothing") {
    for (const Type type : {Type::f32, Type::bf16}) {
        check(sort_case(rows_shape(5, 4, 0, 4, 1), 6, false, type));
        check(sort_case(rows_shape(3, 12, 6, 3, 4), 4, false, type));
        check(sort_case(rows_shape(2, 8, 4, 4, 2, 2), 5, false, type));
        check(sort_case(rows_shape(4, 6, 3, 3, 2), 9, true, type));
        check(sort_case(rows_shape(4, 6, 3, 3, 2), 0, false, type));
        check(sort_case(rows_shape(1, 4, 2, 1, 4), 1, false, type));
    }
}

TEST_CASE("fit_rows: what fits goes through, what does not routes nothing and says by how many rows") {
    const FitShape shapes[] = {{24, 0, 4, 1, 1}, {1000, 0, 8, 4, 1}, {70, 0, 6, 2, 3}, {5, 0, 64, 64, 1}};
    for (FitShape s : shapes) {
        const int local = s.experts / s.ep;
        Random random(fmt::format("fit {} {} {}", s.experts, s.ep, s.etp));
        Index counts, row_of;
        for (int i = 0; i < s.ep * s.etp * s.experts; ++i) counts.push_back(random.below(9));
        for (std::int64_t i = 0; i < s.copies; ++i) row_of.push_back(random.below(1000) - 1);
        std::int64_t fullest = 0; // rows of the fullest buffer
        for (int p = 0; p < s.ep; ++p)
            for (int m = 0; m < s.etp; ++m) {
                std::int64_t rows = 0;
                for (int cell = 0; cell < s.ep * s.etp * s.experts; ++cell)
                    if (cell % s.experts / local == p && cell / s.experts % s.etp == m)
                        rows += counts[static_cast<std::size_t>(cell)];
                fullest = std::max(fullest, rows);
            }
        for (const std::int64_t missing : {std::int64_t{-3}, std::int64_t{0}, std::int64_t{1}, fullest}) {
            s.capacity = fullest - missing;
            Index fitting(counts.size(), 77), fitting_row_of(row_of.size(), 77);
            Tensor overflow(Type::f32, Vec{2.0});
            table().fit_rows(s, counts.data(), row_of.data(), fitting.data(), fitting_row_of.data(), overflow.f32(),
                             nullptr);
            const bool fits = missing <= 0;
            CHECK(fitting == (fits ? counts : Index(counts.size(), 0)));
            CHECK(fitting_row_of == (fits ? row_of : Index(row_of.size(), -1)));
            CHECK(overflow.at(0) == 2.0 + (fits ? 0.0 : static_cast<double>(missing)));
        }
    }
}

TEST_CASE("sort_rows: counts beyond the capacity write nothing outside it") {
    RowsShape s = rows_shape(2, 2, 0, 2, 2);
    s.capacity = 4;
    const Index all_counts{2, 3, 4, 1}; // ten rows for four places
    Random random("overflow");
    const Tensor arrived = random.tensor(Type::f32, 8);
    Tensor sorted(Type::f32, 8), back(Type::f32, 8);
    table().sort_rows(s, arrived.src(), all_counts.data(), sorted.dst(), nullptr);
    CHECK(sorted.values(0, 4) == arrived.values(0, 4)); // the first expert's rows of the first source fit
    table().unsort_rows(s, sorted.src(), all_counts.data(), back.dst(), nullptr);
    CHECK(back.values(0, 4) == arrived.values(0, 4));
}

std::vector<Case> permute_benchmarks() {
    std::vector<Case> out;
    for (const Type type : {Type::f32, Type::bf16}) {
        out.push_back(permute_case(false, shape(2048, 1024, 4), 16, false, type));
        out.push_back(permute_case(true, shape(2048, 1024, 4), 16, false, type));
        out.push_back(sort_case(rows_shape(1024, 32, 8, 8, 4), 128, false, type));
    }
    return out;
}

} // namespace moe::test
