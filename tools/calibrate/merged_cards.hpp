// Profiles of several cards of one kind become one, whose calls are the geometric means over the cards.
#pragma once

#include "planner/machine/hardware.hpp"

#include <string>
#include <vector>

namespace moe::tools {

// profiles: files of calibrate, two or more, each of one card. A card's seconds are those of the kind times the card's
// factor of the family: both follow by least squares on logarithms. So a call that only some cards have is levelled by
// the calls that they share with others, and a family that is not shared by the card's factor of all products and
// attention, or of all else. What is no call is as in the first profile, but context_bytes, which are the most of all.
// Result: a profile whose `cards` holds the factors.
// Throws Error (bad_input), naming file and field, for fewer than two, CPUs, profiles of a kind already, without calls,
// of other machines than the first, and where a family has other sides, other tiles, or calls that take longer than in
// the first by more than cards differ by.
machine::Hardware merged_cards(const std::vector<std::string>& profiles);

} // namespace moe::tools
