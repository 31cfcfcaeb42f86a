// Grouped products and adapters as ops; sums and scales of adapters go over rows without a token as well, and their
// bytes say so.
#include "planner/lower/emit/grouped.hpp"

namespace moe::emit {

void grouped(Builder& b, program::GroupedMode mode, program::TensorId operand, program::TensorId other,
             program::TensorId counts, program::TensorId out, program::GroupedGemmAttr attr) {
    attr.mode = mode;
    attr.accumulate = b.at(out).storage == program::Storage::gradient; // FSDP's are new in every backward
    attr.e5m2 = mode != program::GroupedMode::forward && b.one_scale();
    const double rows = b.expected_rows(operand);
    program::Op& op = b.emit(program::OpKind::grouped_gemm, {operand, other, counts}, {out}, attr);
    op.flops = 2.0 * rows * static_cast<double>(attr.n) * static_cast<double>(attr.k);
}

namespace {

program::TensorId scale_all(Builder& b, program::TensorId x, const std::string& name) {
    const program::TensorId y = b.scale(x, b.plan().lora.scale(), name);
    b.current().ops.back().bytes = 2.0 * static_cast<double>(b.at(x).bytes());
    return y;
}

program::TensorId add_all(Builder& b, program::TensorId x, program::TensorId y, const std::string& name) {
    const program::TensorId sum = b.add(x, y, name);
    b.current().ops.back().bytes = 3.0 * static_cast<double>(b.at(x).bytes());
    return sum;
}

} // namespace

program::TensorId with_adapter(Builder& b, std::optional<Adapter>& adapter, int groups, program::TensorId x,
                               program::TensorId counts, program::TensorId y, const std::string& name) {
    if (!adapter) return y;
    const std::int64_t rank = adapter->b.k, cap = b.at(y).rows, n = b.at(y).cols, k = b.at(x).cols;
    const double expected = b.expected_rows(y);
    const program::TensorId low = b.activation(name + ".lora_a", cap, rank, expected);
    grouped(b, program::GroupedMode::forward, x, adapter->a.value, counts, low,
            {program::GroupedMode::forward, groups, rank, k, cap});
    adapter->low = scale_all(b, low, name + ".lora_scaled");
    const program::TensorId delta = b.activation(name + ".lora_b", cap, n, expected);
    grouped(b, program::GroupedMode::forward, adapter->low, adapter->b.value, counts, delta,
            {program::GroupedMode::forward, groups, n, rank, cap});
    return add_all(b, y, delta, name + ".lora");
}

program::TensorId adapter_backward(Builder& b, const std::optional<Adapter>& adapter, int groups, program::TensorId dy,
                                   program::TensorId x, program::TensorId counts, program::TensorId dx,
                                   const std::string& name) {
    if (!adapter) return dx;
    const std::int64_t rank = adapter->b.k, cap = b.at(dy).rows;
    const program::GroupedGemmAttr up{program::GroupedMode::dgrad, groups, b.at(dy).cols, rank, cap},
        down{program::GroupedMode::dgrad, groups, rank, b.at(x).cols, cap};
    const double expected = b.expected_rows(dy);
    const auto product = [&](program::GroupedMode mode, program::TensorId a, program::TensorId other,
                             program::TensorId out, const program::GroupedGemmAttr& attr) {
        b.phase = mode == program::GroupedMode::wgrad ? program::Phase::wgrad : program::Phase::dgrad;
        grouped(b, mode, a, other, counts, out, attr);
        b.phase = program::Phase::dgrad;
    };
    program::TensorId dlow = b.activation(name + ".lora_b.din", cap, rank, expected);
    product(program::GroupedMode::dgrad, dy, adapter->b.value, dlow, up);
    product(program::GroupedMode::wgrad, dy, adapter->low, adapter->b.gradient, up);
    dlow = scale_all(b, dlow, name + ".lora_dscaled");
    const program::TensorId share = b.activation(name + ".lora_a.din", cap, b.at(x).cols, expected);
    product(program::GroupedMode::dgrad, dlow, adapter->a.value, share, down);
    product(program::GroupedMode::wgrad, dlow, x, adapter->a.gradient, down);
    return add_all(b, dx, share, name + ".lora_din");
}

} // namespace moe::emit
