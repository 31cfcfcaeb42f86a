// Floors of layers from their parts: what is known of one part holds for every plan that shares it, without lowering.
#pragma once

#include "simulator/bound/segment_terms.hpp"

#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace moe::bound {

// The ops of a layer, or of the model's head, in two parts: those on routed rows (router to combine), which depend on
// the number of a rank's tokens and on the expert degrees, and all others, which depend on the dense degrees.
//
// Why the parts' times add up. The routed part's first op reads what the other part has computed, and what follows it
// reads what combine returns; each stream keeps its order. So each direction takes at least as long as both parts
// played alone, shared experts left out, since they may run beside dispatch and combine. And it takes at least as long
// as each stream is busy in both parts and in the shared experts.
struct LayerPart {
    double alone[2]{}; // seconds by direction, the host being far ahead, without shared experts
    Busy busy[2]{};
    double first_saves = 0.0; // seconds as Terms::first_saves
    double held_up[2]{};      // seconds as SegmentTerms::Priced::held_up
    // Bytes that some op of either direction has in its hands beside the layer's input: alive at one time, whatever is
    // recomputed.
    double work[2]{};

    // Another part's ops behind these. It may find its weights gathered (FSDP).
    void add_behind(const LayerPart& other);
};
enum class PartKind : std::uint8_t { dense, routed };

// Seconds of one direction at least, played alone.
double least_seconds(const LayerPart& dense, const LayerPart& routed, int side);

// Thread-safe; entries live as long as the object.
class PartFloors {
public:
    template <plan::Subject subject>
    struct Key {
        plan::PlanKey<subject> plan;
        estimate::SegmentId id;
        int place; // number as places() gives it
        bool operator==(const Key&) const = default;
    };
    struct Hash {
        template <plan::Subject subject>
        std::size_t operator()(const Key<subject>& key) const {
            return key.plan.hash() * 31 + static_cast<std::size_t>(key.place) * 1024 +
                   static_cast<std::size_t>(key.id.layer_kind);
        }
    };

    // Numbers of the placements of dense and of expert groups, out of SegmentCache::placements().
    std::array<int, 2> places(const estimate::Placements& groups);
    // nullptr while it is unknown.
    const LayerPart* find(const Key<plan::Subject::dense>& key) const { return find(dense_, key); }
    const LayerPart* find(const Key<plan::Subject::routed>& key) const { return find(routed_, key); }
    // segment, prices: of the plan's segment without recomputation.
    void learn(const plan::Plan& plan, estimate::SegmentId id, std::array<int, 2> places,
               const SegmentTerms::Priced& segment);

private:
    template <class Parts, class Wanted>
    const LayerPart* find(const Parts& parts, const Wanted& wanted) const {
        const std::lock_guard lock(mutex_);
        const auto it = parts.find(wanted);
        return it == parts.end() ? nullptr : &it->second;
    }

    mutable std::mutex mutex_;
    std::unordered_map<Key<plan::Subject::dense>, LayerPart, Hash> dense_;
    std::unordered_map<Key<plan::Subject::routed>, LayerPart, Hash> routed_;
    std::vector<std::shared_ptr<const model::Model>> models_; // kept alive: keys name them by address
    std::vector<std::vector<cost::Placement>> places_;
};

} // namespace moe::bound
