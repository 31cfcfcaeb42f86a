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

const program::Tensor& tensor(const program::Program& program, program::TensorId id) {
    return program.tensors[static_cast<std::size_t>(id)];
}

program::TensorId root(const program::Program& program, program::TensorId id) {
    return tensor(program, id).base == program::no_tensor ? id : tensor(program, id).base;
}

// Walks the slots as an engine would and reports the first activation that is read before anything wrote it.
std::string read_before_write(const program::Program& program) {
    std::set<std::pair<program::TensorId, int>> written;
    for (const program::Slot& slot : program.slots) {
        const program::Template& tmpl = program.templates[static_cast<std::size_t>(slot.index)];
        for (const program::Op& op : tmpl.ops) {
            for (program::TensorId id : op.in) {
                if (id == program::no_tensor || tensor(program, id).storage != program::Storage::activation) continue;
                if (!written.count({root(program, id), slot.micro_batch}))
                    return std::string(program::to_string(op.kind)) + " reads " + tensor(program, id).name;
            }
            for (program::TensorId id : op.out)
                if (id != program::no_tensor) written.insert({root(program, id), slot.micro_batch});
        }
    }
    return "";
}

std::string wrong_gemm(const program::Program& program, bool overlap) {
    for (const program::Template& tmpl : program.templates)
        for (const program::Op& op : tmpl.ops) {
            const auto elements = [&](program::TensorId id) { return tensor(program, id).elements(); };
            if (op.kind == program::OpKind::gemm) {
                const auto& g = std::get<program::GemmAttr>(op.attr);
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
            if (op.kind == program::OpKind::grouped_gemm) {
                const auto& g = std::get<program::GroupedGemmAttr>(op.attr);
                const std::int64_t weight = static_cast<std::int64_t>(g.groups) * g.n * g.k;
                const bool wgrad = g.mode == program::GroupedMode::wgrad;
                if (elements(wgrad ? op.out[0] : op.in[1]) != weight) return tensor(program, op.out[0]).name;
                if (elements(op.in[0]) != g.capacity * (g.mode == program::GroupedMode::forward ? g.k : g.n))
                    return tensor(program, op.out[0]).name;
            }
        }
    return "";
}

} // namespace

TEST_CASE("Programs of sample plans are well formed") {
    for (const plan::Plan& plan : sample_plans()) {
        CAPTURE(plan::plan_to_json(plan));
        REQUIRE(plan::check_plan(plan).message == "");
        for (int rank = 0; rank < plan.pp; ++rank) {
            const program::Program program = lower::lower(plan, rank);
            CHECK(read_before_write(program) == "");
            CHECK(wrong_gemm(program, plan.tp_overlap) == "");
            CHECK(program.slots.size() == static_cast<std::size_t>(2 * plan.micro_batches() * plan.vpp + 2));
            for (const program::Template& tmpl : program.templates)
                for (const program::Op& op : tmpl.ops) {
                    CHECK(op.bytes >= 0.0);
                    if (program::is_communication(op.kind)) CHECK(plan::group_size(plan, op.group) > 1);
                }
        }
    }
}

TEST_CASE("Shards of parameters add up to the model") {
    for (const plan::Plan& plan : sample_plans()) {
        CAPTURE(plan::plan_to_json(plan));
        std::int64_t total = 0;
        for (int rank = 0; rank < plan.pp; ++rank) {
            const program::Program program = lower::lower(plan, rank);
            for (const program::Parameter& p : program.parameters) {
                const bool expert = p.domain == plan::Domain::expert;
                const int degree = expert ? plan.etp : plan.tp;
                CHECK(p.local_elements() * (p.shard_dim >= 0 ? degree : 1) == p.padded_rows * p.cols);
                // Copies of one table on several stages count once.
                if (p.name == "model.embed_tokens.weight" && !program.chunks.front().embedding) continue;
                total += p.rows * p.cols * (expert ? plan.ep : 1);
            }
        }
        const bool exact = plan.model->kinds.front().attention.kind == model::AttentionKind::gqa ||
                           plan.model->kinds.front().attention.kind == model::AttentionKind::mla;
        const auto expected = static_cast<double>(model::count_parameters(*plan.model).total);
        CHECK(static_cast<double>(total) == nearly(expected).epsilon(exact ? 0.001 : 0.03));
    }
}

TEST_CASE("Executed FLOPs are the model's, plus router and vocabulary padding") {
    for (plan::Plan plan : sample_plans()) {
        if (plan.recompute != 0 || plan.cp > 1) continue;
        bool plain = true;
        for (const model::LayerKind& kind : plan.model->kinds)
            plain =
                plain && !kind.attention.sparse() && // whose core works on more than the model counts
                (kind.attention.kind == model::AttentionKind::gqa || kind.attention.kind == model::AttentionKind::mla);
        if (!plain) continue;
        CAPTURE(plan::plan_to_json(plan));
        double executed = 0.0, model_attention = 0.0;
        for (int rank = 0; rank < plan.pp; ++rank) {
            const program::Program program = lower::lower(plan, rank);
            for (const program::Slot& slot : program.slots)
                for (const program::Op& op : program.templates[static_cast<std::size_t>(slot.index)].ops) {
                    const bool router = op.module == program::Module::router;
                    if ((op.kind == program::OpKind::gemm || op.kind == program::OpKind::grouped_gemm) && !router)
                        executed += op.flops;
                    // A flash backward computes QK^T once more than the model counts: 5 products instead of 4.
                    if (op.kind == program::OpKind::attention) model_attention += 3.0 * op.flops;
                }
        }
        const double tokens = static_cast<double>(plan.gbs) * static_cast<double>(plan.seq);
        const double per_token = (executed + model_attention) * plan.stage_ranks() / tokens;
        CHECK(per_token == nearly(model::model_flops_per_token(*plan.model, plan.seq, plan.tp)).epsilon(0.005));
    }
}

TEST_CASE("tied embeddings over several stages: a bucket of its own, counted once, of which only the shard travels") {
    plan::Plan plan = sample_plans().front();
    auto model = std::make_shared<model::Model>(*plan.model);
    model->tied_embeddings = true;
    plan.model = model;
    plan.stack = "moe-plan";
    plan.pp = 2;
    plan.gpus *= 2;
    REQUIRE(emit::table_holders(plan) == std::vector<int>{0, 1});
    const std::int64_t table = plan.padded_vocab() / plan.tp * model->hidden;
    std::vector<std::int64_t> sizes;
    for (const int rank : {0, 1}) {
        const program::Program program = lower::lower(plan, rank);
        const auto of_table =
            std::find_if(program.buckets.begin(), program.buckets.end(), [&](const program::Bucket& b) {
                return b.elements >= table && b.elements < table + 64 * b.group_size && b.decayed == table;
            });
        REQUIRE(of_table != program.buckets.end());
        CHECK(of_table->copy == (rank == 1));
        int squares = 0;
        for (const program::Op& op : program.templates.back().ops) {
            if (op.kind == program::OpKind::sum_squares) squares += op.in.front() == of_table->gradient_shard ? 1 : 0;
            if (op.kind == program::OpKind::send)
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
        for (plan::Plan plan : sample_plans()) {
            plan.deterministic = deterministic;
            const program::Program program = lower::lower(plan, 0);
            for (const program::Template& t : program.templates)
                for (const program::Op& op : t.ops) {
                    const auto* attention = std::get_if<program::AttentionAttr>(&op.attr);
                    if (attention == nullptr) continue;
                    CHECK(attention->deterministic == deterministic);
                    if (op.kind != program::OpKind::attention_grad) continue;
                    ++gradients;
                    CHECK((program::measured_key(op, program).find(".deterministic") != std::string::npos) ==
                          deterministic);
                }
        }
        CHECK(gradients > 0);
    }
}
