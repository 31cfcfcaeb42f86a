// What playing the ops of a rank asks for again and again, in flat lists: prices, streams, and the clocks of tensors.
#pragma once

#include "planner/program/program.hpp"
#include "planner/program/timeline.hpp"
#include "simulator/cost/cost.hpp"
#include "simulator/replay/op_access.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moe::replay {

class OpSteps {
public:
    // A clock of a tensor: the first of as many as cycles()[cycle].
    struct Clock {
        std::uint32_t first = 0, cycle = 0;
    };
    // An op; a Program's own ones are large.
    struct Step {
        cost::OpCost cost;
        std::uint32_t reads = 0, writes = 0, end = 0; // into clocks_: reads from `reads`, writes from `writes` to `end`
        bool receives = false, sends = false, meets = false; // meets: all stages
        program::TimelineRow row;                            // what every row of the op says
    };

    OpSteps(const program::Program& program, const cost::ProgramCosts& costs) {
        number_clocks(program);
        add_templates(program, costs);
    }

    std::size_t size() const { return size_; } // number of clocks
    // Clocks of a tensor that is no view.
    std::size_t first_clock(std::size_t tensor) const { return first_clock_[tensor]; }
    int instances(std::size_t tensor) const { return instances_[tensor]; }
    const std::vector<int>& cycles() const { return cycles_; }                      // distinct numbers of instances
    const std::vector<Step>& steps(std::size_t tmpl) const { return steps_[tmpl]; } // of a template that runs
    std::span<const Clock> reads(const Step& step) const { return between(step.reads, step.writes); }
    std::span<const Clock> writes(const Step& step) const { return between(step.writes, step.end); }

private:
    // Activations have one clock per micro-batch in flight, everything else one in all.
    void number_clocks(const program::Program& program) {
        const std::size_t n = program.tensors.size();
        first_clock_.assign(n, 0);
        instances_.assign(n, 1);
        for (std::size_t id = 0; id < n; ++id) {
            const program::Tensor& t = program.tensors[id];
            if (t.base != program::no_tensor) continue;
            if (t.storage == program::Storage::activation && t.chunk >= 0)
                instances_[id] = std::max(1, program.in_flight[static_cast<std::size_t>(t.chunk)]);
            first_clock_[id] = static_cast<std::uint32_t>(size_);
            size_ += static_cast<std::size_t>(instances_[id]);
        }
    }
    void add_templates(const program::Program& program, const cost::ProgramCosts& costs) {
        std::vector<std::uint32_t> cycle_of; // by tensor
        for (const int count : instances_) {
            const auto same = std::find(cycles_.begin(), cycles_.end(), count);
            cycle_of.push_back(static_cast<std::uint32_t>(same - cycles_.begin()));
            if (same == cycles_.end()) cycles_.push_back(count);
        }
        steps_.resize(program.templates.size());
        for (const program::Slot& slot : program.slots)
            if (const auto t = static_cast<std::size_t>(slot.index); steps_[t].empty())
                add_steps(program, costs, t, cycle_of);
    }
    void add_steps(const program::Program& program, const cost::ProgramCosts& costs, std::size_t t,
                   const std::vector<std::uint32_t>& cycle_of) {
        const program::Template& tmpl = program.templates[t];
        const std::vector<program::Op>& ops = tmpl.ops;
        const OpAccess access(program, tmpl);
        const auto add = [&](std::span<const program::TensorId> roots) {
            const auto from = static_cast<std::uint32_t>(clocks_.size());
            for (const program::TensorId root : roots) {
                const auto id = static_cast<std::size_t>(root);
                clocks_.push_back({first_clock_[id], cycle_of[id]});
            }
            return from;
        };
        steps_[t].resize(ops.size());
        for (std::size_t i = 0; i < ops.size(); ++i) {
            Step& step = steps_[t][i];
            step.cost = costs[t][i];
            step.receives = ops[i].kind == program::OpKind::recv;
            step.sends = ops[i].kind == program::OpKind::send;
            step.meets = !step.receives && !step.sends && (ops[i].group.axes & plan::axis::pipeline) != 0;
            step.row.op = static_cast<std::int32_t>(i);
            step.row.layer = ops[i].layer;
            step.row.kind = ops[i].kind;
            step.row.stream = ops[i].stream;
            step.row.module = ops[i].module;
            step.row.phase = ops[i].phase;
            step.row.slot_kind = tmpl.kind;
            step.row.chunk = static_cast<std::int16_t>(tmpl.chunk);
            step.reads = add(access.read(i));
            step.writes = add(access.written(i));
            step.end = static_cast<std::uint32_t>(clocks_.size());
        }
    }
    std::span<const Clock> between(std::uint32_t from, std::uint32_t to) const {
        return std::span(clocks_).subspan(from, to - from);
    }

    std::size_t size_ = 0;
    std::vector<std::uint32_t> first_clock_; // by tensor
    std::vector<int> instances_;
    std::vector<int> cycles_;
    std::vector<std::vector<Step>> steps_; // by template, for those that slots run
    std::vector<Clock> clocks_;
};

} // namespace moe::replay
