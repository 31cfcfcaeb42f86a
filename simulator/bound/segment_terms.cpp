// Lowers plain segments, prices their ops once, and plays them with every recomputation on those prices.
#include "simulator/bound/segment_terms.hpp"

#include "planner/lower/passes/first_gradients.hpp"
#include "planner/lower/passes/merge.hpp"
#include "planner/lower/passes/recompute.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"
#include "simulator/replay/contention.hpp"

#include <algorithm>
#include <numeric>

namespace moe::bound {
namespace {

// The plan whose ops a plan's own repeat. Tensors that are offloaded or gathered in turns depend on what is recomputed,
// and `operators` repeats parts of products: such plans share nothing with others. Optimizer states are no part of a
// segment, wherever they are.
plan::Plan plain_of(plan::Plan plan) {
    const bool parts = (plan.recompute & plan::recompute::operators) != 0;
    plan.offload &= plan::offload::activations;
    if (plan.offload == 0 && !plan.reshards() && !parts) plan.recompute = 0;
    return plan;
}

// Seconds of a layer behind another: what does not need the other's message may run while the message is on its way.
double among_others(const FlatSegment::Play& alone) { return alone.end - alone.before_input; }

std::vector<cost::OpCost> without_waits(std::vector<cost::OpCost> prices) {
    for (cost::OpCost& price : prices) price.waits_for_counts = false;
    return prices;
}

std::vector<cost::OpCost> without_early(const program::Program& plain, std::vector<cost::OpCost> prices) {
    std::size_t i = 0;
    for (const program::Template& tmpl : plain.templates)
        for (const program::Op& op : tmpl.ops) {
            if (runs_early(op)) prices[i] = cost::OpCost{};
            ++i;
        }
    return prices;
}

// Products that leave multiprocessors to tokens are longer in merged slots (in either direction the same ones as side
// by side, where an exchange follows every piece of the other direction that has products). Where none does so, tokens
// hold up what is not a product and keep products waiting.
std::array<double, 2> held_up(const program::Program& plain, const std::vector<cost::OpCost>& prices,
                              const cost::ContentionPrice& contention) {
    std::array<double, 2> seconds{};
    if (contention.none()) return seconds;
    auto price = prices.begin();
    for (std::size_t side = 0; side < 2; ++side) {
        passes::ReservedSms reserving;
        for (const program::Op& op : plain.templates[side].ops) {
            const double device = (price++)->device;
            if (reserving.next(op)) seconds[side] += device * (contention.reserved_slowdown - 1.0);
            const bool by_peers =
                op.kind == program::OpKind::dispatch_tokens || op.kind == program::OpKind::combine_tokens;
            if (replay::exchanges_rows(plain, op) && !by_peers) seconds[side] += device * contention.lost;
        }
    }
    return seconds;
}

} // namespace

plan::Plan priced_as(plan::Plan plan, const stack::Stack& stack) {
    plan.offload &= plan::offload::activations;
    if (stack.costs.overlap_sm_share == 0.0) plan.ep_overlap = false;
    if (stack.costs.fsdp_sm_share == 0.0 && !plan.reshards()) plan.fsdp = false;
    return plan;
}

plan::Plan named_as(const plan::Plan& plan, const stack::Stack& stack) {
    plan::Plan named = priced_as(plan, stack);
    if (plan::stack_traits(named).engine != plan::StackEngine::own && !named.fsdp) named.pp = 1;
    return named;
}

bool runs_early(const program::Op& op) {
    return op.kind == program::OpKind::ring_exchange || op.stream == program::Stream::data ||
           op.stream == program::Stream::host;
}

SegmentLibrary::Shape* SegmentLibrary::known_shape(const PlainKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = known_shapes_.find(key);
    return known != known_shapes_.end() ? known->second : nullptr;
}

const Terms* SegmentLibrary::known_terms(const TermsKey& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = terms_.find(key);
    return known != terms_.end() ? &known->second : nullptr;
}

const Terms& SegmentLibrary::keep(const TermsKey& key, const Terms& terms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return terms_.emplace(key, terms).first->second;
}

SegmentLibrary::Shape& SegmentLibrary::shape_of(const plan::Plan& plan, const PlainKey& key,
                                                const program::Program& plain) {
    std::vector<std::int32_t> text = signature(plain);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(models_.begin(), models_.end(), plan.model) == models_.end()) models_.push_back(plan.model);
    std::unique_ptr<Shape>& shape = shapes_[std::move(text)];
    if (!shape) {
        shape = std::make_unique<Shape>();
        for (unsigned module = 1; module <= plan::recompute::operators; module *= 2)
            for (const program::Op& op : plain.templates[0].ops)
                if (passes::recomputes(module, op)) shape->modules |= module;
    }
    known_shapes_.emplace(key, shape.get());
    return *shape;
}

const FlatSegment& SegmentLibrary::flat(Shape& shape, const program::Program& plain, const plan::Plan& plan,
                                        unsigned recompute, estimate::SegmentId id) {
    const unsigned modules = recompute & shape.modules;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto known = shape.flat.find(modules);
        if (known != shape.flat.end()) return *known->second;
    }
    // Tensors are told by their numbers: those of another plan that shares the plain segment may be others.
    plan::Plan own = plan;
    own.recompute = recompute;
    const bool same = plain_of(own).recompute == recompute || modules == 0;
    auto flat = same ? std::make_unique<FlatSegment>(plain, plain)
                     : std::make_unique<FlatSegment>(plain, lower::lower_segment(own, id.kind, id.layer_kind));
    const std::lock_guard<std::mutex> lock(mutex_);
    return *shape.flat.emplace(modules, std::move(flat)).first->second;
}

void SegmentTerms::forget() {
    plains_.clear();
    prices_.clear();
    devices_.clear();
    terms_.clear();
    coarse_.clear();
    cheapest_.clear();
}

// Neither EP overlap nor CUDA graphs change what a segment consists of, only what its ops cost.
const SegmentTerms::Plain& SegmentTerms::plain(const plan::Plan& plan, estimate::SegmentId id) {
    plan::Plan bare = plain_of(plan);
    const SegmentLibrary::PlainKey key(bare, id);
    if (const auto known = plains_.find(key); known != plains_.end()) return known->second;
    program::Program program =
        lower::lower_segment(bare, id.kind, id.layer_kind); // The key of a refused layer leaves no entry behind.
    Plain& found = plains_.try_emplace(key).first->second;
    found.plan = std::move(bare);
    found.program = std::move(program);
    found.shape = &library_.shape_of(found.plan, key, found.program);
    found.bytes = activation_bytes(found.program);
    return found;
}

// The forward's ops say what can be named, whatever is recomputed.
unsigned SegmentTerms::modules(const plan::Plan& plan, estimate::SegmentId id) {
    plan::Plan bare = plain_of(plan);
    bare.recompute = 0;
    const SegmentLibrary::Shape* known = library_.known_shape({bare, id});
    return known != nullptr ? known->modules : plain(bare, id).shape->modules;
}

const SegmentTerms::Prices& SegmentTerms::prices(const Plain& plain, const plan::Plan& plan, estimate::SegmentId id,
                                                 int place, const cost::CostModel& costs) {
    plan::Plan same = named_as(plain_of(plan), cache_.stack());
    const Key key{{same, id}, place};
    if (const auto known = prices_.find(key); known != prices_.end()) return known->second;
    // CUDA graphs change what the host does alone.
    same.cuda_graph = plan::CudaGraph::none;
    const Key device_key{{same, id}, place};
    auto device = devices_.find(device_key); // A refused layer leaves no entry behind.
    if (device == devices_.end()) device = devices_.emplace(device_key, device_prices(plain, plan, costs)).first;
    Prices prices = device->second;
    std::size_t i = 0;
    for (const program::Template& tmpl : plain.program.templates)
        for (const program::Op& op : tmpl.ops) {
            prices.ops[i].host = cost::host_seconds(plan, cache_.stack(), op);
            prices.ops[i++].waits_for_counts = cost::host_waits(plan, cache_.stack(), op);
        }
    return prices_.insert_or_assign(key, std::move(prices)).first->second;
}

SegmentTerms::Prices SegmentTerms::device_prices(const Plain& plain, const plan::Plan& plan,
                                                 const cost::CostModel& costs) {
    Prices prices;
    for (const program::Template& tmpl : plain.program.templates)
        for (const program::Op& op : tmpl.ops) prices.ops.push_back(costs(op, plain.program));
    const std::size_t forward = plain.program.templates[0].ops.size(), backward = plain.program.templates[1].ops.size();
    prices.first_saves.assign(backward, 0.0);
    const auto setting = passes::sets_first_gradients(plan)
                             ? passes::FirstGradients(plain.program).next(plain.program.templates[1])
                             : std::nullopt;
    if (setting)
        for (std::size_t i = 0; i < backward; ++i)
            if (setting->ops[i].bytes != plain.program.templates[1].ops[i].bytes)
                prices.first_saves[i] =
                    std::max(0.0, prices.ops[forward + i].device - costs(setting->ops[i], plain.program).device);
    prices.held_up = held_up(plain.program, prices.ops, costs.contention_price());
    return prices;
}

SegmentTerms::Priced SegmentTerms::priced(plan::Plan plan, estimate::SegmentId id, int place,
                                          const cost::CostModel& costs) {
    plan.recompute = 0;
    const Plain& base = plain(plan, id);
    const Prices& known = prices(base, plan, id, place, costs);
    return {base.program,  library_.flat(*base.shape, base.program, base.plan, plan.recompute, id),
            known.ops,     known.first_saves,
            known.held_up, base.bytes};
}

const Terms& SegmentTerms::of(const plan::Plan& plan, estimate::SegmentId id, int place,
                              const estimate::Placements& places, const cost::CostModel& costs) {
    plan::Plan named = named_as(plan, cache_.stack());
    named.recompute &= modules(plan, id);
    const Key key{{named, id}, place};
    if (const auto known = terms_.find(key); known != terms_.end()) return *known->second;
    const SegmentLibrary::TermsKey shared{key.time, places, false};
    const Terms* found = library_.known_terms(shared);
    if (found == nullptr) {
        plan::Plan own = plan; // Sets that differ in what the segment does not have share its lowering.
        own.recompute = named.recompute;
        const Plain& base = plain(own, id);
        const Prices& priced = prices(base, own, id, place, costs);
        Terms terms = played(base, named, id, priced.ops, priced.held_up, begins_early(plan, id));
        terms.first_saves = std::accumulate(priced.first_saves.begin(), priced.first_saves.end(), 0.0);
        found = &library_.keep(shared, terms);
    }
    return *terms_.emplace(key, found).first->second;
}

const Terms& SegmentTerms::coarse(const plan::Plan& plan, estimate::SegmentId id, int place,
                                  const estimate::Placements& places, const cost::CostModel& costs) {
    plan::Plan whole = plan, bare = priced_as(plan, cache_.stack()), named = bare;
    whole.fsdp = false;
    whole = priced_as(whole, cache_.stack());
    bare.recompute = 0;
    whole.recompute &= modules(whole, id);
    named.recompute = whole.recompute;
    const Key key{{named, id}, place};
    if (const auto known = coarse_.find(key); known != coarse_.end()) return *known->second;
    const SegmentLibrary::TermsKey shared{key.time, places, true};
    if (const Terms* found = library_.known_terms(shared)) return *coarse_.emplace(key, found).first->second;
    const Plain& base = plain(whole, id);
    std::vector<cost::OpCost>& cheapest = cheapest_[{{bare, id}, place}];
    if (cheapest.empty()) {
        std::vector<cost::OpCost> ops =
            prices(base, whole, id, place, cost::CostModel(whole, cache_.stack(), cache_.machine())).ops;
        const Plain& sharded = plain(bare, id);
        const std::vector<cost::OpCost>& others = prices(sharded, bare, id, place, costs).ops;
        std::size_t i = 0, j = 0;
        for (std::size_t t = 0; t < 2; ++t)
            for (const program::Op& op : sharded.program.templates[t].ops) {
                const cost::OpCost& other = others[j++];
                // What sharding brings along the whole segment lacks, and is not bounded here.
                if (op.stream == program::Stream::data || op.module == program::Module::data_parallel) continue;
                cost::OpCost& cost = ops.at(i++);
                cost.device = std::min(cost.device, other.device);
                cost.host = std::min(cost.host, other.host);
            }
        cheapest = std::move(ops);
    }
    const Terms& found = library_.keep(shared, played(base, whole, id, cheapest, {}, true));
    return *coarse_.emplace(key, &found).first->second;
}

// Rings run, stashed and offloaded rows come back under the layer before, FSDP gathers its weights there: among others,
// such a layer may be as short as its busiest stream.
bool SegmentTerms::begins_early(const plan::Plan& plan, estimate::SegmentId id) {
    const bool offloaded = (plan.offload & plan::offload::activations) != 0;
    if (id.kind != lower::SegmentKind::layer) return plan.reshards();
    const bool stashed = plan.paged_stash && plan.model->kinds[static_cast<std::size_t>(id.layer_kind)].moe.has_value();
    return plan.reshards() || plan.cp > 1 || stashed || offloaded;
}

Terms SegmentTerms::played(const Plain& base, const plan::Plan& plan, estimate::SegmentId id,
                           const std::vector<cost::OpCost>& ops, const std::array<double, 2>& held_up, bool early) {
    Terms terms;
    const FlatSegment& flat = library_.flat(*base.shape, base.program, base.plan, plan.recompute, id);
    const double sync = cache_.stack().costs.sync_seconds;
    const bool offloaded = (plan.offload & plan::offload::activations) != 0;
    const std::vector<cost::OpCost> timely = early ? without_early(base.program, ops) : std::vector<cost::OpCost>{};
    for (int side = 0; side < 2; ++side) {
        SideTerms& t = terms.sides[side];
        FlatSegment::Play ahead = flat.play(side, ops, replay::far_ahead, sync, ends_);
        // Counts that are recomputed are there before the neighbour's message, and while that is on its way the host
        // makes up for having waited.
        if (side == 1 && ahead.waits) {
            const double host = ahead.host;
            ahead = flat.play(side, without_waits(ops), replay::far_ahead, sync, ends_);
            ahead.waits = true;
            ahead.host = host;
        }
        t.busy = flat.busy(side, ops);
        // Tensors that leave in one slot may still be on their way in the next.
        if (offloaded) t.busy[static_cast<std::size_t>(program::Stream::host)] = 0.0;
        Busy busy = t.busy;
        busy[static_cast<std::size_t>(program::Stream::data)] = 0.0; // All layers together are asked for it.
        const double least = *std::max_element(busy.begin(), busy.end());
        t.device = std::max(least, among_others(ahead));
        if (early)
            t.device = std::min(t.device,
                                std::max(least, among_others(flat.play(side, timely, replay::far_ahead, sync, ends_))));
        t.merged = std::min(t.device, t.busy[static_cast<std::size_t>(program::Stream::compute)] +
                                          held_up[static_cast<std::size_t>(side)]);
        t.before_input = ahead.before_input;
        t.waits = ahead.waits;
        t.host = ahead.host;
        t.together = early || plan.recompute != 0 ? t.device : flat.play(side, ops, 0.0, sync, ends_).end;
        t.lead_after = early ? replay::far_ahead : ahead.end - ahead.issued;
    }
    terms.saved = flat.saved(base.bytes);
    terms.workspace = {flat.least_workspace(0, base.bytes), flat.least_workspace(1, base.bytes)};
    terms.groups = flat.groups();
    return terms;
}

} // namespace moe::bound
