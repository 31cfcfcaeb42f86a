// Cuts a plan's model into stages and finds those that hold the same segments.
#include "simulator/estimate/stage_layouts.hpp"

#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"

#include <algorithm>

namespace moe::estimate {
namespace {

Segments segments_of(const plan::Plan& plan, const plan::Stage& stage) {
    Segments list;
    const auto add = [&list](SegmentId id) {
        if (!list.empty() && list.back().first == id)
            ++list.back().second;
        else
            list.emplace_back(id, 1);
    };
    if (stage.embedding) add({lower::SegmentKind::embedding, 0});
    for (int i = 0; i < stage.layers; ++i)
        add({lower::SegmentKind::layer, plan.model->layers[static_cast<std::size_t>(stage.first_layer + i)]});
    const lower::SegmentKind mtp = stage.loss ? lower::SegmentKind::mtp : lower::SegmentKind::mtp_body;
    for (int i = 0; i < stage.mtp; ++i) add({mtp, plan.model->mtp[static_cast<std::size_t>(i)]});
    const bool for_others = stage.mtp == 0 && !plan.model->mtp.empty();
    if (stage.loss) add({for_others ? lower::SegmentKind::all_heads : lower::SegmentKind::head, 0});
    return list;
}

} // namespace

const Shape& Shapes::of(const plan::Plan& plan) {
    const std::tuple<const model::Model*, int, int, std::string> key{plan.model.get(), plan.pp, plan.vpp, plan.layout};
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto it = shapes_.find(key);
        if (it != shapes_.end()) return *it->second;
    }
    auto shape = std::make_unique<Shape>();
    for (const plan::Stage& stage : plan::stages(plan)) {
        Segments segments = segments_of(plan, stage);
        const auto same = std::find_if(shape->distinct.begin(), shape->distinct.end(),
                                       [&segments](const StageShape& s) { return s.segments == segments; });
        shape->of_stage.push_back(static_cast<int>(same - shape->distinct.begin()));
        if (same == shape->distinct.end()) shape->distinct.push_back({stage, std::move(segments)});
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(models_.begin(), models_.end(), plan.model) == models_.end()) models_.push_back(plan.model);
    return *shapes_.emplace(key, std::move(shape)).first->second;
}

} // namespace moe::estimate
