// Gradients in BF16: products write them so under FSDP, rounded once, with the bits of FP32 that is rounded behind.
#include "engine/backends/backends.hpp"
#include "engine/ops/backend.hpp"
#include "planner/memory/memory.hpp"
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <vector>

using namespace moe;

namespace {

std::atomic<int> written, added; // calls of all ranks' threads

const Kernels& cpu() { return *backends::backend_named("cpu").kernels; }

// The product of a gradient in BF16, by FP32 that is rounded behind.
template <class Shape, class Call>
void round_behind(Shape shape, std::int64_t elements, Dst c, void* stream, const Call& call) {
    ++(shape.accumulate ? added : written);
    std::vector<float> sums(static_cast<std::size_t>(elements));
    call(shape, Dst{sums.data(), Type::f32});
    cpu().cast({sums.data(), Type::f32}, c, elements, stream);
}

void gemm(const GemmShape& s, Src a, Src b, Dst c, void* stream) {
    if (!s.transpose_a || c.type != Type::bf16) return cpu().gemm(s, a, b, c, stream);
    round_behind(s, s.m * s.n, c, stream,
                 [&](const GemmShape& shape, Dst sums) { cpu().gemm(shape, a, b, sums, stream); });
}

void grouped_gemm(const GroupedShape& s, Src a, Src b, const std::int32_t* counts, Dst c, void* stream) {
    if (s.product != GroupedProduct::wgrad || c.type != Type::bf16)
        return cpu().grouped_gemm(s, a, b, counts, c, stream);
    round_behind(s, s.groups * s.n * s.k, c, stream,
                 [&](const GroupedShape& shape, Dst sums) { cpu().grouped_gemm(shape, a, b, counts, sums, stream); });
}

plan::Plan bf16_plan(const std::string& model, int ranks, Fields fields) {
    fields.insert(fields.end(), {{"precision", "bf16"}, {"gradients", "bf16"}});
    return small_plan(model, ranks, fields);
}

std::int64_t transient_bytes(const plan::Plan& plan) {
    return memory::plan_memory(lower::lower(plan, 0))
        .class_bytes[static_cast<std::size_t>(memory::MemoryClass::transient)];
}

} // namespace

TEST_CASE("gradients that products write in BF16 are rounded once") {
    Kernels kernels = cpu();
    kernels.gemm = gemm;
    kernels.grouped_gemm = grouped_gemm;
    ops::Backend behind = backends::backend_named("cpu");
    behind.kernels = &kernels;
    struct Case {
        const char* model;
        int ranks;
        Fields fields;
    };
    for (const Case& c : std::vector<Case>{
             {"qwen3", 4, {{"ep", "2"}}},
             {"qwen3", 2, {{"mbs", "4"}}},                      // one micro-batch
             {"qwen3", 4, {{"tp", "2"}, {"tp_overlap", "on"}}}, // products of pieces
             {"llama", 4, {{"fsdp_replicas", "2"}}},
             {"gptoss", 2, {{"recompute", "full"}}},
             {"deepseek3-mtp", 4, {{"ep", "2"}, {"delay_wgrad", "on"}}}, // The head is multiplied with twice.
             {"nemotron3", 2, {}},
             {"qwen2", 2, {{"capacity", "1"}}}, // overflows: the step is run again
         }) {
        CAPTURE(c.model);
        Fields fields = c.fields;
        fields.emplace_back("fsdp", "on");
        const plan::Plan plan = bf16_plan(c.model, c.ranks, fields);
        written = added = 0;
        const Trained got = train_three(plan);
        check_bits(train_three(plan, 1, &behind), got);
        CHECK(written > 0);
        CHECK(added == 0);
        plan::Plan exact = plan;
        exact.gradients = machine::Precision::fp32;
        const double apart = total_distance(got.gradients, train_three(exact).gradients);
        CHECK(apart > 1e-5);
        CHECK(apart < 1e-2); // of one rounding of 2^-9 and the sums'
        CHECK(transient_bytes(plan) < transient_bytes(exact));
    }
}
