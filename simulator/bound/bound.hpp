// Quotes: a floor of the fast estimate's step time, and its memory, in a fraction of a microsecond per plan.
#pragma once

#include "planner/search/pricing.hpp"
#include "simulator/bound/part_floors.hpp"
#include "simulator/estimate/stage_layouts.hpp"
#include "simulator/estimate/step_model.hpp"

#include <memory>

namespace moe {

// What quotes share with the estimator that they stand for.
struct QuoteSources {
    SegmentCache& segments;
    Shapes& shapes;
    Orders& orders;
    FlatLibrary& library;
    PartFloors& parts;
};

std::unique_ptr<Quoter> make_quoter(QuoteSources sources);

} // namespace moe
