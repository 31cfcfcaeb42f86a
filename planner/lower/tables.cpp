// Gradients of an embedding table go round its holders, each of which adds them up in one order.
#include "planner/lower/tables.hpp"

#include "planner/lower/emit/builder.hpp"
#include "planner/lower/emit/parameters.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"

#include <algorithm>
#include <utility>

namespace moe::lower {

std::vector<program::Op> add_tables(const plan::Plan& plan, program::Program& program, program::TensorId gradient) {
    const std::vector<int> holders = emit::table_holders(plan);
    const auto me = std::find(holders.begin(), holders.end(), program.pipeline_rank);
    std::vector<program::Op> ops;
    if (holders.size() < 2 || me == holders.end() || gradient == program::no_tensor) return ops;
    const program::Tensor table = program.tensors[static_cast<std::size_t>(gradient)];
    const double bytes = table.expected_bytes();
    const int n = static_cast<int>(holders.size()), index = static_cast<int>(me - holders.begin());
    const int next = holders[static_cast<std::size_t>((index + 1) % n)],
              previous = holders[static_cast<std::size_t>((index + n - 1) % n)];
    const auto emit = [&](program::OpKind kind, program::Stream stream, program::Operands in, program::Operands out,
                          double moved) -> program::Op& {
        program::Op op;
        op.kind = kind;
        op.stream = stream;
        op.module = program::Module::embedding;
        op.phase = program::Phase::step;
        op.in = std::move(in);
        op.out = std::move(out);
        op.bytes = moved;
        ops.push_back(std::move(op));
        return ops.back();
    };
    const int tag = program::first_table_tag(*plan.model);
    program::TensorId travelling = gradient;
    std::vector<program::TensorId> values(holders.size(), gradient); // gradients by holder
    for (int step = 0; step + 1 < n; ++step) {
        program::Tensor arrival = table;
        arrival.name = "embedding.gradient_of_peer";
        arrival.storage = program::Storage::activation;
        arrival.base = program::no_tensor;
        arrival.offset = 0;
        arrival.shard_group = {};
        arrival.chunk = -1;
        program.tensors.push_back(std::move(arrival));
        const auto received = static_cast<program::TensorId>(program.tensors.size() - 1);
        program::Op& out = emit(program::OpKind::send, program::Stream::pipeline_out, {travelling}, {}, bytes);
        out.group = emit::groups::pipeline;
        out.attr = program::PeerAttr{next - program.pipeline_rank, tag + step, next};
        program::Op& in = emit(program::OpKind::recv, program::Stream::pipeline_in, {}, {received}, bytes);
        in.group = emit::groups::pipeline;
        in.attr = program::PeerAttr{previous - program.pipeline_rank, tag + step, program.pipeline_rank};
        values[static_cast<std::size_t>((index + n - 1 - step) % n)] = received;
        travelling = received;
    }
    program::TensorId sum = values.front();
    for (std::size_t k = 1; k < values.size(); ++k) {
        const program::TensorId arrival = sum == gradient ? values[k] : sum,
                                out = k + 1 == values.size() ? gradient : arrival;
        emit(program::OpKind::add, program::Stream::compute, {sum, values[k]}, {out}, 3.0 * bytes);
        sum = out;
    }
    return ops;
}

} // namespace moe::lower
