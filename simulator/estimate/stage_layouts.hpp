// The stages of a plan by what they hold: most stages of a pipeline are equal, and equal ones are worked out once.
#pragma once

#include "planner/lower/lower.hpp"
#include "planner/plan/schedule.hpp"

#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace moe::estimate {

// A segment within one plan: layers by kind, MTP layers by kind, the two ends.
struct SegmentId {
    lower::SegmentKind kind = lower::SegmentKind::layer;
    int layer_kind = 0;
    auto operator<=>(const SegmentId&) const = default;
};
using Segments = std::vector<std::pair<SegmentId, int>>; // segments in forward order, equal neighbours counted

struct StageShape {
    plan::Stage stage; // one of the stages that look like this
    Segments segments;
};

struct Shape {
    std::vector<StageShape> distinct;
    std::vector<int> of_stage; // index into distinct
};

// Shapes by (model, pp, vpp, layout). Thread-safe; entries live as long as the cache.
class Shapes {
public:
    const Shape& of(const plan::Plan& plan);

private:
    std::mutex mutex_;
    std::map<std::tuple<const model::Model*, int, int, std::string>, std::unique_ptr<Shape>> shapes_;
    std::vector<std::shared_ptr<const model::Model>> models_; // kept alive, since keys point to them
};

} // namespace moe::estimate
