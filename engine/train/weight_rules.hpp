// Which weights a run freezes, and which have a learning rate of their own: patterns over the weights' names.
#pragma once

#include "engine/ops/shard_part.hpp"
#include "engine/weights/parameters.hpp"
#include "planner/plan/fwd.hpp"

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moe::train {

// A group of weights with their own learning rate: rate times the run's; decay: in place of the run's weight decay,
// below 0 = the run's.
struct RateGroup {
    std::string pattern;
    double rate = 1.0, decay = -1.0;
};
// Of PATTERN=FACTOR or PATTERN=FACTOR,decay=W. Throws Error (bad_input) naming --lr-group.
RateGroup rate_group(const std::string& text);

struct WeightRules {
    std::vector<std::string> freeze; // patterns; !PATTERN freezes what the pattern does not fit
    std::vector<RateGroup> groups;   // the last that matches a weight holds

    bool empty() const { return freeze.empty() && groups.empty(); }
    // The setting of a weight, as the part of a shard that it is.
    ops::ShardPart of(std::string_view name) const;
    // The rules as they were written, for the checkpoint.
    std::vector<std::string> group_texts() const;
};

// True where the pattern fits one or more whole parts of a name, which dots separate. '*' stands for any characters,
// dots included, and a part FIRST-LAST for a number from the first to the last. A router's "gate" is called "router"
// as well.
bool matches(std::string_view pattern, std::string_view name);

// Throws Error (bad_input) for a pattern that matches none of the names, and where everything is frozen.
void check_rules(const WeightRules& rules, const std::vector<std::string>& names);

// Throws Error (bad_input) where the plan's optimizer keeps moments of several weights together, which rules take
// apart.
void check_moments(const WeightRules& rules, const plan::Plan& plan);

// The parts of a rank's shard of bucket `bucket`, which has so many elements; none where all weights are treated as
// the run's options say.
std::vector<ops::ShardPart> parts_of(const WeightRules& rules, const std::vector<weights::LocalParameter>& parameters,
                                     int bucket, std::int64_t elements);

} // namespace moe::train
