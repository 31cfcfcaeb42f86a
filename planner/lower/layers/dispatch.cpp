// Movement of rows between tokens and experts, by dispatcher: permute, exchange over EP and ETP, sort, and the way
// back.
#include "planner/lower/layers/layers.hpp"

#include "planner/plan/routing.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace moe {

// Rows that arrive over EP: with a balanced load every rank sends T*K and receives as many. What goes beyond the
// planned rows has no place there: such a step is run again.
double MoeLayer::arriving_rows(const Builder& b) const {
    const auto balanced = static_cast<double>(sent_rows(b));
    return b.plan().ep == 1 || padded(b) > 0
               ? balanced
               : std::min(balanced * routed_load(b.plan()), static_cast<double>(capacity(b)));
}

// The same with the rows of all ETP ranks.
double MoeLayer::routed_rows(const Builder& b) const { return arriving_rows(b) * b.plan().etp; }

// Every token of the EP group chooses this rank's experts, before ETP.
std::int64_t MoeLayer::worst_rows(const Builder& b) const {
    const Plan& plan = b.plan();
    if (plan.ep == 1) return b.local_tokens() * moe_.top_k;
    const std::int64_t worst = b.local_tokens() * plan.ep * std::min(moe_.top_k, moe_.experts / plan.ep);
    return plan.router.expert_capacity > 0.0 ? std::min(worst, expert_capacity(b) * moe_.experts) : worst;
}

// Planned rows of the expert side, before ETP.
std::int64_t MoeLayer::capacity(const Builder& b) const {
    const Plan& plan = b.plan();
    const std::int64_t balanced = sent_rows(b), worst = worst_rows(b);
    if (plan.ep == 1 || padded(b) > 0) return balanced;
    // Stacks of other people size their buffers by what arrives; ours plans for the worst unless told a factor.
    if (plan.capacity <= 0.0 && stack_traits(plan).plans_worst_case_rows) return worst;
    if (plan.capacity <= 0.0)
        return std::min(worst,
                        static_cast<std::int64_t>(std::ceil(static_cast<double>(balanced) * routed_load(b.plan()))));
    const auto planned =
        static_cast<std::int64_t>(std::ceil(plan.capacity * static_cast<double>(balanced) / 128.0)) * 128;
    return std::min(worst, planned);
}

// Counts and places that fit the buffers of the expert side: those that are, or none. Every rank that exchanges rows
// has the same counts, so all of them come to the same end.
void MoeLayer::fit_rows(Builder& b, TensorId& counts, const RowsAttr& attr) {
    if (b.program().io.overflow == no_tensor || capacity(b) >= worst_rows(b)) return;
    const Tensor all = b.at(counts), places = b.at(row_of_);
    const TensorId fitting = b.tensor(all.name + ".fitting", Dtype::i32, all.rows, all.cols),
                   row_of = b.tensor(places.name + ".fitting", Dtype::i32, places.rows, 1);
    b.emit(OpKind::fit_rows, {counts, row_of_}, {fitting, row_of, b.program().io.overflow}, attr).stream =
        counting_stream(b);
    counts = fitting;
    row_of_ = row_of;
}

// rows [T*K, C] -> expert-grouped rows [capacity, C], or back.
TensorId MoeLayer::move_rows(Builder& b, TensorId rows, bool back, const std::string& name) {
    const Plan& plan = b.plan();
    const std::int64_t cols = b.at(rows).cols, sent = sent_rows(b), cap = capacity(b);
    const double arriving = arriving_rows(b);
    const Dtype dtype = b.at(rows).dtype;
    const RowsAttr attr{cols, cap, moe_.experts, plan.ep, plan.etp, back};
    const bool sorts = moe_.experts / plan.ep > 1;
    const auto sort = [&](TensorId x) {
        if (!sorts) return x;
        const TensorId out =
            b.tensor(name + (back ? ".unsorted" : ".sorted"), dtype, b.at(x).rows, cols, b.expected_rows(x));
        b.emit(back ? OpKind::unsort_rows : OpKind::sort_rows, {x, all_counts_}, {out}, attr);
        return out;
    };
    const auto exchange = [&](TensorId x) {
        if (plan.ep == 1) return x;
        const TensorId out =
            b.tensor(name + ".moved", dtype, back ? sent : cap, cols, back ? static_cast<double>(sent) : arriving);
        b.communicate(OpKind::all_to_all_rows, groups::expert, Stream::expert, {x, all_counts_}, {out}, attr).bytes =
            arriving * static_cast<double>(bytes_of(dtype, cols));
        return out;
    };
    const auto over_etp = [&](TensorId x) {
        if (plan.etp == 1) return x;
        const std::int64_t here = plan.ep == 1 ? sent : cap;
        const TensorId out =
            b.tensor(name + ".etp", dtype, back ? here : here * plan.etp, cols, back ? arriving : arriving * plan.etp);
        b.communicate(back ? OpKind::reduce_scatter_rows : OpKind::all_gather_rows, groups::expert_tensor,
                      Stream::expert, {x, all_counts_}, {out}, attr);
        return out;
    };
    if (back) return exchange(over_etp(sort(rows)));
    return sort(over_etp(exchange(rows)));
}

// Counts of all sources, ETP fastest whatever the rank order says: where EP varies faster, ETP is gathered first.
TensorId MoeLayer::gather_counts(Builder& b, TensorId counts) const {
    const Plan& plan = b.plan();
    const auto gather = [&](TensorId x, Group group, std::int64_t sources) {
        const TensorId all = b.tensor("all_counts", Dtype::i32, sources, moe_.experts);
        b.communicate(OpKind::all_gather, group, Stream::expert, {x}, {all});
        return all;
    };
    const std::int64_t sources = static_cast<std::int64_t>(plan.ep) * plan.etp;
    if (plan.ep > 1 && plan.etp > 1 && plan.rank_order.find("ep") < plan.rank_order.find("tp"))
        return gather(gather(counts, groups::expert_tensor, plan.etp), groups::expert, sources);
    return gather(counts, groups::dispatch, sources);
}

// A token is quantized once, not once per copy, where its copies are the rows that the experts read, and where it
// travels so: over peer memory scales move in whole 16 bytes.
bool MoeLayer::quantizes_tokens(const Builder& b) const {
    const Plan& plan = b.plan();
    if (!plan.blocks_by_rows() || plan.experts() != Precision::fp8_blockwise || b.bf16) return false;
    if (over_peers(b)) return width() % (4 * fp8_block_size) == 0;
    return !exchanges(b) && plan.memory_efficient_permutation;
}

TensorId MoeLayer::quantized_tokens(Builder& b, TensorId x, const std::string& name) {
    const Module module = std::exchange(b.module, Module::experts);
    const TensorId tokens = quantize(b, x, name, true, false).row;
    b.module = module;
    return tokens;
}

TensorId MoeLayer::permute_low(Builder& b, TensorId x, const PermuteAttr& attr, const std::string& name) {
    const TensorId tokens = quantized_tokens(b, x, name);
    if (b.phase == Phase::forward) tokens_low_ = tokens;
    const TensorId rows = b.tensor(name + ".low", b.at(tokens).dtype, sent_rows(b), attr.cols);
    b.emit(OpKind::permute, {tokens, row_of_}, {rows}, attr);
    return rows;
}

MoeLayer::Rows MoeLayer::dispatch(Builder& b, TensorId x, TensorId weight, const std::string& name) {
    const Plan& plan = b.plan();
    const std::int64_t tokens = b.local_tokens(), copies = tokens * moe_.top_k, h = width();
    const bool forward = weight != no_tensor;
    b.module = forward ? Module::dispatch : Module::combine;
    const PermuteAttr whole{tokens, h, moe_.top_k, moe_.experts, false, false, padded(b)},
        single{tokens, 1, moe_.top_k, moe_.experts, true, false, padded(b)};
    if (forward) {
        TensorId counts = b.tensor("expert_counts", Dtype::i32, moe_.experts, 1);
        row_of_ = b.tensor("row_of", Dtype::i32, copies, 1);
        std::vector<TensorId> map{counts, row_of_};
        if (whole.padded > 0) map.push_back(b.tensor("expert_counts_padded", Dtype::i32, moe_.experts, 1));
        b.emit(OpKind::permute_map, {kept_}, map, whole);
        count_load(b, counts);
        counts = map.size() > 2 ? map.back() : counts;
        counts_ = counts;
        if (exchanges(b) && !gathers(b)) {
            all_counts_ = gather_counts(b, counts);
            fit_rows(b, all_counts_, {1, capacity(b), moe_.experts, plan.ep, plan.etp, false});
            counts_ = b.tensor("local_counts", Dtype::i32, moe_.experts / plan.ep, 1);
            b.emit(OpKind::expert_counts, {all_counts_}, {counts_},
                   RowsAttr{1, capacity(b), moe_.experts, plan.ep, plan.etp, false})
                .stream = counting_stream(b);
        }
    }
    if (gathers(b)) return dispatch_gathered(b, x, weight, name);
    if (over_peers(b)) return dispatch_over_peers(b, x, weight, name);
    const bool fused = exchanges(b) && plan.dispatcher != Dispatcher::alltoall;
    if (fused) {
        // DeepEP and HybridEP take tokens as they are and deliver rows; HybridEP groups them by expert on the way.
        const bool grouped = plan.dispatcher == Dispatcher::hybridep;
        const std::int64_t cap = capacity(b) * plan.etp;
        const double expected = routed_rows(b);
        const TensorId rows = b.activation(name, cap, h, expected);
        const TensorId probs = forward ? b.tensor(name + ".probs", Dtype::f32, cap, 1, expected) : no_tensor;
        const RowsAttr attr{h, cap, moe_.experts, plan.ep, plan.etp, false};
        std::vector<TensorId> in{x, all_counts_, row_of_}, out{rows};
        if (forward) {
            in.push_back(weight);
            out.push_back(probs);
        }
        Op& op = b.communicate(OpKind::all_to_all_rows, groups::dispatch, Stream::expert, in, out, attr);
        op.bytes = expected * static_cast<double>(bytes_of(b.activation_dtype(), h));
        if (grouped) return {rows, probs};
        const TensorId sorted = b.activation(name + ".sorted", cap, h, expected);
        b.emit(OpKind::sort_rows, {rows, all_counts_}, {sorted}, attr);
        return {sorted, probs};
    }
    TensorId rows = no_tensor, low = no_tensor, probs = no_tensor;
    if (quantizes_tokens(b)) low = permute_low(b, x, whole, name);
    if (low == no_tensor || !forward) { // what wgrad reads of a gradient is not quantized
        rows = b.activation(name + ".permuted", sent_rows(b), h);
        b.emit(OpKind::permute, {x, row_of_}, {rows}, whole);
    }
    if (forward) {
        probs = b.tensor("probs.permuted", Dtype::f32, sent_rows(b), 1);
        b.emit(OpKind::permute, {weight, row_of_}, {probs}, single);
    }
    if (exchanges(b)) {
        rows = move_rows(b, rows, false, name);
        if (forward) probs = move_rows(b, probs, false, "probs");
    }
    return {rows, probs, low};
}

MoeLayer::Rows MoeLayer::combine(Builder& b, Rows rows, const std::string& name) {
    b.module = b.phase == Phase::forward ? Module::combine : Module::dispatch;
    if (over_peers(b)) return combine_over_peers(b, rows, name);
    const TensorId y = combine_rows(b, rows.rows, name);
    return {y, rows.probs == no_tensor ? no_tensor : combine_probs(b, rows.probs)};
}

TensorId MoeLayer::combine_rows(Builder& b, TensorId rows, const std::string& name) {
    const Plan& plan = b.plan();
    const std::int64_t tokens = b.local_tokens(), h = width();
    if (gathers(b)) return combine_gathered(b, rows, h, false, name);
    const TensorId y = b.activation(name, tokens, h);
    if (exchanges(b) && plan.dispatcher != Dispatcher::alltoall) {
        const RowsAttr attr{h, b.at(rows).rows, moe_.experts, plan.ep, plan.etp, true};
        if (plan.dispatcher != Dispatcher::hybridep) {
            const TensorId unsorted = b.activation(name + ".unsorted", b.at(rows).rows, h, b.expected_rows(rows));
            b.emit(OpKind::unsort_rows, {rows, all_counts_}, {unsorted}, attr);
            rows = unsorted;
        }
        Op& op = b.communicate(OpKind::all_to_all_rows, groups::dispatch, Stream::expert, {rows, all_counts_, row_of_},
                               {y}, attr);
        op.bytes = b.at(rows).expected_bytes();
        return y;
    }
    if (exchanges(b)) rows = move_rows(b, rows, true, name);
    b.emit(OpKind::unpermute, {rows, row_of_}, {y}, PermuteAttr{tokens, h, moe_.top_k, moe_.experts, false});
    return y;
}

// Gradients of the routing weights travel back with one value per copy. Under ETP every member holds a partial sum.
TensorId MoeLayer::combine_probs(Builder& b, TensorId dprobs) {
    const Plan& plan = b.plan();
    const std::int64_t tokens = b.local_tokens();
    b.module = Module::dispatch;
    if (gathers(b)) return combine_gathered(b, dprobs, 1, true, "dweight");
    const TensorId dweight = b.tensor("dweight", Dtype::f32, tokens, moe_.top_k);
    if (exchanges(b) && plan.dispatcher != Dispatcher::alltoall) {
        const RowsAttr attr{1, b.at(dprobs).rows, moe_.experts, plan.ep, plan.etp, true};
        b.communicate(OpKind::all_to_all_rows, groups::dispatch, Stream::expert, {dprobs, all_counts_, row_of_},
                      {dweight}, attr);
        return dweight;
    }
    if (exchanges(b)) dprobs = move_rows(b, dprobs, true, "dprobs");
    b.emit(OpKind::unpermute, {dprobs, row_of_}, {dweight}, PermuteAttr{tokens, 1, moe_.top_k, moe_.experts, true});
    return dweight;
}

// Tokens go as they are, one row to each rank that has some of their experts, which puts it where all its copies
// belong.
MoeLayer::Rows MoeLayer::dispatch_over_peers(Builder& b, TensorId x, TensorId weight, const std::string& name) {
    const bool forward = weight != no_tensor;
    const std::int64_t cap = capacity(b), h = width();
    const double expected = routed_rows(b);
    // What wgrad reads of a gradient is not quantized.
    const bool low = forward && quantizes_tokens(b);
    const TensorId tokens = low ? quantized_tokens(b, x, name) : x;
    const Dtype dtype = b.at(tokens).dtype;
    const TensorId rows = b.tensor(low ? name + ".low" : name, dtype, cap, h, expected);
    Rows out{low ? no_tensor : rows, no_tensor, low ? rows : no_tensor};
    std::vector<TensorId> in{tokens, all_counts_, row_of_, weight}, results{rows};
    if (forward) {
        out.probs = b.tensor(name + ".probs", Dtype::f32, cap, 1, expected);
        places_ = b.tensor("places", Dtype::i32, b.local_tokens() * b.plan().ep, moe_.top_k);
        results.insert(results.end(), {out.probs, places_});
    } else {
        in.push_back(places_);
    }
    b.communicate(OpKind::dispatch_tokens, groups::dispatch, Stream::expert, in, results,
                  RowsAttr{h, cap, moe_.experts, b.plan().ep, 1, false, shared_.has_value()})
        .bytes = expected * static_cast<double>(bytes_of(dtype, h));
    return out;
}

MoeLayer::Rows MoeLayer::combine_over_peers(Builder& b, Rows rows, const std::string& name) {
    const std::int64_t tokens = b.local_tokens(), h = width();
    const std::int64_t parts = tokens * std::min(moe_.top_k, b.plan().ep);
    Rows out{b.activation(name, tokens, h), no_tensor};
    std::vector<TensorId> in{rows.rows, all_counts_, row_of_, places_},
        results{out.rows, b.activation(name + ".parts", parts, h)};
    if (rows.probs != no_tensor) {
        in.push_back(rows.probs);
        out.probs = b.tensor("dweight", Dtype::f32, tokens, moe_.top_k);
        results.push_back(out.probs);
    }
    b.communicate(OpKind::combine_tokens, groups::dispatch, Stream::expert, in, results,
                  RowsAttr{h, b.at(rows.rows).rows, moe_.experts, b.plan().ep, 1, true})
        .bytes = b.at(rows.rows).expected_bytes();
    return out;
}

TensorId MoeLayer::gather_group(Builder& b, TensorId x, const std::string& name) {
    const Tensor own = b.at(x);
    const TensorId all = b.tensor(name + ".all", own.dtype, own.rows * b.plan().ep * b.plan().etp, own.cols);
    b.communicate(OpKind::all_gather, groups::dispatch, Stream::expert, {x}, {all});
    return all;
}

// Every rank that shares the experts gets all tokens and their choices and picks the copies of its own experts: no
// counts to exchange, but every token goes everywhere (arXiv 2603.07685 section 2.1.3).
MoeLayer::Rows MoeLayer::dispatch_gathered(Builder& b, TensorId x, TensorId weight, const std::string& name) {
    const Plan& plan = b.plan();
    const std::int64_t tokens = b.local_tokens() * plan.ep * plan.etp, h = width();
    const int local = moe_.experts / plan.ep;
    const PermuteAttr whole{tokens, h, moe_.top_k, local, false, true},
        single{tokens, 1, moe_.top_k, local, true, true};
    const bool forward = weight != no_tensor;
    if (forward) {
        const TensorId chosen = gather_group(b, kept_, "expert_index");
        const TensorId mine = b.tensor("expert_index.local", Dtype::i32, tokens, moe_.top_k);
        b.emit(OpKind::local_experts, {chosen}, {mine}, RowsAttr{1, tokens, moe_.experts, plan.ep, plan.etp, false});
        counts_ = b.tensor("local_counts", Dtype::i32, local, 1);
        row_of_ = b.tensor("row_of.local", Dtype::i32, tokens * moe_.top_k, 1);
        b.emit(OpKind::permute_map, {mine}, {counts_, row_of_}, whole);
        fit_rows(b, counts_, {1, capacity(b) * plan.etp, local, 1, 1, false});
    }
    const std::int64_t cap = capacity(b) * plan.etp;
    const double expected = routed_rows(b);
    // Only the copies that are picked are read.
    const auto pick = [&](TensorId all, TensorId rows, const PermuteAttr& attr) {
        b.emit(OpKind::permute, {all, row_of_}, {rows}, attr).bytes = 2.0 * b.at(rows).expected_bytes();
    };
    Rows out{b.activation(name, cap, h, expected), no_tensor};
    pick(gather_group(b, x, name + ".tokens"), out.rows, whole);
    if (!forward) return out;
    out.probs = b.tensor(name + ".probs", Dtype::f32, cap, 1, expected);
    pick(gather_group(b, weight, name + ".weights"), out.probs, single);
    return out;
}

// The same backwards: this rank's part of every token, added up over the ranks; each keeps its own tokens' sums.
TensorId MoeLayer::combine_gathered(Builder& b, TensorId rows, std::int64_t cols, bool per_copy,
                                    const std::string& name) {
    const Plan& plan = b.plan();
    const std::int64_t group = static_cast<std::int64_t>(plan.ep) * plan.etp, tokens = b.local_tokens() * group;
    const std::int64_t width = per_copy ? moe_.top_k : cols;
    const Dtype dtype = b.at(rows).dtype;
    const TensorId parts = b.tensor(name + ".parts", dtype, tokens, width);
    b.emit(OpKind::unpermute, {rows, row_of_}, {parts},
           PermuteAttr{tokens, cols, moe_.top_k, moe_.experts / plan.ep, per_copy, true});
    const TensorId y = b.tensor(name, dtype, b.local_tokens(), width);
    b.communicate(OpKind::reduce_scatter, groups::dispatch, Stream::expert, {parts}, {y});
    return y;
}

} // namespace moe
