// Movement of rows between tokens and experts, by dispatcher: permute, exchange over EP and ETP, sort, and the way
// back.
#include "planner/lower/layers/layers.hpp"

#include "planner/plan/routing.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace moe::layers {

// Rows that arrive over EP: with a balanced load every rank sends T*K and receives as many. Rows beyond the planned
// ones have no place there: such a step is run again.
double MoeLayer::arriving_rows(const emit::Builder& b) const {
    const auto balanced = static_cast<double>(sent_rows(b));
    return b.plan().ep == 1 || padded(b) > 0
               ? balanced
               : std::min(balanced * plan::routed_load(b.plan()), static_cast<double>(capacity(b)));
}

// The arriving rows of all ETP ranks.
double MoeLayer::routed_rows(const emit::Builder& b) const { return arriving_rows(b) * b.plan().etp; }

// Every token of the EP group chooses this rank's experts, before ETP.
std::int64_t MoeLayer::worst_rows(const emit::Builder& b) const {
    const plan::Plan& plan = b.plan();
    if (plan.ep == 1) return b.local_tokens() * moe_.top_k;
    const std::int64_t worst = b.local_tokens() * plan.ep * std::min(moe_.top_k, moe_.experts / plan.ep);
    return plan.router.expert_capacity > 0.0 ? std::min(worst, most_kept(b) * (moe_.experts / plan.ep)) : worst;
}

// Planned rows of the expert side, before ETP.
std::int64_t MoeLayer::capacity(const emit::Builder& b) const {
    const plan::Plan& plan = b.plan();
    const std::int64_t balanced = sent_rows(b), worst = worst_rows(b);
    if (plan.ep == 1 || padded(b) > 0) return balanced;
    // Stacks of other people size their buffers by what arrives; ours plans for the worst unless told a factor.
    if (plan.capacity <= 0.0 && plan::stack_traits(plan).plans_worst_case_rows) return worst;
    if (plan.capacity <= 0.0)
        return std::min(
            worst, static_cast<std::int64_t>(std::ceil(static_cast<double>(balanced) * plan::routed_load(b.plan()))));
    const auto planned =
        static_cast<std::int64_t>(std::ceil(plan.capacity * static_cast<double>(balanced) / 128.0)) * 128;
    return std::min(worst, planned);
}

// Counts and places that fit the buffers of the expert side: those that are, or none. Every rank that exchanges rows
// has the same counts, so all of them come to the same end.
void MoeLayer::fit_rows(emit::Builder& b, program::TensorId& counts, const program::RowsAttr& attr) {
    if (b.program().io.overflow == program::no_tensor || capacity(b) >= worst_rows(b)) return;
    const program::Tensor all = b.at(counts), places = b.at(row_of_);
    const program::TensorId fitting = b.tensor(all.name + ".fitting", program::Dtype::i32, all.rows, all.cols),
                            row_of = b.tensor(places.name + ".fitting", program::Dtype::i32, places.rows, 1);
    b.emit(program::OpKind::fit_rows, {counts, row_of_}, {fitting, row_of, b.program().io.overflow}, attr).stream =
        counting_stream(b);
    counts = fitting;
    row_of_ = row_of;
}

// rows [T*K, C] -> expert-grouped rows [capacity, C], or back.
program::TensorId MoeLayer::move_rows(emit::Builder& b, program::TensorId rows, bool back, const std::string& name) {
    const plan::Plan& plan = b.plan();
    const std::int64_t cols = b.at(rows).cols, sent = sent_rows(b), cap = capacity(b);
    const double arriving = arriving_rows(b);
    const program::Dtype dtype = b.at(rows).dtype;
    const program::RowsAttr attr{cols, cap, moe_.experts, plan.ep, plan.etp, back};
    const bool sorts = moe_.experts / plan.ep > 1;
    const auto sort = [&](program::TensorId x) {
        if (!sorts) return x;
        const program::TensorId out =
            b.tensor(name + (back ? ".unsorted" : ".sorted"), dtype, b.at(x).rows, cols, b.expected_rows(x));
        b.emit(back ? program::OpKind::unsort_rows : program::OpKind::sort_rows, {x, all_counts_}, {out}, attr);
        return out;
    };
    const auto exchange = [&](program::TensorId x) {
        if (plan.ep == 1) return x;
        const program::TensorId out =
            b.tensor(name + ".moved", dtype, back ? sent : cap, cols, back ? static_cast<double>(sent) : arriving);
        b.communicate(program::OpKind::all_to_all_rows, emit::groups::expert, program::Stream::expert, {x, all_counts_},
                      {out}, attr)
            .bytes = arriving * static_cast<double>(program::bytes_of(dtype, cols));
        return out;
    };
    const auto over_etp = [&](program::TensorId x) {
        if (plan.etp == 1) return x;
        const std::int64_t here = plan.ep == 1 ? sent : cap;
        const program::TensorId out =
            b.tensor(name + ".etp", dtype, back ? here : here * plan.etp, cols, back ? arriving : arriving * plan.etp);
        b.communicate(back ? program::OpKind::reduce_scatter_rows : program::OpKind::all_gather_rows,
                      emit::groups::expert_tensor, program::Stream::expert, {x, all_counts_}, {out}, attr);
        return out;
    };
    if (back) return exchange(over_etp(sort(rows)));
    return sort(over_etp(exchange(rows)));
}

// Counts of all sources, ETP fastest whatever the rank order says: where EP varies faster, ETP is gathered first.
program::TensorId MoeLayer::gather_counts(emit::Builder& b, program::TensorId counts) const {
    const plan::Plan& plan = b.plan();
    const auto gather = [&](program::TensorId x, plan::Group group, std::int64_t sources) {
        const program::TensorId all = b.tensor("all_counts", program::Dtype::i32, sources, moe_.experts);
        b.communicate(program::OpKind::all_gather, group, program::Stream::expert, {x}, {all});
        return all;
    };
    const std::int64_t sources = static_cast<std::int64_t>(plan.ep) * plan.etp;
    if (plan.ep > 1 && plan.etp > 1 && plan.rank_order.find("ep") < plan.rank_order.find("tp"))
        return gather(gather(counts, emit::groups::expert_tensor, plan.etp), emit::groups::expert, sources);
    return gather(counts, emit::groups::dispatch, sources);
}

// A token is quantized once, not once per copy, where its copies are the rows that the experts read, and where it
// travels so: over peer memory scales move in whole 16 bytes.
bool MoeLayer::quantizes_tokens(const emit::Builder& b) const {
    const plan::Plan& plan = b.plan();
    if (!plan.blocks_by_rows() || b.bf16 || moe_.probs_on_input ||
        emit::quantized_dtype(plan, plan.experts()) != program::Dtype::fp8_block)
        return false;
    // wgrad in BF16 reads what a gradient's rows of one scale stand for, which are made of rows in BF16.
    if (b.phase != program::Phase::forward && plan.experts() == machine::Precision::fp8_tensor && !plan.fp8_wgrad)
        return false;
    if (two_levels(b)) return false; // Slots have no scales.
    if (over_peers(b)) return width() % (4 * program::fp8_block_size) == 0;
    return !exchanges(b) && plan.memory_efficient_permutation;
}

program::TensorId MoeLayer::quantized_tokens(emit::Builder& b, program::TensorId x, const std::string& name) {
    const program::Module module = std::exchange(b.module, program::Module::experts);
    const char* linear = b.phase == program::Phase::forward ? "expert_fc1" : "expert_fc2"; // that multiplies them
    const program::TensorId tokens = emit::quantize(b, x, name, linear, true, false).row;
    b.module = module;
    return tokens;
}

program::PermuteAttr MoeLayer::permute_attr(const emit::Builder& b) const {
    return {b.local_tokens(), width(), moe_.top_k, moe_.experts, false, false, padded(b)};
}

MoeLayer::Rows MoeLayer::permute_low(emit::Builder& b, program::TensorId x, const program::PermuteAttr& attr,
                                     const std::string& name) {
    const program::TensorId tokens = quantized_tokens(b, x, name);
    const bool forward = b.phase == program::Phase::forward;
    if (forward) tokens_low_ = tokens;
    Rows out;
    out.low = b.tensor(name + ".low", b.at(tokens).dtype, sent_rows(b), attr.cols);
    if (!forward && b.plan().fp8_wgrad && b.trains(fc2_) && attr.padded == 0)
        out.columns = permute_columns(b, tokens, out.low, name);
    else
        b.emit(program::OpKind::permute, {tokens, row_of_}, {out.low}, attr);
    return out;
}

program::TensorId MoeLayer::permute_columns(emit::Builder& b, program::TensorId tokens, program::TensorId rows,
                                            const std::string& name) {
    program::PermuteAttr attr = permute_attr(b);
    attr.e5m2 = b.plan().experts() == machine::Precision::fp8_tensor && b.phase == program::Phase::dgrad;
    program::Tensor shape = b.at(tokens);
    shape.rows = sent_rows(b), shape.expected_rows = static_cast<double>(shape.rows);
    const program::TensorId columns = emit::column_tensor(b, shape, name, counts_),
                            token_of = b.tensor(name + ".token_of", program::Dtype::i32, shape.rows, 1);
    b.emit(program::OpKind::permute, {tokens, row_of_, counts_}, {rows, columns, token_of}, attr);
    return columns;
}

MoeLayer::Rows MoeLayer::dispatch(emit::Builder& b, program::TensorId x, program::TensorId weight,
                                  const std::string& name) {
    const plan::Plan& plan = b.plan();
    const std::int64_t tokens = b.local_tokens(), copies = tokens * moe_.top_k, h = width();
    const bool forward = weight != program::no_tensor;
    b.module = forward ? program::Module::dispatch : program::Module::combine;
    const program::PermuteAttr whole = permute_attr(b),
                               single{tokens, 1, moe_.top_k, moe_.experts, true, false, padded(b)};
    if (forward) {
        program::TensorId counts = b.tensor("expert_counts", program::Dtype::i32, moe_.experts, 1);
        row_of_ = b.tensor("row_of", program::Dtype::i32, copies, 1);
        program::Operands map{counts, row_of_};
        if (whole.padded > 0) map.push_back(b.tensor("expert_counts_padded", program::Dtype::i32, moe_.experts, 1));
        b.emit(program::OpKind::permute_map, {kept_}, map, whole);
        count_load(b, counts);
        counts = map.size() > 2 ? map.back() : counts;
        counts_ = counts;
        if (two_levels(b)) {
            route_domains(b);
        } else if (exchanges(b) && !gathers(b)) {
            all_counts_ = gather_counts(b, counts);
            fit_rows(b, all_counts_, {1, capacity(b), moe_.experts, plan.ep, plan.etp, false});
            counts_ = b.tensor("local_counts", program::Dtype::i32, moe_.experts / plan.ep, 1);
            b.emit(program::OpKind::expert_counts, {all_counts_}, {counts_},
                   program::RowsAttr{1, capacity(b), moe_.experts, plan.ep, plan.etp, false})
                .stream = counting_stream(b);
        }
    }
    if (gathers(b)) return dispatch_gathered(b, x, weight, name);
    if (two_levels(b)) return dispatch_domains(b, x, weight, name);
    if (over_peers(b)) return dispatch_over_peers(b, x, weight, name);
    const bool fused = exchanges(b) && plan.dispatcher != plan::Dispatcher::alltoall;
    if (fused) {
        // DeepEP, HybridEP and NCCL EP take tokens as they are and deliver rows; the latter two group them by expert on
        // the way.
        const bool grouped = plan::groups_by_expert(plan.dispatcher);
        const std::int64_t cap = capacity(b) * plan.etp;
        const double expected = routed_rows(b);
        const program::TensorId rows = b.activation(name, cap, h, expected);
        const program::TensorId probs =
            forward ? b.tensor(name + ".probs", program::Dtype::f32, cap, 1, expected) : program::no_tensor;
        const program::RowsAttr attr{h, cap, moe_.experts, plan.ep, plan.etp, false};
        program::Operands in{x, all_counts_, row_of_}, out{rows};
        if (forward) {
            in.push_back(weight);
            out.push_back(probs);
        }
        program::Op& op = b.communicate(program::OpKind::all_to_all_rows, emit::groups::dispatch,
                                        program::Stream::expert, in, out, attr);
        op.bytes = expected * static_cast<double>(program::bytes_of(b.activation_dtype(), h));
        if (grouped) return {rows, probs};
        const program::TensorId sorted = b.activation(name + ".sorted", cap, h, expected);
        b.emit(program::OpKind::sort_rows, {rows, all_counts_}, {sorted}, attr);
        return {sorted, probs};
    }
    Rows out;
    if (quantizes_tokens(b)) out = permute_low(b, x, whole, name);
    program::TensorId &rows = out.rows, &probs = out.probs;
    // What wgrad in BF16 reads of a gradient is not quantized, nor what a bias adds up.
    if (out.low == program::no_tensor || (!forward && (!plan.fp8_wgrad || moe_.expert_bias))) {
        rows = b.activation(name + ".permuted", sent_rows(b), h);
        b.emit(program::OpKind::permute, {x, row_of_}, {rows}, whole);
    }
    if (forward) {
        probs = b.tensor("probs.permuted", program::Dtype::f32, sent_rows(b), 1);
        b.emit(program::OpKind::permute, {weight, row_of_}, {probs}, single);
    }
    if (exchanges(b)) {
        rows = move_rows(b, rows, false, name);
        if (forward) probs = move_rows(b, probs, false, "probs");
    }
    return out;
}

MoeLayer::Rows MoeLayer::combine(emit::Builder& b, Rows rows, const std::string& name) {
    b.module = b.phase == program::Phase::forward ? program::Module::combine : program::Module::dispatch;
    if (two_levels(b)) return combine_domains(b, rows, name);
    if (over_peers(b)) return combine_over_peers(b, rows, name);
    const program::TensorId y = combine_rows(b, rows.rows, name);
    return {y, rows.probs == program::no_tensor ? program::no_tensor : combine_probs(b, rows.probs)};
}

program::TensorId MoeLayer::combine_rows(emit::Builder& b, program::TensorId rows, const std::string& name) {
    const plan::Plan& plan = b.plan();
    const std::int64_t tokens = b.local_tokens(), h = width();
    if (gathers(b)) return combine_gathered(b, rows, h, false, name);
    const program::TensorId y = b.activation(name, tokens, h);
    if (exchanges(b) && plan.dispatcher != plan::Dispatcher::alltoall) {
        const program::RowsAttr attr{h, b.at(rows).rows, moe_.experts, plan.ep, plan.etp, true};
        if (!plan::groups_by_expert(plan.dispatcher)) {
            const program::TensorId unsorted =
                b.activation(name + ".unsorted", b.at(rows).rows, h, b.expected_rows(rows));
            b.emit(program::OpKind::unsort_rows, {rows, all_counts_}, {unsorted}, attr);
            rows = unsorted;
        }
        program::Op& op = b.communicate(program::OpKind::all_to_all_rows, emit::groups::dispatch,
                                        program::Stream::expert, {rows, all_counts_, row_of_}, {y}, attr);
        op.bytes = b.at(rows).expected_bytes();
        return y;
    }
    if (exchanges(b)) rows = move_rows(b, rows, true, name);
    b.emit(program::OpKind::unpermute, {rows, row_of_}, {y},
           program::PermuteAttr{tokens, h, moe_.top_k, moe_.experts, false});
    return y;
}

// Gradients of the routing weights travel back with one value per copy. Under ETP every member holds a partial sum.
program::TensorId MoeLayer::combine_probs(emit::Builder& b, program::TensorId dprobs) {
    const plan::Plan& plan = b.plan();
    const std::int64_t tokens = b.local_tokens();
    b.module = program::Module::dispatch;
    if (gathers(b)) return combine_gathered(b, dprobs, 1, true, "dweight");
    const program::TensorId dweight = b.tensor("dweight", program::Dtype::f32, tokens, moe_.top_k);
    if (exchanges(b) && plan.dispatcher != plan::Dispatcher::alltoall) {
        const program::RowsAttr attr{1, b.at(dprobs).rows, moe_.experts, plan.ep, plan.etp, true};
        b.communicate(program::OpKind::all_to_all_rows, emit::groups::dispatch, program::Stream::expert,
                      {dprobs, all_counts_, row_of_}, {dweight}, attr);
        return dweight;
    }
    if (exchanges(b)) dprobs = move_rows(b, dprobs, true, "dprobs");
    b.emit(program::OpKind::unpermute, {dprobs, row_of_}, {dweight},
           program::PermuteAttr{tokens, 1, moe_.top_k, moe_.experts, true});
    return dweight;
}

// Tokens go as they are, one row to each rank that has some of their experts, which puts it where all its copies
// belong.
MoeLayer::Rows MoeLayer::dispatch_over_peers(emit::Builder& b, program::TensorId x, program::TensorId weight,
                                             const std::string& name) {
    const bool forward = weight != program::no_tensor;
    const Level level = this->level(b);
    const std::int64_t cap = capacity(b), h = width();
    const double expected = routed_rows(b);
    // The gradient is quantized where it arrives, in the forms that its products read.
    const bool low = forward && quantizes_tokens(b);
    const program::TensorId tokens = low ? quantized_tokens(b, x, name) : x;
    const program::Dtype dtype = b.at(tokens).dtype;
    const program::TensorId rows = b.tensor(low ? name + ".low" : name, dtype, cap, h, expected);
    Rows out{low ? program::no_tensor : rows, program::no_tensor, low ? rows : program::no_tensor};
    program::Operands in{tokens, all_counts_, row_of_, weight}, results{rows};
    if (forward) {
        out.probs = b.tensor(name + ".probs", program::Dtype::f32, cap, 1, expected);
        places_ = b.tensor("places", program::Dtype::i32, level.tokens * level.ep, moe_.top_k);
        results.append({out.probs, places_});
    } else {
        in.push_back(places_);
    }
    b.communicate(program::OpKind::dispatch_tokens, level.group, program::Stream::expert, in, results,
                  program::RowsAttr{h, cap, level.experts, level.ep, 1, false, shared_.has_value()})
        .bytes = expected * static_cast<double>(program::bytes_of(dtype, h));
    return out;
}

MoeLayer::Rows MoeLayer::combine_over_peers(emit::Builder& b, Rows rows, const std::string& name) {
    const Level level = this->level(b);
    const std::int64_t tokens = level.tokens, h = width(), parts = tokens * std::min(moe_.top_k, level.ep);
    Rows out{b.activation(name, tokens, h), program::no_tensor};
    program::Operands in{rows.rows, all_counts_, row_of_, places_},
        results{out.rows, b.activation(name + ".parts", parts, h)};
    if (rows.probs != program::no_tensor) {
        in.push_back(rows.probs);
        out.probs = b.tensor(level.domains > 1 ? "dweight.domain" : "dweight", program::Dtype::f32, tokens, moe_.top_k);
        results.push_back(out.probs);
    }
    b.communicate(program::OpKind::combine_tokens, level.group, program::Stream::expert, in, results,
                  program::RowsAttr{h, b.at(rows.rows).rows, level.experts, level.ep, 1, true})
        .bytes = b.at(rows.rows).expected_bytes();
    return out;
}

// Over all ranks that share the experts.
program::TensorId MoeLayer::gather_group(emit::Builder& b, program::TensorId x, const std::string& name) {
    const program::Tensor own = b.at(x);
    const program::TensorId all = b.tensor(name + ".all", own.dtype, own.rows * b.plan().ep * b.plan().etp, own.cols);
    b.communicate(program::OpKind::all_gather, emit::groups::dispatch, program::Stream::expert, {x}, {all});
    return all;
}

// Every rank that shares the experts gets all tokens and their choices and picks the copies of its own experts: no
// counts to exchange, but every token goes everywhere (arXiv 2603.07685 section 2.1.3).
MoeLayer::Rows MoeLayer::dispatch_gathered(emit::Builder& b, program::TensorId x, program::TensorId weight,
                                           const std::string& name) {
    const plan::Plan& plan = b.plan();
    const std::int64_t tokens = b.local_tokens() * plan.ep * plan.etp, h = width();
    const int local = moe_.experts / plan.ep;
    const program::PermuteAttr whole{tokens, h, moe_.top_k, local, false, true},
        single{tokens, 1, moe_.top_k, local, true, true};
    const bool forward = weight != program::no_tensor;
    if (forward) {
        const program::TensorId chosen = gather_group(b, kept_, "expert_index");
        const program::TensorId mine = b.tensor("expert_index.local", program::Dtype::i32, tokens, moe_.top_k);
        b.emit(program::OpKind::local_experts, {chosen}, {mine},
               program::RowsAttr{1, tokens, moe_.experts, plan.ep, plan.etp, false});
        counts_ = b.tensor("local_counts", program::Dtype::i32, local, 1);
        row_of_ = b.tensor("row_of.local", program::Dtype::i32, tokens * moe_.top_k, 1);
        b.emit(program::OpKind::permute_map, {mine}, {counts_, row_of_}, whole);
        fit_rows(b, counts_, {1, capacity(b) * plan.etp, local, 1, 1, false});
    }
    const std::int64_t cap = capacity(b) * plan.etp;
    const double expected = routed_rows(b);
    // Copies that are not picked are not read.
    const auto pick = [&](program::TensorId all, program::TensorId rows, const program::PermuteAttr& attr) {
        b.emit(program::OpKind::permute, {all, row_of_}, {rows}, attr).bytes = 2.0 * b.at(rows).expected_bytes();
    };
    Rows out{b.activation(name, cap, h, expected), program::no_tensor};
    pick(gather_group(b, x, name + ".tokens"), out.rows, whole);
    if (!forward) return out;
    out.probs = b.tensor(name + ".probs", program::Dtype::f32, cap, 1, expected);
    pick(gather_group(b, weight, name + ".weights"), out.probs, single);
    return out;
}

// The backward way: this rank's part of every token, added up over the ranks; each keeps its own tokens' sums.
program::TensorId MoeLayer::combine_gathered(emit::Builder& b, program::TensorId rows, std::int64_t cols, bool per_copy,
                                             const std::string& name) {
    const plan::Plan& plan = b.plan();
    const std::int64_t group = static_cast<std::int64_t>(plan.ep) * plan.etp, tokens = b.local_tokens() * group;
    const std::int64_t width = per_copy ? moe_.top_k : cols;
    const program::Dtype dtype = b.at(rows).dtype;
    const program::TensorId parts = b.tensor(name + ".parts", dtype, tokens, width);
    b.emit(program::OpKind::unpermute, {rows, row_of_}, {parts},
           program::PermuteAttr{tokens, cols, moe_.top_k, moe_.experts / plan.ep, per_copy, true});
    const program::TensorId y = b.tensor(name, dtype, b.local_tokens(), width);
    b.communicate(program::OpKind::reduce_scatter, emit::groups::dispatch, program::Stream::expert, {parts}, {y});
    return y;
}

} // namespace moe::layers
