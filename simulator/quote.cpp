// Composes quotes from flat segments, and states why no plan is faster.
//
// The floor of a step. A rank's slots run one after another, each at least as long as its segments played alone with
// the host far ahead. Before rank r's first slot, the first forward of the ranks before it has to be through and its
// message to arrive; behind its last slot, the last backward of those ranks has to follow. So no rank is through before
//     max(start_r + slots_r, issue_r) + tail_r,
// where issue_r is what its host needs, and the optimizer follows the last. A forward merged with a backward lasts at
// least as long as each stream is busy in both. What else happens (gathers, reductions,
// stages that wait for each other in the middle) only adds. Ranks on average hold an even share of all layers, which is
// the floor of every cut.
#include "simulator/quote.hpp"

#include "planner/builder.hpp"
#include "simulator/bucket_costs.hpp"
#include "simulator/stage_memory.hpp"

#include <algorithm>
#include <array>
#include <deque>
#include <string>
#include <tuple>
#include <unordered_map>

namespace moe {

namespace {

constexpr double far_ahead = 1e3; // seconds; no segment lasts as long
// Played op by op, slots of a pipeline that is never full, and those that share the link to the host, overlap a little:
// by what the tiers may differ.
constexpr double tiers_apart = 0.97;

bool offloads(const Plan& plan) { return (plan.offload & ~offload::optimizer) != 0; }

struct Layers {
    std::vector<const Terms*> terms; // by segment of the model
    std::vector<double> pool_bytes;  // of the saved activations of the segments of each pool
    int pools = 0;                   // which segments share pools
    Plan plan;
    double message_bytes = 0.0;
};

// Segments that a pipeline rank keeps at most, [rank][pool]: segments of equal size share a pool, see most_kept().
using KeptSegments = std::vector<std::vector<int>>;

struct Chunk {                                        // sums over the segments of a stage
    double forward = 0.0, backward = 0.0;             // the host being far ahead
    double early_forward = 0.0, early_backward = 0.0; // at the start, before the message is needed
    double host = 0.0;                                // both, where it does not wait
    Busy busy_forward{}, busy_backward{};
};

struct Stages {
    Plan plan;
    const Shape* shape = nullptr;
    std::vector<std::vector<std::pair<int, int>>> parts; // by distinct stage: segment of the model, count
    std::vector<StageMemory> memory;                     // states and groups; the rest is the layers'
    double zero = 0.0;                                   // seconds that the first rank zeroes gradients
    double closing = 0.0; // seconds of norm and optimizer behind the last slot, and of the stack
    double message_start = 0.0, message_per_byte = 0.0;
    std::map<std::array<int, 3>, const KeptSegments*> kept; // by micro-batches, EP overlap, pools
};

class FastQuoter : public Quoter {
public:
    explicit FastQuoter(QuoteSources sources) : sources_(sources), terms_(sources.segments, sources.library) {}

    int layers(const Plan& plan) override;
    int stages(const Plan& plan) override;
    Quote quote(int layers, int stages) override;
    double floor(int layers) override;
    double early_floor(const Plan& plan) override;
    int early_layers(const Plan& plan) override;
    std::vector<double> slowness(int layers) override;
    int lean(int thrifty) override;
    double least_bytes(const Plan& plan) override;
    double kept_bytes(const Plan& plan) override;
    int placement(const Plan& plan) override;
    void forget() override;

private:
    void list_segments(const std::shared_ptr<const Model>& model);
    int find_placement(const Plan& plan);
    // Step seconds of that many seconds in which one sample passes all layers.
    double spread(const Plan& plan, double seconds) const;
    template <class TermsOf> // terms of each segment of the model
    double least_of_all(const Plan& plan, const TermsOf& terms_of) const;
    template <class TermsOf>
    double resharding_seconds(const TermsOf& terms_of) const;
    const std::vector<Terms>& early_terms(const Plan& plan);
    int pools_of(std::vector<int> pools);
    int segment(SegmentId id) const {
        return static_cast<int>(std::find(segments_.begin(), segments_.end(), id) - segments_.begin());
    }
    std::vector<BucketSize> buckets(const Plan& plan, const Stage& stage, const Segments& segments);
    void sum_chunks(const Layers& layers, const Stages& stages);
    const Chunk& chunk(const Stages& stages, int rank, int c) const {
        return chunks_[static_cast<std::size_t>(
            stages.shape->of_stage[static_cast<std::size_t>(c * stages.plan.pp + rank)])];
    }
    double issue(const Stages& stages, int rank, int micro_batches) const;
    double slots(const Layers& layers, const Stages& stages, int rank, int micro_batches) const;
    const KeptSegments& kept(const Layers& layers, Stages& stages);

    QuoteSources sources_;
    std::shared_ptr<const Model> model_;
    std::vector<SegmentId> segments_; // of the model
    std::vector<int> counts_;         // how often the model has each
    SegmentTerms terms_;
    std::vector<Layers> layers_;
    std::vector<Stages> stages_;
    std::vector<std::array<Placement, 5>> placements_;
    // Parts of the segments by what a search varies, dense and routed: early_terms() is asked often.
    struct WordsHash {
        std::size_t operator()(const std::array<std::uint64_t, 2>& words) const {
            const std::uint64_t mixed = (words[0] * 0x9E3779B97F4A7C15U) ^ words[1];
            return static_cast<std::size_t>(mixed * 0xD6E8FEB86659FD93U >> 7);
        }
    };
    using Parts = std::vector<const LayerPart*>;
    std::unordered_map<std::array<std::uint64_t, 2>, Parts, WordsHash> known_[2];
    std::vector<Terms> early_;                    // scratch
    std::deque<std::vector<Terms>> own_terms_;    // behind handles
    std::vector<std::array<int, 2>> part_places_; // by placement: numbers of its dense and its expert groups'
    std::array<int, 8> last_mesh_{};              // of placement()
    std::string last_order_;
    int last_place_ = -1;
    std::vector<Chunk> chunks_; // scratch
    std::vector<StageMemory> memory_;
    std::vector<double> saved_;
    std::vector<std::vector<int>> pools_; // pool of each segment
    std::map<std::tuple<const Shape*, ScheduleKind, int, bool, int>, KeptSegments>
        kept_; // as Stages::kept, of any stages
};

void FastQuoter::list_segments(const std::shared_ptr<const Model>& model) {
    if (model_ == model) return;
    forget();
    for (auto& known : known_) known.clear();
    model_ = model;
    segments_.clear();
    counts_.clear();
    const auto add = [&](SegmentId id) {
        const auto i = static_cast<std::size_t>(segment(id));
        if (i == segments_.size()) {
            segments_.push_back(id);
            counts_.push_back(0);
        }
        ++counts_[i];
    };
    add({SegmentKind::embedding, 0});
    for (const int kind : model->layers) add({SegmentKind::layer, kind});
    for (const int kind : model->mtp) add({SegmentKind::mtp, kind});
    add({SegmentKind::head, 0});
}

int FastQuoter::placement(const Plan& plan) {
    const std::array<int, 8> mesh{plan.gpus, plan.tp, plan.cp, plan.dp, plan.pp, plan.ep, plan.etp, plan.edp};
    if (mesh == last_mesh_ && plan.rank_order == last_order_) return last_place_;
    last_mesh_ = mesh;
    last_order_ = plan.rank_order;
    return last_place_ = find_placement(plan);
}

int FastQuoter::find_placement(const Plan& plan) {
    const std::array<Placement, 5> found = sources_.segments.placements(plan);
    const auto it = std::find(placements_.begin(), placements_.end(), found);
    if (it != placements_.end()) return static_cast<int>(it - placements_.begin());
    placements_.push_back(found);
    part_places_.push_back(sources_.parts.places(found));
    return static_cast<int>(placements_.size()) - 1;
}

void FastQuoter::forget() {
    terms_.forget();
    layers_.clear();
    own_terms_.clear();
    stages_.clear();
}

int FastQuoter::layers(const Plan& plan) {
    list_segments(plan.model);
    const CostModel costs(plan, sources_.segments.stack(), sources_.segments.routes());
    Layers result;
    result.plan = plan;
    const int place = placement(plan);
    std::vector<int> pools;
    for (const SegmentId id : segments_) {
        result.terms.push_back(&terms_.of(plan, id, place, costs));
        const auto bytes = static_cast<double>(result.terms.back()->saved);
        const auto pool = std::find(result.pool_bytes.begin(), result.pool_bytes.end(), bytes);
        pools.push_back(bytes > 0.0 ? static_cast<int>(pool - result.pool_bytes.begin()) : -1);
        if (bytes > 0.0 && pool == result.pool_bytes.end()) result.pool_bytes.push_back(bytes);
    }
    result.pools = pools_of(std::move(pools));
    result.message_bytes =
        static_cast<double>(bytes_of(activation_dtype(plan.precision), plan.tokens_local() * plan.model->hidden));
    layers_.push_back(std::move(result));
    return static_cast<int>(layers_.size()) - 1;
}

int FastQuoter::pools_of(std::vector<int> pools) {
    const auto same = std::find(pools_.begin(), pools_.end(), pools);
    const auto number = static_cast<int>(same - pools_.begin());
    if (same == pools_.end()) pools_.push_back(std::move(pools));
    return number;
}

// Layers share no parameters, so a stage's buckets are those of its layers and those of its ends.
std::vector<BucketSize> FastQuoter::buckets(const Plan& plan, const Stage& stage, const Segments& segments) {
    Stage ends = stage;
    ends.first_layer = ends.layers = 0;
    std::vector<BucketSize> sizes;
    if (ends.embedding || ends.loss || ends.mtp > 0) sizes = sources_.segments.stage_buckets(plan, ends);
    for (const auto& [id, count] : segments) {
        if (id.kind != SegmentKind::layer) continue;
        for (BucketSize b : sources_.segments.buckets(plan, id)) {
            b.elements *= count;
            b.group_size = group_size(plan, b.group);
            sizes.push_back(b);
        }
    }
    return sizes;
}

int FastQuoter::stages(const Plan& plan) {
    list_segments(plan.model);
    Stages result;
    result.plan = plan;
    result.shape = &sources_.shapes.of(plan);
    const CostModel costs(plan, sources_.segments.stack(), sources_.segments.routes());
    std::vector<double> update, squares, zeroed;
    for (const StageShape& stage : result.shape->distinct) {
        std::vector<std::pair<int, int>> parts;
        for (const auto& [id, count] : stage.segments) parts.emplace_back(segment(id), count);
        result.parts.push_back(std::move(parts));
        StageMemory memory;
        double updated = 0.0, summed = 0.0, zero = 0.0;
        for (const BucketSize& b : buckets(plan, stage.stage, stage.segments)) {
            memory.add_states(plan, b);
            memory.groups |= group_bit(b.group);
            updated += update_bytes(plan, b);
            const double gradients = gradient_bytes(plan) * static_cast<double>(b.elements);
            summed += gradients / b.group_size;
            if (!is_quantized(b.weight_dtype) && !plan.reshards()) zero += gradients;
        }
        if (plan.reshards() && stage.stage.mtp > 0) { // the LM head's gathered weights, which MTP reads as well
            Stage head;
            head.loss = true;
            for (const BucketSize& b : buckets(plan, head, {{{SegmentKind::head, 0}, 1}}))
                if (b.group_size > 1) memory.counted_twice += stage.stage.mtp * weight_bytes(b);
        }
        if (stage.stage.loss && plan.dp * plan.cp > 1) memory.groups |= group_bit(groups::samples);
        result.memory.push_back(memory);
        update.push_back(updated);
        squares.push_back(summed);
        zeroed.push_back(zero);
    }
    const auto rank_sum = [&](const std::vector<double>& of, int rank) {
        double sum = 0.0;
        for (int c = 0; c < plan.vpp; ++c)
            sum += of[static_cast<std::size_t>(result.shape->of_stage[static_cast<std::size_t>(c * plan.pp + rank)])];
        return sum;
    };
    double most = 0.0;
    for (int r = 0; r < plan.pp; ++r) most = std::max(most, rank_sum(update, r));
    const auto seconds = [&](OpKind kind, double bytes) {
        return bytes > 0.0 ? price_bytes(costs, kind, bytes, Dtype::f32) : 0.0;
    };
    result.zero = seconds(OpKind::zero, rank_sum(zeroed, 0));
    result.closing = seconds(OpKind::adamw, most) + seconds(OpKind::sum_squares, rank_sum(squares, 0)) +
                     sources_.segments.stack().costs.step_seconds;
    if (plan.pp > 1) {
        constexpr double far = 1e9; // bytes
        result.message_start = price_bytes(costs, OpKind::send, 0.0, Dtype::bf16, groups::pipeline);
        result.message_per_byte =
            (price_bytes(costs, OpKind::send, far, Dtype::bf16, groups::pipeline) - result.message_start) / far;
    }
    stages_.push_back(std::move(result));
    return static_cast<int>(stages_.size()) - 1;
}

void FastQuoter::sum_chunks(const Layers& layers, const Stages& stages) {
    chunks_.clear();
    memory_ = stages.memory;
    for (std::size_t d = 0; d < stages.parts.size(); ++d) {
        const auto& parts = stages.parts[d];
        Chunk chunk;
        StageMemory& memory = memory_[d];
        for (const auto& [index, count] : parts) {
            const Terms& t = *layers.terms[static_cast<std::size_t>(index)];
            for (const SideTerms& side : t.sides) chunk.host += (side.waits ? 0.0 : side.host) * count;
            chunk.forward += t.sides[0].device * count;
            chunk.backward += t.sides[1].device * count;
            memory.workspace.forward = std::max(memory.workspace.forward, t.workspace.forward);
            memory.workspace.backward = std::max(memory.workspace.backward, t.workspace.backward);
            memory.groups |= t.groups;
            if (!layers.plan.ep_overlap) continue;
            for (std::size_t s = 0; s < stream_count; ++s) {
                chunk.busy_forward[s] += t.sides[0].busy[s] * count;
                chunk.busy_backward[s] += t.sides[1].busy[s] * count;
            }
        }
        // Weights come and gradients go under any slot of the chunk, but all of them have to.
        if (layers.plan.reshards()) {
            const double moved = resharding_seconds([&](std::size_t i) -> const Terms& { return *layers.terms[i]; });
            constexpr auto data = static_cast<std::size_t>(Stream::data);
            chunk.backward += std::max(0.0, moved - chunk.forward - chunk.backward);
            chunk.busy_backward[data] = std::max(0.0, moved - chunk.busy_forward[data]);
        }
        if (!parts.empty()) {
            const auto first = [&](const std::pair<int, int>& part, int side) {
                return layers.terms[static_cast<std::size_t>(part.first)]->sides[side].before_input;
            };
            chunk.early_forward = std::min(first(parts.front(), 0), chunk.forward);
            chunk.early_backward = std::min(first(parts.back(), 1), chunk.backward);
        }
        chunks_.push_back(chunk);
    }
}

// Seconds from the step's start until a rank's host has issued all slots but the last.
double FastQuoter::issue(const Stages& stages, int rank, int micro_batches) const {
    double sum = 0.0, longest = 0.0;
    for (int c = 0; c < stages.plan.vpp; ++c) {
        const double host = chunk(stages, rank, c).host;
        sum += micro_batches * host;
        longest = std::max(longest, host);
    }
    return sum - longest;
}

// Seconds that a rank's slots take at least, one after another.
double FastQuoter::slots(const Layers& layers, const Stages& stages, int rank, int micro_batches) const {
    const Plan& plan = stages.plan;
    const double m = micro_batches;
    if (!layers.plan.ep_overlap) {
        double sum = 0.0;
        for (int c = 0; c < plan.vpp; ++c) sum += chunk(stages, rank, c).forward + chunk(stages, rank, c).backward;
        return m * sum;
    }
    // The first forwards and the last backwards have no partner: as many of them as order() warms up with.
    const bool one = plan.schedule == ScheduleKind::one_f_one_b;
    const int total = micro_batches * plan.vpp;
    const int alone =
        std::min(total, 1 + (one ? plan.pp - rank - 1 : 2 * (plan.pp - rank - 1) + (plan.vpp - 1) * plan.pp));
    const int round = plan.pp * plan.vpp, rest = alone % round;
    double unmerged = 0.0;
    Busy busy{};
    for (int c = 0; c < plan.vpp; ++c) {
        const Chunk& held = chunk(stages, rank, c);
        // Backwards leave the chunks in the order in which forwards came.
        const int lone = one ? alone : alone / round * plan.pp + std::clamp(rest - c * plan.pp, 0, plan.pp);
        unmerged += lone * (held.forward + held.backward);
        for (std::size_t s = 0; s < stream_count; ++s)
            busy[s] += (m - lone) * (held.busy_forward[s] + held.busy_backward[s]);
    }
    return unmerged + *std::max_element(busy.begin(), busy.end());
}

const KeptSegments& FastQuoter::kept(const Layers& layers, Stages& stages) {
    const Plan& plan = stages.plan;
    const int enough = enough_micro_batches(plan);
    const KeptSegments*& known = stages.kept[{enough, plan.ep_overlap ? 1 : 0, layers.pools}];
    if (known != nullptr) return *known;
    const auto [it, fresh] = kept_.try_emplace({stages.shape, plan.schedule, enough, plan.ep_overlap, layers.pools});
    known = &it->second;
    if (!fresh) return *known;
    const std::vector<int>& pools = pools_[static_cast<std::size_t>(layers.pools)];
    std::vector<SavedSegments> saved(stages.parts.size());
    for (std::size_t d = 0; d < saved.size(); ++d) {
        std::ptrdiff_t held = 0; // layers come before the ends of the model
        for (const auto& [index, count] : stages.parts[d]) {
            const int pool = pools[static_cast<std::size_t>(index)];
            const SegmentKind kind = segments_[static_cast<std::size_t>(index)].kind;
            const bool end = kind == SegmentKind::embedding || kind == SegmentKind::head;
            if (pool < 0) continue;
            saved[d].insert(end ? saved[d].end() : saved[d].begin() + held, static_cast<std::size_t>(count), pool);
            if (!end) held += count;
        }
    }
    for (int r = 0; r < plan.pp; ++r) {
        std::vector<const SavedSegments*> chunks;
        for (int c = 0; c < plan.vpp; ++c)
            chunks.push_back(
                &saved[static_cast<std::size_t>(stages.shape->of_stage[static_cast<std::size_t>(c * plan.pp + r)])]);
        std::vector<int> most(layers.pool_bytes.size(), 0);
        for (const auto& [pool, segments] : most_kept(chunks, sources_.orders.of(plan, enough, r).kept))
            most[static_cast<std::size_t>(pool)] = segments;
        it->second.push_back(std::move(most));
    }
    return *known;
}

Quote FastQuoter::quote(int layers_handle, int stages_handle) {
    const Layers& layers = layers_[static_cast<std::size_t>(layers_handle)];
    Stages& stages = stages_[static_cast<std::size_t>(stages_handle)];
    sum_chunks(layers, stages);
    Plan& plan = stages.plan;
    plan.mbs = layers.plan.mbs;
    plan.ep_overlap = layers.plan.ep_overlap;
    const int m = plan.micro_batches();
    const double message = stages.message_start + layers.message_bytes * stages.message_per_byte;
    double start = stages.zero, tail = 0.0, worst = 0.0;
    for (int r = 0; r < plan.pp; ++r) {
        const Chunk& first = chunk(stages, r, 0);
        start = std::max(0.0, start - (r == 0 ? 0.0 : first.early_forward));
        worst = std::max(worst, std::max(start + slots(layers, stages, r, m), issue(stages, r, m)) + tail);
        start += first.forward + message;
        // A message that leaves before the weights' gradients: how much before is not told by slots.
        tail += message + (plan.delay_wgrad ? 0.0 : first.backward - first.early_backward);
    }
    Quote quote;
    quote.step_seconds = worst + stages.closing;
    if (m < plan.pp || offloads(layers.plan)) quote.step_seconds *= tiers_apart;
    saved_.clear();
    for (const std::vector<int>& most : kept(layers, stages)) {
        double bytes = 0.0;
        for (std::size_t p = 0; p < layers.pool_bytes.size(); ++p) bytes += most[p] * layers.pool_bytes[p];
        saved_.push_back(bytes);
    }
    quote.memory_bytes = peak_bytes(plan, memory_, stages.shape->of_stage, saved_);
    return quote;
}

double FastQuoter::floor(int handle) {
    const Layers& layers = layers_[static_cast<std::size_t>(handle)];
    return spread(layers.plan,
                  least_of_all(layers.plan, [&](std::size_t i) -> const Terms& { return *layers.terms[i]; }));
}

double FastQuoter::spread(const Plan& plan, double seconds) const {
    const double micro_batches = static_cast<double>(plan.gbs) / static_cast<double>(plan.mbs);
    const double even = micro_batches * plan.tp * plan.cp / plan.gpus * seconds;
    return (even + sources_.segments.stack().costs.step_seconds) * (offloads(plan) ? tiers_apart : 1.0);
}

// Terms of what is known of the parts: neither what the host does nor bytes.
const std::vector<Terms>& FastQuoter::early_terms(const Plan& plan) {
    list_segments(plan.model);
    const int place = placement(plan);
    const std::array<int, 2> places = part_places_[static_cast<std::size_t>(place)];
    // What a search varies, in a few words.
    const auto number = [](auto value) { return static_cast<std::uint64_t>(value); };
    const std::uint64_t common =
        number(plan.precision) << 56 | number(plan.reshards()) << 55 | number(plan.ep_overlap) << 54;
    Parts& dense = known_[0][{common | number(plan.tp_overlap) << 53 | number(plan.cp_comm) << 48 |
                                  number(plan.tp) << 24 | number(plan.cp),
                              number(plan.mbs) << 16 | number(places[0])}];
    Parts& routed =
        known_[1][{common | number(plan.tokens_local()),
                   number(plan.ep) << 40 | number(plan.etp) << 24 | number(plan.dispatcher) << 16 | number(places[1])}];
    dense.resize(segments_.size());
    routed.resize(segments_.size());
    early_.assign(segments_.size(), Terms{});
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        SegmentId id = segments_[i];
        if (id.kind == SegmentKind::mtp) id.kind = SegmentKind::layer; // and more
        if (id.kind != SegmentKind::layer) continue;                   // the ends of the model are small
        const auto look = [&] {
            if (dense[i] == nullptr) dense[i] = sources_.parts.find(PartKind::dense, plan, id, places[0]);
            if (routed[i] == nullptr) routed[i] = sources_.parts.find(PartKind::routed, plan, id, places[1]);
            return dense[i] != nullptr && routed[i] != nullptr;
        };
        if (!look()) {
            const CostModel costs(plan, sources_.segments.stack(), sources_.segments.routes());
            sources_.parts.learn(plan, id, places, terms_.priced(plan, id, place, costs));
            look();
        }
        if (!offloads(plan)) {
            const auto most = [&](int side) {
                return static_cast<std::int64_t>(std::max(dense[i]->work[side], routed[i]->work[side]));
            };
            early_[i].workspace = {most(0), most(1)};
        }
        for (int side = 0; side < 2; ++side) {
            SideTerms& t = early_[i].sides[side];
            t.device = t.together = t.before_input = least_seconds(*dense[i], *routed[i], side);
            t.lead_after = far_ahead;
            for (std::size_t s = 0; s < stream_count; ++s)
                t.busy[s] = dense[i]->busy[side][s] + routed[i]->busy[side][s];
        }
    }
    return early_;
}

double FastQuoter::early_floor(const Plan& plan) {
    const std::vector<Terms>& terms = early_terms(plan);
    return spread(plan, least_of_all(plan, [&](std::size_t i) -> const Terms& { return terms[i]; }));
}

int FastQuoter::early_layers(const Plan& plan) {
    own_terms_.push_back(early_terms(plan));
    Layers result;
    result.plan = plan;
    for (const Terms& t : own_terms_.back()) result.terms.push_back(&t);
    std::vector<int> pools; // each layer keeps its input
    for (const SegmentId id : segments_)
        pools.push_back(id.kind == SegmentKind::layer || id.kind == SegmentKind::mtp ? 0 : -1);
    result.pools = pools_of(std::move(pools));
    result.pool_bytes = {kept_bytes(plan)};
    layers_.push_back(std::move(result));
    return static_cast<int>(layers_.size()) - 1;
}

// Seconds that FSDP moves weights and gradients of a micro-batch, at least: what the last layer of a kind gathered for
// its forward may still be there for its backward.
template <class TermsOf>
double FastQuoter::resharding_seconds(const TermsOf& terms_of) const {
    constexpr auto data = static_cast<std::size_t>(Stream::data);
    double sum = 0.0;
    for (std::size_t i = 0; i < counts_.size(); ++i) {
        const Terms& t = terms_of(i);
        sum += counts_[i] * t.sides[0].busy[data] + (counts_[i] - 1) * t.sides[1].busy[data];
    }
    return sum;
}

// Seconds in which one micro-batch passes all layers at least, all of them on one rank.
template <class TermsOf>
double FastQuoter::least_of_all(const Plan& plan, const TermsOf& terms_of) const {
    double device = 0.0;
    Busy busy{};
    for (std::size_t i = 0; i < counts_.size(); ++i) {
        const Terms& t = terms_of(i);
        device += counts_[i] * (t.sides[0].device + t.sides[1].device);
        for (std::size_t s = 0; s < stream_count; ++s)
            busy[s] += counts_[i] * (t.sides[0].busy[s] + t.sides[1].busy[s]);
    }
    if (plan.reshards()) {
        double& moved = busy[static_cast<std::size_t>(Stream::data)];
        moved = resharding_seconds(terms_of);
        device = std::max(device, moved);
    }
    return plan.ep_overlap ? *std::max_element(busy.begin(), busy.end()) : device;
}

std::vector<double> FastQuoter::slowness(int handle) {
    const Layers& layers = layers_[static_cast<std::size_t>(handle)];
    std::vector<double> list;
    for (const Terms* t : layers.terms)
        for (const SideTerms& side : t->sides) {
            list.insert(list.end(), {side.device, side.device - side.before_input, side.host, side.together,
                                     side.waits ? -side.lead_after : -far_ahead});
            if (layers.plan.ep_overlap) list.insert(list.end(), side.busy.begin(), side.busy.end());
        }
    return list;
}

int FastQuoter::lean(int thrifty) {
    Layers result = layers_[static_cast<std::size_t>(thrifty)];
    std::vector<Terms>& terms = own_terms_.emplace_back();
    for (std::size_t i = 0; i < result.terms.size(); ++i) {
        terms.push_back(*result.terms[i]);
        terms.back().workspace = {};
    }
    for (std::size_t i = 0; i < terms.size(); ++i) result.terms[i] = &terms[i];
    layers_.push_back(std::move(result));
    return static_cast<int>(layers_.size()) - 1;
}

double FastQuoter::least_bytes(const Plan& plan) {
    list_segments(plan.model);
    Segments layers;
    for (std::size_t i = 0; i < segments_.size(); ++i)
        if (segments_[i].kind == SegmentKind::layer) layers.emplace_back(segments_[i], counts_[i]);
    Stage ends;
    ends.embedding = ends.loss = true;
    ends.mtp = static_cast<int>(plan.model->mtp.size());
    StageMemory all;
    for (const BucketSize& b : buckets(plan, ends, layers)) all.add_states(plan, b);
    return (all.states + all.visiting) / plan.pp + plan.hardware->context_bytes;
}

// A layer's first norm reads its input in the backward pass as well, and nothing in the layer can compute it again.
double FastQuoter::kept_bytes(const Plan& plan) {
    if (offloads(plan)) return 0.0;
    return static_cast<double>(bytes_of(activation_dtype(plan.precision), plan.tokens_local() * plan.model->hidden));
}

} // namespace

std::unique_ptr<Quoter> make_quoter(QuoteSources sources) { return std::make_unique<FastQuoter>(sources); }

} // namespace moe
