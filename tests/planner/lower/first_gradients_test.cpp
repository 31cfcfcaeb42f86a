// Every element of a gradient is zeroed or set by a product exactly once in a step, before anything is added to it.
#include "planner/lower/lower.hpp"
#include "planner/lower/passes/first_gradients.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "tests/planner/plan/sample_plans.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>

using namespace moe;

namespace {

using Fields = std::vector<std::pair<const char*, const char*>>;

plan::Plan trained_plan(const Fields& fields, bool tied = false) {
    plan::Plan plan;
    const std::shared_ptr<model::Model> model = small_moe_model(8);
    model->tied_embeddings = tied;
    plan.model = model;
    plan.hardware = std::make_shared<const machine::Hardware>(machine::load_hardware("h100"));
    plan.stack = "moe-plan";
    plan.gpus = 4;
    plan.seq = 256;
    plan.gbs = 16;
    for (const auto& [field, value] : fields) plan::set_field(plan, field, value);
    plan.dp = plan.gpus / (plan.tp * plan.cp * plan.pp);
    plan.edp = plan.gpus / (plan.ep * plan.etp * plan.pp);
    return plan;
}

bool sets(const program::Op& op) {
    if (op.phase != program::Phase::wgrad) return false;
    if (const auto* g = std::get_if<program::GroupedGemmAttr>(&op.attr))
        return g->mode == program::GroupedMode::wgrad && !g->accumulate;
    const auto* g = std::get_if<program::GemmAttr>(&op.attr);
    return g != nullptr && g->transpose_a && !g->accumulate;
}

// Counts how often each element of each bucket's gradients begins: by a zero or by a product that sets it.
struct Begun {
    const program::Program& program;
    std::map<program::TensorId, std::vector<std::uint8_t>> times{};
    double set = 0.0, all = 0.0; // elements

    std::string first_fault() {
        for (const program::Bucket& b : program.buckets) {
            const std::int64_t n = program.tensors[static_cast<std::size_t>(b.gradients)].elements();
            times[b.gradients].assign(static_cast<std::size_t>(n), 0);
            all += static_cast<double>(n);
        }
        for (program::OpWalk walk(program); !walk.done(); walk.next())
            for (const program::TensorId id : walk.op().out)
                if (const std::string fault = touch(walk.op(), id); !fault.empty()) return fault;
        for (const auto& [id, counts] : times)
            if (std::count(counts.begin(), counts.end(), 1) != static_cast<std::ptrdiff_t>(counts.size()))
                return program.tensors[static_cast<std::size_t>(id)].name + " is not begun everywhere";
        return "";
    }

private:
    std::string touch(const program::Op& op, program::TensorId id) {
        if (id == program::no_tensor) return "";
        const program::Tensor& t = program.tensors[static_cast<std::size_t>(id)];
        const auto bucket = times.find(t.base == program::no_tensor ? id : t.base);
        if (bucket == times.end() || program::is_communication(op.kind) || op.phase == program::Phase::step) {
            if (op.kind != program::OpKind::zero) return "";
        }
        const bool begins = op.kind == program::OpKind::zero || sets(op);
        if (sets(op)) set += static_cast<double>(t.elements());
        for (std::int64_t i = 0; i < t.elements(); ++i) {
            std::uint8_t& count = bucket->second[static_cast<std::size_t>(t.offset + i)];
            if (count != (begins ? 0 : 1)) return t.name + (begins ? " is begun twice" : " is added to too early");
            if (begins) ++count;
        }
        return "";
    }
};

} // namespace

TEST_CASE("gradients are zeroed or set once, and products set nearly all of them") {
    const std::vector<Fields> cases{
        {},
        {{"mbs", "4"}}, // one micro-batch
        {{"delay_wgrad", "on"}, {"pp", "2"}, {"ep", "2"}},
        {{"tp", "2"}, {"ep", "2"}, {"tp_overlap", "on"}},
        {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "2"}},
        {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "2"}, {"ep_overlap", "on"}},
        {{"pp", "2"}, {"schedule", "zero-bubble"}},
        {{"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}},
        {{"pp", "2"}, {"vpp", "2"}, {"schedule", "dualpipe-v"}, {"ep", "2"}},
    };
    for (const bool tied : {false, true})
        for (const Fields& fields : cases) {
            const plan::Plan plan = trained_plan(fields, tied);
            CAPTURE(plan::plan_to_json(plan));
            REQUIRE(plan::check_plan(plan).message == "");
            for (int rank = 0; rank < plan.pp; ++rank) {
                const program::Program program = lower::lower(plan, rank);
                Begun begun{program};
                CHECK(begun.first_fault() == "");
                CHECK(begun.set > 0.6 * begun.all); // not embeddings, norms and padding
            }
        }
}

TEST_CASE("a product that sets moves its gradient once less, and only the first micro-batch has such products") {
    const plan::Plan plan = trained_plan({});
    const program::Program program = lower::lower(plan, 0);
    std::map<int, int> setting; // by micro-batch
    double saved = 0.0;
    for (const program::Slot& slot : program.slots) {
        const program::Template& tmpl = program.templates[static_cast<std::size_t>(slot.index)];
        for (std::size_t i = 0; i < tmpl.ops.size(); ++i) {
            if (!sets(tmpl.ops[i])) continue;
            ++setting[slot.micro_batch];
            const program::Op& adding = program.templates[1].ops[i];
            const program::Tensor& gradient = program.tensors[static_cast<std::size_t>(adding.out.front())];
            CHECK(adding.kind == tmpl.ops[i].kind);
            CHECK(!sets(adding));
            CHECK(adding.bytes - tmpl.ops[i].bytes == gradient.expected_bytes());
            saved += adding.bytes - tmpl.ops[i].bytes;
        }
    }
    CHECK(setting.size() == 1);
    CHECK(setting.count(0) == 1);
    CHECK(saved > 0.0);
}

TEST_CASE("published stacks add to gradients that are zeroed whole") {
    plan::Plan plan = trained_plan({});
    plan.stack = plan.hardware->default_stack;
    const program::Program program = lower::lower(plan, 0);
    for (program::OpWalk walk(program); !walk.done(); walk.next()) CHECK(!sets(walk.op()));
    std::size_t zeroed = 0;
    for (const program::Op& op : program.templates[static_cast<std::size_t>(program.slots.front().index)].ops)
        if (op.kind == program::OpKind::zero) CHECK(op.out.front() == program.buckets.at(zeroed++).gradients);
    CHECK(zeroed == program.buckets.size());
}
