// Products that set a gradient in the first backward: the same bits as adding to zeros, whatever lay there before.
#include "engine/backends/backends.hpp"
#include "engine/ops/backend.hpp"
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <limits>

using namespace moe;

namespace {

std::atomic<int> set_calls; // of all ranks' threads

template <class Attr>
Attr* setting(program::Op& op) {
    auto* attr = std::get_if<Attr>(&op.attr);
    return attr != nullptr && op.phase == program::Phase::wgrad && !attr->accumulate ? attr : nullptr;
}

// Runs `c` with its gradient filled with `before` where it sets one; `adds`: as an addition to that.
void run_filled(const ops::OpContext& c, float before, bool adds) {
    program::Op op = c.op;
    auto* dense = setting<program::GemmAttr>(op);
    auto* grouped = setting<program::GroupedGemmAttr>(op);
    if (dense != nullptr || grouped != nullptr) {
        ++set_calls;
        auto* const gradient = static_cast<float*>(c.out[0]);
        std::fill(gradient, gradient + c.output(0).elements(), before);
        if (adds) (dense != nullptr ? dense->accumulate : grouped->accumulate) = true;
    }
    backends::backend_named("cpu").function(op.kind)(
        {op, c.program, c.position, c.communicator, c.kernels, c.stream, c.in, c.out, c.shard_offset});
}

void adding(const ops::OpContext& c) { run_filled(c, 0.0f, true); }
void poisoned(const ops::OpContext& c) { run_filled(c, std::numeric_limits<float>::quiet_NaN(), false); }

ops::Backend with_products(ops::OpFunction product) {
    ops::Backend backend = backends::backend_named("cpu");
    for (const program::OpKind kind : {program::OpKind::gemm, program::OpKind::grouped_gemm})
        backend.table[static_cast<std::size_t>(kind)] = product;
    return backend;
}

} // namespace

TEST_CASE("gradients that products set have the bits of those added to zeros") {
    struct Case {
        const char* model;
        int ranks;
        Fields fields;
    };
    const ops::Backend old_form = with_products(adding), dirty = with_products(poisoned);
    for (const Case& c : std::vector<Case>{
             {"qwen3", 1, {}},
             {"qwen3", 1, {{"mbs", "8"}}}, // one micro-batch: its backward is the first and the last
             {"deepseek3-mtp", 4, {{"pp", "2"}, {"ep", "2"}}},
             {"gptoss", 4, {{"tp", "2"}, {"ep", "4"}}},
             {"qwen2", 4, {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "2"}}},
             {"qwen3", 4, {{"pp", "2"}, {"schedule", "zero-bubble"}, {"ep", "2"}}},
             {"qwen3", 4, {{"pp", "2"}, {"vpp", "2"}, {"schedule", "dualpipe-v"}, {"ep", "2"}}},
             {"qwen3", 4, {{"ep", "4"}, {"capacity", "1"}}}, // overflows: the step is run again
         }) {
        CAPTURE(c.model);
        for (const auto& [field, value] : c.fields) INFO(field, "=", value);
        const plan::Plan plan = small_plan(c.model, c.ranks, c.fields);
        const Trained want = train_three(plan);
        set_calls = 0;
        check_bits(train_three(plan, 1, &old_form), want);
        CHECK(set_calls > 0);
        set_calls = 0;
        check_bits(train_three(plan, 1, &dirty), want);
        CHECK(set_calls > 0);
    }
}

TEST_CASE("a tied head sets the table's gradient, and the embedding adds to it") {
    const Fields tied{{"tie_word_embeddings", "true"}};
    const ops::Backend old_form = with_products(adding), dirty = with_products(poisoned);
    for (const Fields& fields :
         {Fields{}, Fields{{"pp", "2"}}, Fields{{"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}}}) {
        const int ranks = fields.empty() ? 1 : 2;
        const plan::Plan plan = small_plan(small_model("qwen3", tied), ranks, fields);
        const Trained want = train_three(plan);
        check_bits(train_three(plan, 1, &old_form), want);
        check_bits(train_three(plan, 1, &dirty), want);
    }
}
