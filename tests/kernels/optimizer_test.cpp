// AdamW against its formula in double, and the flat vector kernels: zero, norm, casts, reductions, BF16 rounding.
#include "tests/kernels/case.hpp"

#include "kernels/bf16.hpp"

#include <doctest/doctest.h>

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace moe::test {
namespace {

struct AdamData {
    AdamShape s;
    Tensor g, squares, hyper, master, m, v, w;
    Vec master_before, m_before, v_before;
};

Case adamw_case(AdamShape s, double clip, Type moments, Type weights) {
    Case out;
    out.name = fmt::format("adamw {} of a bucket from {} decayed {} rate {} decay {} clip {} moments {} weights {}",
                           s.elements, s.offset, s.decayed, s.rate, s.decay, clip, name_of(moments), name_of(weights));
    Random random(out.name);
    const std::int64_t n = s.elements;
    Vec v = random.normal(n, 0.1);
    for (double& x : v) x = x * x;
    const Vec hyper{0.01, 0.9, 0.95, 1e-8, 0.1, clip, 1.0 - std::pow(0.9, 3), 1.0 - std::pow(0.95, 3), 0.0};
    auto d = std::make_shared<AdamData>(AdamData{s,
                                                 random.tensor(Type::f32, n),
                                                 Tensor(Type::f32, Vec{9.0}),
                                                 Tensor(Type::f32, hyper),
                                                 random.tensor(Type::f32, n),
                                                 random.tensor(moments, n, 0.1),
                                                 Tensor(moments, v),
                                                 Tensor(weights, n),
                                                 {},
                                                 {},
                                                 {}});
    d->master_before = d->master.values(), d->m_before = d->m.values(), d->v_before = d->v.values();
    out.tolerance = worst({tolerance(moments), tolerance(weights)});
    out.flops = 16.0 * static_cast<double>(n);
    out.bytes = static_cast<double>(n) *
                (12.0 + 4.0 * static_cast<double>(size_of(moments)) + static_cast<double>(size_of(weights)));
    out.call = [d] {
        table().adamw(d->s, d->g.f32(), d->squares.f32(), d->hyper.f32(), nullptr, d->master.f32(), d->m.dst(),
                      d->v.dst(), d->w.dst(), nullptr);
    };
    out.error = [d, clip] {
        const double factor = clip > 0.0 && 3.0 > clip ? clip / (3.0 + 1e-6) : 1.0;
        Vec master, m, v_want;
        for (std::int64_t i = 0; i < d->s.elements; ++i) {
            const auto at = static_cast<std::size_t>(i);
            const double g = d->g.at(i) * factor, run = d->s.offset + i < d->s.decayed ? d->hyper.at(4) : 0.0;
            const double decay = d->s.decay < 0.0f ? run : static_cast<double>(d->s.decay);
            m.push_back(d->hyper.at(1) * d->m_before[at] + (1.0 - d->hyper.at(1)) * g);
            v_want.push_back(d->hyper.at(2) * d->v_before[at] + (1.0 - d->hyper.at(2)) * g * g);
            const double update =
                m.back() / d->hyper.at(6) / (std::sqrt(v_want.back() / d->hyper.at(7)) + d->hyper.at(3));
            master.push_back(d->master_before[at] -
                             d->hyper.at(0) * static_cast<double>(d->s.rate) * (update + decay * d->master_before[at]));
        }
        return worst({relative_error(d->master, master) * tolerance(d->w.type()) / f32_tolerance,
                      relative_error(d->m, m), relative_error(d->v, v_want), relative_error(d->w, master)});
    };
    return out;
}

enum class Flat { zero, sum_squares, cast, reduce_sum, reduce_max };

Case flat_case(Flat op, std::int64_t n, Type from, Type to) {
    struct Data {
        std::int64_t n;
        std::vector<Tensor> x;
        Tensor y, s;
    };
    const char* names[] = {"zero", "sum_squares", "cast", "reduce_sum of 5", "reduce_max of 5"};
    Case out;
    out.name = fmt::format("{} {} {}->{}", names[static_cast<int>(op)], n, name_of(from), name_of(to));
    Random random(out.name);
    auto d = std::make_shared<Data>(Data{n, {}, Tensor(to, n), Tensor(Type::f32, Vec{2.0})});
    for (int i = 0; i < 5; ++i) d->x.push_back(random.tensor(from, n));
    const bool several = op == Flat::reduce_sum || op == Flat::reduce_max;
    out.tolerance = op == Flat::zero ? 0.0 : tolerance(op == Flat::sum_squares ? Type::f32 : to);
    out.flops = op == Flat::sum_squares ? 2.0 * static_cast<double>(n) : several ? 4.0 * static_cast<double>(n) : 0.0;
    out.bytes =
        static_cast<double>(n) * (static_cast<double>(op == Flat::zero ? 0 : size_of(from)) * (several ? 5.0 : 1.0) +
                                  static_cast<double>(op == Flat::sum_squares ? 0 : size_of(to)));
    out.call = [d, op, from] {
        const auto& k = table();
        const void* sources[5];
        for (std::size_t i = 0; i < 5; ++i) sources[i] = d->x[i].src().data;
        if (op == Flat::zero) k.zero(d->y.dst(), d->n, nullptr);
        if (op == Flat::sum_squares) k.sum_squares(d->x[0].src(), d->s.f32(), d->n, nullptr);
        if (op == Flat::cast) k.cast(d->x[0].src(), d->y.dst(), d->n, nullptr);
        if (op == Flat::reduce_sum) k.reduce_sum(d->y.dst(), sources, 5, d->n, from, nullptr);
        if (op == Flat::reduce_max) k.reduce_max(d->y.dst(), sources, 5, d->n, from, nullptr);
    };
    out.error = [d, op] {
        Vec want = d->x[0].values();
        double squares = 2.0;
        for (const double x : want) squares += x * x;
        if (op == Flat::sum_squares) return relative_error(d->s, {squares});
        if (op == Flat::zero) return relative_error(d->y, Vec(want.size(), 0.0));
        for (std::size_t s = 1; s < 5 && op != Flat::cast; ++s) {
            const Vec x = d->x[s].values();
            for (std::size_t i = 0; i < x.size(); ++i)
                want[i] = op == Flat::reduce_sum ? want[i] + x[i] : std::max(want[i], x[i]);
        }
        return relative_error(d->y, want);
    };
    return out;
}

AdamShape shape(std::int64_t elements, std::int64_t offset, std::int64_t decayed, float rate = 1.0f,
                float decay = -1.0f) {
    return {elements, offset, decayed, rate, decay};
}

} // namespace

TEST_CASE("adamw and expert_bias: nothing is written in bad steps and where rows overflowed, everything elsewhere") {
    struct Step {
        double overflow, squares, most; // most: largest square with which a step is taken
        bool taken;
    };
    constexpr double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity(),
                     largest = std::numeric_limits<float>::max();
    for (const Step& step :
         {Step{0.0, 9.0, 0.0, true}, Step{3.0, 9.0, 0.0, false}, Step{0.0, 9.0, 9.0, true}, Step{0.0, 9.0, 8.5, false},
          Step{0.0, 9.0, largest, true}, Step{0.0, infinity, largest, false}, Step{0.0, nan, largest, false}}) {
        CAPTURE(step.squares);
        CAPTURE(step.most);
        Random random("overflow");
        const Tensor hyper(Type::f32, Vec{0.01, 0.9, 0.95, 1e-8, 0.1, 1.0, 0.1, 0.05, step.most});
        const Tensor g = random.tensor(Type::f32, 300), squares(Type::f32, Vec{step.squares}),
                     load(Type::f32, Vec{1.0, 2.0, 3.0, 6.0}), flag(Type::f32, Vec{step.overflow});
        Tensor master = random.tensor(Type::f32, 300), m = random.tensor(Type::bf16, 300), v(Type::bf16, Vec(300, 0.5)),
               w = random.tensor(Type::bf16, 300);
        const Vec before[] = {master.values(), m.values(), v.values(), w.values()};
        table().adamw({300, 0, 300}, g.f32(), squares.f32(), hyper.f32(), flag.f32(), master.f32(), m.dst(), v.dst(),
                      w.dst(), nullptr);
        const Vec after[] = {master.values(), m.values(), v.values(), w.values()};
        for (int i = 0; i < 4; ++i) CHECK((after[i] == before[i]) == !step.taken);
        Tensor bias(Type::f32, Vec(4, 1.0)), copy(Type::bf16, Vec(4, 1.0));
        table().expert_bias({4, 0, 0, 4, 0.25}, load.f32(), flag.f32(), squares.f32(), hyper.f32(), bias.f32(),
                            copy.dst(), nullptr);
        CHECK((bias.values() == Vec(4, 1.0)) == !step.taken);
        CHECK((copy.values() == Vec(4, 1.0)) == !step.taken);
    }
}

TEST_CASE("adamw: clipping, the decayed part of the bucket, storages") {
    for (const Type moments : {Type::f32, Type::bf16}) {
        for (const Type weights : {Type::f32, Type::bf16}) {
            for (const double clip : {0.0, 1.0, 100.0}) check(adamw_case(shape(77, 100, 130), clip, moments, weights));
            check(adamw_case(shape(50, 0, 50), 1.0, moments, weights));
            check(adamw_case(shape(50, 60, 50), 1.0, moments, weights));
            check(adamw_case(shape(4500, 10, 2300), 1.0, moments, weights));
            check(adamw_case(shape(5, 0, 0), 1.0, moments, weights));
            check(adamw_case(shape(77, 100, 130, 0.25f), 1.0, moments, weights));
            for (const float decay : {0.0f, 4.0f})
                check(adamw_case(shape(4500, 10, 2300, 3.0f, decay), 1.0, moments, weights));
        }
    }
}

TEST_CASE("flat kernels: zero, sum of squares, casts, reductions") {
    for (const Type from : {Type::f32, Type::bf16}) {
        for (const Type to : {Type::f32, Type::bf16}) {
            for (const std::int64_t n : {5, 31, 2049}) {
                for (const Flat op : {Flat::zero, Flat::sum_squares, Flat::cast, Flat::reduce_sum, Flat::reduce_max})
                    check(flat_case(op, n, from, to));
            }
        }
    }
}

TEST_CASE("reduce_sum: the order of the sources is kept, and the result may replace one of them") {
    // 2^24 + 1 rounds back to 2^24 in FP32, so that only the order given makes (2^24 - 2^24) + 1 = 1.
    Tensor a(Type::f32, Vec{16777216.0}), b(Type::f32, Vec{-16777216.0}), c(Type::f32, Vec{1.0});
    const void* in_order[] = {a.src().data, b.src().data, c.src().data};
    const void* other[] = {a.src().data, c.src().data, b.src().data};
    Tensor y(Type::f32, 1);
    table().reduce_sum(y.dst(), other, 3, 1, Type::f32, nullptr);
    CHECK(y.at(0) == 0.0);
    table().reduce_sum(b.dst(), in_order, 3, 1, Type::f32, nullptr);
    CHECK(b.at(0) == 1.0);
}

TEST_CASE("bf16: rounding to nearest even, infinities and NaN") {
    CHECK(bf16_of_float(1.0f) == 0x3f80);
    CHECK(bf16_of_float(1.0f + 1.0f / 256.0f) == 0x3f80);         // halfway: the even neighbour is below
    CHECK(bf16_of_float(1.0f + 3.0f / 256.0f) == 0x3f82);         // halfway: the even neighbour is above
    CHECK(bf16_of_float(1.0f + 1.0f / 256.0f + 1e-6f) == 0x3f81); // just above halfway
    CHECK(bf16_of_float(-2.0f) == 0xc000);
    CHECK(bf16_of_float(std::numeric_limits<float>::infinity()) == 0x7f80);
    CHECK(bf16_of_float(std::numeric_limits<float>::max()) == 0x7f80);
    CHECK(std::isnan(float_of_bf16(bf16_of_float(std::numeric_limits<float>::quiet_NaN()))));
    CHECK(std::isnan(float_of_bf16(bf16_of_float(std::bit_cast<float>(0x7f800001u)))));
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float value = float_of_bf16(static_cast<std::uint16_t>(bits));
        if (!std::isnan(value)) CHECK(bf16_of_float(value) == bits);
    }
}

TEST_CASE("the CPU table is complete and names itself") {
    const Kernels& k = cpu_kernels();
    CHECK(std::string(k.name) == "cpu");
    // Every member after the name is a function pointer of one size: none may be null.
    const auto* entries = static_cast<const unsigned char*>(static_cast<const void*>(&k));
    const unsigned char none[sizeof(void*)] = {};
    for (std::size_t at = 0; at < sizeof(Kernels); at += sizeof(void*)) {
        INFO("entry ", at / sizeof(void*));
        CHECK(!std::equal(entries + at, entries + at + sizeof(void*), none));
    }
    std::string why = "x";
    CHECK(cpu_supported(why));
    CHECK(why.empty());
}

std::vector<Case> optimizer_benchmarks() {
    std::vector<Case> out;
    const std::int64_t n = 4 << 20;
    for (const Type type : {Type::f32, Type::bf16}) {
        out.push_back(adamw_case(shape(n, 0, n), 1.0, type, type));
        for (const Flat op : {Flat::zero, Flat::sum_squares, Flat::reduce_sum})
            out.push_back(flat_case(op, n, type, type));
    }
    out.push_back(flat_case(Flat::cast, n, Type::f32, Type::bf16));
    out.push_back(flat_case(Flat::cast, n, Type::bf16, Type::f32));
    return out;
}

} // namespace moe::test
