// Lowered Programs: nothing is read before it is written, shapes agree, parameters and FLOPs add up to the model's.
#include "planner/base/error.hpp"
#include "planner/lower/emit/parameters.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/measured.hpp"
#include "tests/planner/plan/sample_plans.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>

#include <map>
#include <set>

using namespace moe;

namespace {

const Tensor& tensor(const Program& program, TensorId id) { return program.tensors[static_cast<std::size_t>(id)]; }

TensorId root(const Program& program, TensorId id) {
    return tensor(program, id).base == no_tensor ? id : tensor(program, id).base;
}

// Walks the slots as an engine would and reports the first activation that is read before anything wrote it.
std::string read_before_write(const Program& program) {
    std::set<std::pair<TensorId, int>> written;
    for (const Slot& slot : program.slots) {
        const Template& tmpl = program.templates[static_cast<std::size_t>(slot.index)];
        for (const Op& op : tmpl.ops) {
            for (TensorId id : op.in) {
                if (id == no_tensor || tensor(program, id).storage != Storage::activation) continue;
                if (!written.count({root(program, id), slot.micro_batch}))
                    return std::string(to_string(op.kind)) + " reads " + tensor(program, id).name;
            }
            for (TensorId id : op.out)
                if (id != no_tensor) written.insert({root(program, id), slot.micro_batch});
        }
    }
    return "";
}

std::string wrong_gemm(const Program& program, bool overlap) {
    for (const Template& tmpl : program.templates)
        for (const Op& op : tmpl.ops) {
            const auto elements = [&](TensorId id) { return tensor(program, id).elements(); };
            if (op.kind == OpKind::gemm) {
                const auto& g = std::get<GemmAttr>(op.attr);
                if (g.batch > 1) { // on some of the columns of A, and on one of the two matrices in B or C
                    if (elements(op.in[0]) < g.batch * g.m * g.k || elements(op.in[1]) < g.batch * g.n * g.k ||
                        elements(op.out[0]) < g.batch * g.m * g.n)
                        return tensor(program, op.out[0]).name;
                    continue;
                }
                // Quantized weights keep a row-wise and a column-wise copy in one bucket; views name one of them. Under
                // tp_overlap a product computes some rows, and the first operand of wgrad comes in pieces.
                std::int64_t a = elements(op.in[0]);
                for (std::size_t i = 2; i < op.in.size(); ++i) a += elements(op.in[i]);
                if (a % (g.m * g.k) != 0 || elements(op.in[1]) != g.n * g.k || elements(op.out[0]) % (g.m * g.n) != 0)
                    return tensor(program, op.out[0]).name;
                if (a < g.a_offset + g.m * g.k || elements(op.out[0]) < g.c_offset + g.m * g.n)
                    return tensor(program, op.out[0]).name;
                if (!overlap && (a != g.m * g.k || elements(op.out[0]) != g.m * g.n))
                    return tensor(program, op.out[0]).name;
            }
            if (op.kind == OpKind::grouped_gemm) {
                const auto& g = std::get<GroupedGemmAttr>(op.attr);
                const std::int64_t weight = static_cast<std::int64_t>(g.groups) * g.n * g.k;
                const bool wgrad = g.mode == GroupedMode::wgrad;
                if (elements(wgrad ? op.out[0] : op.in[1]) != weight) return tensor(program, op.out[0]).name;
                if (elements(op.in[0]) != g.capacity * (g.mode == GroupedMode::forward ? g.k : g.n))
                    return tensor(program, op.out[0]).name;
            }
        }
    return "";
}

} // namespace

TEST_CASE("Programs of sample plans are well formed") {
    for (const Plan& plan : sample_plans()) {
        CAPTURE(plan_to_json(plan));
        REQUIRE(check_plan(plan).message == "");
        for (int rank = 0; rank < plan.pp; ++rank) {
            const Program program = lower(plan, rank);
            CHECK(read_before_write(program) == "");
            CHECK(wrong_gemm(program, plan.tp_overlap) == "");
            CHECK(program.slots.size() == static_cast<std::size_t>(2 * plan.micro_batches() * plan.vpp + 2));
            for (const Template& tmpl : program.templates)
                for (const Op& op : tmpl.ops) {
                    CHECK(op.bytes >= 0.0);
                    if (is_communication(op.kind)) CHECK(group_size(plan, op.group) > 1);
                }
        }
    }
}

TEST_CASE("Shards of parameters add up to the model") {
    for (const Plan& plan : sample_plans()) {
        CAPTURE(plan_to_json(plan));
        std::int64_t total = 0;
        for (int rank = 0; rank < plan.pp; ++rank) {
            const Program program = lower(plan, rank);
            for (const Parameter& p : program.parameters) {
                const bool expert = p.domain == Domain::expert;
                const int degree = expert ? plan.etp : plan.tp;
                CHECK(p.local_elements() * (p.shard_dim >= 0 ? degree : 1) == p.padded_rows * p.cols);
                // Copies of one table on several stages count once.
                if (p.name == "model.embed_tokens.weight" && !program.chunks.front().embedding) continue;
                total += p.rows * p.cols * (expert ? plan.ep : 1);
            }
        }
        const bool exact = plan.model->kinds.front().attention.kind == AttentionKind::gqa ||
                           plan.model->kinds.front().attention.kind == AttentionKind::mla;
        const auto expected = static_cast<double>(count_parameters(*plan.model).total);
        CHECK(static_cast<double>(total) == nearly(expected).epsilon(exact ? 0.001 : 0.03));
    }
}

TEST_CASE("Executed FLOPs are the model's, plus router and vocabulary padding") {
    for (Plan plan : sample_plans()) {
        if (plan.recompute != 0 || plan.cp > 1) continue;
        bool plain = true;
        for (const LayerKind& kind : plan.model->kinds)
            plain = plain && !kind.attention.sparse() && // whose core works on more than the model counts
                    (kind.attention.kind == AttentionKind::gqa || kind.attention.kind == AttentionKind::mla);
        if (!plain) continue;
        CAPTURE(plan_to_json(plan));
        double executed = 0.0, model_attention = 0.0;
        for (int rank = 0; rank < plan.pp; ++rank) {
            const Program program = lower(plan, rank);
            for (const Slot& slot : program.slots)
                for (const Op& op : program.templates[static_cast<std::size_t>(slot.index)].ops) {
                    const bool router = op.module == Module::router;
                    if ((op.kind == OpKind::gemm || op.kind == OpKind::grouped_gemm) && !router) executed += op.flops;
                    // A flash backward computes QK^T once more than the model counts: 5 products instead of 4.
                    if (op.kind == OpKind::attention) model_attention += 3.0 * op.flops;
                }
        }
        const double tokens = static_cast<double>(plan.gbs) * static_cast<double>(plan.seq);
        const double per_token = (executed + model_attention) * plan.stage_ranks() / tokens;
        CHECK(per_token == nearly(model_flops_per_token(*plan.model, plan.seq, plan.tp)).epsilon(0.005));
    }
}

TEST_CASE("tied embeddings over several stages: a bucket of its own, counted once, of which only the shard travels") {
    Plan plan = sample_plans().front();
    auto model = std::make_shared<Model>(*plan.model);
    model->tied_embeddings = true;
    plan.model = model;
    plan.stack = "moe-plan";
    plan.pp = 2;
    plan.gpus *= 2;
    REQUIRE(table_holders(plan) == std::vector<int>{0, 1});
    const std::int64_t table = model->padded_vocab(plan.tp) / plan.tp * model->hidden;
    std::vector<std::int64_t> sizes;
    for (const int rank : {0, 1}) {
        const Program program = lower(plan, rank);
        const auto of_table = std::find_if(program.buckets.begin(), program.buckets.end(), [&](const Bucket& b) {
            return b.elements >= table && b.elements < table + 64 * b.group_size && b.decayed == table;
        });
        REQUIRE(of_table != program.buckets.end());
        CHECK(of_table->copy == (rank == 1));
        int squares = 0;
        for (const Op& op : program.templates.back().ops) {
            if (op.kind == OpKind::sum_squares) squares += op.in.front() == of_table->gradient_shard ? 1 : 0;
            if (op.kind == OpKind::send)
                sizes.push_back(program.tensors[static_cast<std::size_t>(op.in[0])].elements());
        }
        CHECK(squares == (rank == 0 ? 1 : 0));
        CHECK(sizes.back() == of_table->elements / of_table->group_size);
    }
    CHECK(sizes.size() == 2);
}

TEST_CASE("deterministic: every op of attention is told, and its gradient is another family of measured calls") {
    for (const bool deterministic : {false, true}) {
        int gradients = 0;
        for (Plan plan : sample_plans()) {
            plan.deterministic = deterministic;
            const Program program = lower(plan, 0);
            for (const Template& t : program.templates)
                for (const Op& op : t.ops) {
                    const auto* attention = std::get_if<AttentionAttr>(&op.attr);
                    if (attention == nullptr) continue;
                    CHECK(attention->deterministic == deterministic);
                    if (op.kind != OpKind::attention_grad) continue;
                    ++gradients;
                    CHECK((measured_key(op, program).find(".deterministic") != std::string::npos) == deterministic);
                }
        }
        CHECK(gradients > 0);
    }
}
