// Which op kinds a kernel may stand for, by patterns of its name: profiles/kernels, which people extend.
#pragma once

#include "planner/program/op_kind.hpp"
#include "tools/measured/device_profile.hpp"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moe::tools {

struct KernelRule {
    std::string label;                    // label for several kinds together, as a row of a table says it
    std::vector<std::string> names;       // patterns of names, any of which fits
    std::vector<std::string> collectives; // patterns of the collective's name, empty = any or none
    std::vector<program::OpKind> kinds;   // kinds of op that such a kernel may be, likeliest first: names tell no more
    bool rest = false; // whether it stands only for those of its kinds that no other rule of the same profile is for
};

struct KernelTable {
    std::string name;
    std::vector<std::string> stacks; // patterns of names of stacks whose runs it is for
    std::vector<KernelRule> rules;   // rules, of which the first that fits counts; those of the base come last

    // Index of the rule, nothing where no rule fits.
    std::optional<std::size_t> rule_of(const EventName& name) const;
};

// Whether the parts of the pattern between '*' stand in the text in this order: "nccl*AllGather" fits
// "ncclDevKernel_AllGather_RING_LL". A pattern that begins with '^' fits at the front only.
bool fits(std::string_view pattern, std::string_view text);

// A table in JSON (docs/reference/measurements.md) with that of its base; name or path as find_profile() takes them.
// Throws Error (bad_input) that names the file and the field.
KernelTable load_kernel_table(const std::string& name_or_path);
// The table whose stacks fit; "pytorch" where none does.
KernelTable kernel_table_of(const std::string& stack);

} // namespace moe::tools
