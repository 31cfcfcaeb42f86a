// Storage of routers' choices, and the operand by which they are replayed.
#include "planner/lower/passes/keep_routing.hpp"

#include <map>
#include <variant>

namespace moe::passes {

namespace {

constexpr std::size_t recorded = 3; // operand of a router: a recorded choice

} // namespace

std::vector<KeptRouting> keep_routing(program::Program& program, bool replay) {
    std::map<int, KeptRouting> layers;
    const auto each_router = [&](auto visit) {
        for (program::Template& tmpl : program.templates)
            for (program::Op& op : tmpl.ops)
                if (op.kind == program::OpKind::router) visit(op);
    };
    each_router([&](const program::Op& op) {
        program::Tensor& index = program.tensors[static_cast<std::size_t>(op.out[0])];
        if (index.again_of != program::no_tensor) return; // recomputed: written again from the same choice
        index.storage = program::Storage::input;
        const program::RouterAttr& attr = std::get<program::RouterAttr>(op.attr);
        layers[op.layer] = {op.layer, attr.experts, attr.top_k, op.out[0]};
    });
    if (replay)
        each_router([&](program::Op& op) {
            if (op.in.size() <= recorded) op.in.resize(recorded + 1, program::no_tensor);
            op.in[recorded] = layers.at(op.layer).index;
        });
    std::vector<KeptRouting> list;
    for (const auto& [layer, kept] : layers) list.push_back(kept);
    return list;
}

} // namespace moe::passes
