// The products of routed experts and what stands between them, forward and backward, in the copies that they multiply.
#include "planner/lower/emit/grouped.hpp"
#include "planner/lower/emit/rounding.hpp"
#include "planner/lower/layers/layers.hpp"

namespace moe::layers {

namespace {

// Row-wise and column-wise quantized copies, or the tensor itself when the experts quantize nothing. With wgrad in FP8
// there is no column-wise one yet where `low` is given, or the forward keeps a row-wise one.
emit::Quantized copies(emit::Builder& b, program::TensorId x, program::TensorId low, const std::string& name,
                       const std::string& linear, program::TensorId counts) {
    if (!b.quantized()) return {x, x};
    if (low != program::no_tensor) return {low, b.fp8_wgrad() ? program::no_tensor : x};
    const bool column = !b.by_rows() || b.phase != program::Phase::forward;
    return emit::quantize(b, x, name, linear, true, column, counts);
}

// The copy of `copies` that the forward keeps.
program::TensorId kept(const emit::Builder& b, const emit::Quantized& x) { return b.by_rows() ? x.row : x.column; }
// A copy as wgrad multiplies it: x itself, its columns, or what it stands for in BF16.
program::TensorId factor(emit::Builder& b, program::TensorId x, const std::string& name, program::TensorId counts,
                         bool e5m2 = false) {
    if (!b.by_rows()) return x;
    const program::Dtype dtype = b.at(x).dtype;
    if (b.fp8_wgrad()) return dtype == program::Dtype::fp8_columns ? x : emit::columns(b, x, name, e5m2, counts);
    return dtype == b.quantized_dtype() ? emit::dequantize(b, x, name + "_wide", counts) : x;
}
program::TensorId factor(emit::Builder& b, const emit::Quantized& dy, const std::string& name,
                         program::TensorId counts) {
    return factor(b, dy.column != program::no_tensor ? dy.column : dy.row, name, counts, b.one_scale());
}

} // namespace

program::TensorId MoeLayer::experts(emit::Builder& b, Rows rows) {
    const int local_experts = moe_.experts / b.plan().ep;
    const program::TensorId any = rows.low != program::no_tensor ? rows.low : rows.rows;
    const std::int64_t f = moe_.ffn / b.plan().etp, inner = kind_.gated ? 2 * f : f, cap = b.at(any).rows;
    const double expected = b.expected_rows(any);
    b.module = program::Module::experts;
    fc1_ = b.weight(key_ + ".fc1", local_experts * inner, width());
    fc2_ = b.weight(key_ + ".fc2", local_experts * width(), f);
    fc1_adapter_ = emit::adapter_of(b, key_ + ".fc1", local_experts * inner, width(), local_experts);
    fc2_adapter_ = emit::adapter_of(b, key_ + ".fc2", local_experts * width(), f, local_experts);
    probs_ = rows.probs;
    if (moe_.probs_on_input) { // Llama 4 weighs what experts read.
        unweighed_ = rows.rows;
        rows.rows = b.activation("expert_in_scaled", cap, width(), expected);
        b.emit(program::OpKind::scale_rows, {unweighed_, probs_, counts_}, {rows.rows}).bytes =
            2.0 * b.at(rows.rows).expected_bytes() + b.at(probs_).expected_bytes();
    }
    const emit::Quantized in = copies(b, rows.rows, rows.low, "expert_in", "expert_fc1", counts_);
    in_saved_ = kept(b, in);
    program::TensorId h = b.activation("expert_fc1", cap, inner, expected);
    emit::grouped(b, program::GroupedMode::forward, in.row,
                  emit::multiplied(b, fc1_, "expert_fc1", local_experts, true), counts_, h,
                  {program::GroupedMode::forward, local_experts, inner, width(), cap});
    h = emit::with_adapter(b, fc1_adapter_, local_experts, in_saved_, counts_, h, "expert_fc1");
    if (moe_.expert_bias) {
        fc1_bias_ = b.weight(key_ + ".fc1_bias", local_experts, inner);
        const program::TensorId biased = b.activation("expert_fc1_bias", cap, inner, expected);
        b.emit(program::OpKind::grouped_bias_add, {h, fc1_bias_.value, counts_}, {biased}, program::GroupedBiasAttr{});
        h = biased;
    }
    fc1_out_ = h;
    b.module = program::Module::moe_act;
    act_ = {cap, f, kind_.activation, kind_.gated, kind_.swiglu_limit, kind_.limit_behind};
    // Memory-efficient permutation: the routing weight is applied here, before FC2.
    const bool early = b.plan().memory_efficient_permutation && !moe_.probs_on_input;
    const program::TensorId act =
        emit_activation(b, act_, {h, early ? probs_ : program::no_tensor, counts_}, "expert_act", expected);
    const emit::Quantized mid = copies(b, act, emit::quantizes_as_written(b, f) ? act : program::no_tensor,
                                       "expert_act", "expert_fc2", counts_);
    act_saved_ = b.one_scale() ? mid.row : mid.column;
    b.module = program::Module::experts;
    program::TensorId y = b.activation("expert_fc2", cap, width(), expected);
    emit::grouped(b, program::GroupedMode::forward, mid.row,
                  emit::multiplied(b, fc2_, "expert_fc2", local_experts, true), counts_, y,
                  {program::GroupedMode::forward, local_experts, width(), f, cap});
    y = emit::with_adapter(b, fc2_adapter_, local_experts, act_saved_, counts_, y, "expert_fc2");
    if (moe_.expert_bias) {
        fc2_bias_ = b.weight(key_ + ".fc2_bias", local_experts, width());
        const program::TensorId biased = b.activation("expert_fc2_bias", cap, width(), expected);
        b.emit(program::OpKind::grouped_bias_add, {y, fc2_bias_.value, counts_, early ? probs_ : program::no_tensor},
               {biased}, program::GroupedBiasAttr{1.0 / b.plan().etp});
        y = biased;
    }
    if (early || moe_.probs_on_input) return y;
    b.module = program::Module::combine;
    fc2_out_ = y;
    const program::TensorId scaled = b.activation("expert_scaled", cap, width(), expected);
    const double bytes = b.at(y).expected_bytes() + b.at(probs_).expected_bytes() + b.at(scaled).expected_bytes();
    b.emit(program::OpKind::scale_rows, {y, probs_, counts_}, {scaled}).bytes = bytes;
    return scaled;
}

// The input of the experts as wgrad multiplies it. Quantized tokens become rows again, in BF16 where that reads it.
program::TensorId MoeLayer::input_factor(emit::Builder& b) {
    program::TensorId rows = in_saved_;
    if (tokens_low_ != program::no_tensor) {
        const program::PermuteAttr attr = permute_attr(b);
        if (b.fp8_wgrad() && attr.padded == 0) return permute_columns(b, tokens_low_, program::no_tensor, "expert_in");
        const program::TensorId tokens =
            b.fp8_wgrad() ? tokens_low_ : emit::dequantize(b, tokens_low_, "expert_in_tokens");
        rows = b.tensor("expert_in_again", b.at(tokens).dtype, sent_rows(b), width());
        b.emit(program::OpKind::permute, {tokens, row_of_}, {rows}, attr);
    }
    return factor(b, rows, "expert_in", counts_);
}

MoeLayer::Rows MoeLayer::experts_backward(emit::Builder& b, const Rows& rows) {
    program::TensorId dy = rows.rows;
    const program::TensorId any = rows.low != program::no_tensor ? rows.low : dy;
    const int local_experts = moe_.experts / b.plan().ep;
    const std::int64_t f = moe_.ffn / b.plan().etp, inner = kind_.gated ? 2 * f : f, cap = b.at(any).rows;
    const double expected = b.expected_rows(any);
    const bool late = fc2_out_ != program::no_tensor, early = !late && !moe_.probs_on_input;
    program::TensorId dprobs = b.tensor("dprobs", program::Dtype::f32, cap, 1, expected);
    if (late) {
        b.module = program::Module::combine;
        const program::TensorId scaled = dy;
        dy = b.activation("expert_dscaled", cap, width(), expected);
        const double bytes = 3.0 * b.at(dy).expected_bytes() + 2.0 * b.at(dprobs).expected_bytes();
        b.emit(program::OpKind::scale_rows_grad, {scaled, fc2_out_, probs_, counts_}, {dy, dprobs}).bytes = bytes;
    }
    b.module = program::Module::experts;
    program::TensorId dprobs_bias = program::no_tensor;
    const program::GroupedBiasAttr share{1.0 / b.plan().etp};
    if (moe_.expert_bias && early) { // No wgrad could wait: the gradient of the routing weights goes on from here.
        dprobs_bias = b.tensor("dprobs_bias", program::Dtype::f32, cap, 1, expected);
        b.emit(program::OpKind::grouped_bias_grad, {dy, counts_, fc2_bias_.value, probs_},
               {fc2_bias_.gradient, dprobs_bias}, share);
    } else if (moe_.expert_bias && b.trains(fc2_bias_)) {
        b.phase = program::Phase::wgrad;
        b.emit(program::OpKind::grouped_bias_grad, {dy, counts_, fc2_bias_.value}, {fc2_bias_.gradient}, share);
    }
    b.phase = program::Phase::dgrad;
    const emit::Quantized dout = rows.columns != program::no_tensor
                                     ? emit::Quantized{rows.low, rows.columns}
                                     : copies(b, dy, rows.low, "expert_dout", "expert_fc2", counts_);
    program::TensorId dact = b.activation("expert_dact", cap, f, expected);
    const program::GroupedGemmAttr fc2{program::GroupedMode::dgrad, local_experts, width(), f, cap};
    const program::GroupedGemmAttr fc1{program::GroupedMode::dgrad, local_experts, inner, width(), cap};
    emit::grouped(b, program::GroupedMode::dgrad, dout.row,
                  emit::multiplied(b, fc2_, "expert_fc2", local_experts, false), counts_, dact, fc2);
    dact = emit::adapter_backward(b, fc2_adapter_, local_experts, dy, act_saved_, counts_, dact, "expert_fc2");
    const auto fc2_wgrad = [&](program::TensorId act) {
        if (!b.trains(fc2_)) return;
        b.phase = program::Phase::wgrad;
        const program::TensorId dy_factor = factor(b, dout, "expert_dout", counts_);
        emit::grouped(b, program::GroupedMode::wgrad, dy_factor, factor(b, act, "expert_act", counts_), counts_,
                      fc2_.gradient, fc2);
        b.phase = program::Phase::dgrad;
    };
    const bool again = b.by_rows() && !b.one_scale();
    if (!again) fc2_wgrad(act_saved_);
    b.module = program::Module::moe_act;
    // All that reads what the activation's gradient leaves may be products of FP8.
    const bool low_alone = again && b.fp8_wgrad() && emit::quantizes_as_written(b, f, 2) && b.trains(fc1_) &&
                           b.trains(fc2_) && !moe_.expert_bias && !fc1_adapter_;
    const auto shape = [&](std::int64_t cols) {
        program::Tensor rows_of;
        rows_of.rows = cap, rows_of.cols = cols, rows_of.expected_rows = expected;
        return rows_of;
    };
    program::TensorId dh = program::no_tensor, dh_low = dh, dh_columns = dh, act = dh;
    if (!low_alone) dh = b.activation("expert_dfc1", cap, inner, expected);
    program::Operands out{dh, early ? dprobs : program::no_tensor};
    if (again) { // The activation is written once more for wgrad, where widening would read and write.
        act = low_alone ? emit::column_tensor(b, shape(f), "expert_act", counts_)
                        : b.activation("expert_act_again", cap, f, expected);
        if (emit::quantizes_as_written(b, f, kind_.gated ? 2 : 1))
            dh_low = b.tensor("expert_dfc1.row", b.quantized_dtype(), cap, inner, expected);
        out.append({act, dh_low});
    }
    if (low_alone) out.push_back(dh_columns = emit::column_tensor(b, shape(inner), "expert_dfc1", counts_));
    b.emit(program::OpKind::activation_grad, {dact, fc1_out_, early ? probs_ : program::no_tensor, counts_}, out, act_);
    b.module = program::Module::experts;
    if (again) fc2_wgrad(act);
    if (dprobs_bias != program::no_tensor) dprobs = b.add(dprobs, dprobs_bias, "dprobs_sum");
    if (moe_.expert_bias && b.trains(fc1_bias_)) {
        b.phase = program::Phase::wgrad;
        b.emit(program::OpKind::grouped_bias_grad, {dh, counts_, fc1_bias_.value}, {fc1_bias_.gradient},
               program::GroupedBiasAttr{});
        b.phase = program::Phase::dgrad;
    }
    const emit::Quantized dpre =
        low_alone ? emit::Quantized{dh_low, dh_columns} : copies(b, dh, dh_low, "expert_dfc1", "expert_fc1", counts_);
    program::TensorId drows = b.activation("expert_din", cap, width(), expected);
    emit::grouped(b, program::GroupedMode::dgrad, dpre.row,
                  emit::multiplied(b, fc1_, "expert_fc1", local_experts, false), counts_, drows, fc1);
    drows = emit::adapter_backward(b, fc1_adapter_, local_experts, dh, in_saved_, counts_, drows, "expert_fc1");
    b.phase = program::Phase::wgrad;
    if (b.trains(fc1_)) {
        const program::TensorId dy_factor = factor(b, dpre, "expert_dfc1", counts_);
        emit::grouped(b, program::GroupedMode::wgrad, dy_factor, input_factor(b), counts_, fc1_.gradient, fc1);
    }
    b.phase = program::Phase::dgrad;
    if (!moe_.probs_on_input) return {drows, dprobs};
    const program::TensorId din = b.activation("expert_din_scaled", cap, width(), expected);
    b.emit(program::OpKind::scale_rows_grad, {drows, unweighed_, probs_, counts_}, {din, dprobs}).bytes =
        3.0 * b.at(din).expected_bytes() + 2.0 * b.at(dprobs).expected_bytes();
    return {din, dprobs};
}

} // namespace moe::layers
