// Lower bounds: a floor of the fast estimate's step time, and its memory, in a fraction of a microsecond per plan.
#pragma once

#include "planner/search/pricing.hpp"
#include "simulator/bound/part_floors.hpp"
#include "simulator/estimate/stage_layouts.hpp"
#include "simulator/estimate/step_model.hpp"

#include <memory>

namespace moe::bound {

// The parts that bounds share with the estimator that they stand for.
struct BoundSources {
    estimate::SegmentCache& segments;
    estimate::Shapes& shapes;
    estimate::Orders& orders;
    SegmentLibrary& library;
    PartFloors& parts;
};

std::unique_ptr<search::BoundModel> make_bound_model(BoundSources sources);

} // namespace moe::bound
