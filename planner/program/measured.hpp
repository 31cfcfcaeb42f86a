// The place of an op among measured calls: the key of its family and the lengths that its time depends on.
#pragma once

#include "planner/machine/fwd.hpp"
#include "planner/program/fwd.hpp"

#include <array>
#include <string>
#include <vector>

namespace moe::program {

// The key of Hardware::measured: the op kind and what makes it another kernel: the form of a product, ".bf16" where the
// first operand is BF16, ".to-f32" where a product of such operands is FP32, ".to-fp8" where an activation or its
// gradient is quantized as it is written.
std::string measured_key(const Op& op, const Program& program);

// The key of a collective among so many members of one NVLink domain: "all_gather.bf16.x2". On devices of their own
// only; ranks that share a machine's cores are measured as they share them.
std::string group_key(const std::string& key, int members);

// The key of dispatch_tokens and combine_tokens on so many multiprocessors (planner/program/peer_blocks.hpp), for
// group_key():
std::string tokens_key(const Op& op, int blocks);
// The key of gathers over peers' memory, for group_key().
inline constexpr const char* peer_gather_key = "all_gather.peers";

// Keys of the time that GPUs that train together take beyond one alone, for group_key(): [seconds of large products by
// one GPU, by the slowest of the group]; [0, seconds by which a communication op in a step is longer than alone]; in
// merged slots [seconds of exchanges over EP beside ops that are no products of experts, seconds by which those are
// longer for it]; [seconds of gathers and reductions of data parallelism beside ops that compute, seconds by which
// those are longer].
inline constexpr const char *products_key = "large_products", *waits_key = "wait_in_step",
                            *losses_key = "lost_beside_exchange", *collectives_key = "lost_beside_collective";
inline constexpr std::array in_step_keys{products_key, waits_key, losses_key, collectives_key};
// True where it keeps a GPU at the limit of its power: at least half of the peak rate.
bool is_large_product(const Op& op, double seconds, const machine::Hardware& hardware);

struct CostPoint {
    std::string key;
    // For a product that sets a gradient: the keys of those that take longer, the next one first, for profiles that
    // lack its own. One that sets BF16 is followed by the one that sets FP32, and then comes the one that adds. For a
    // gradient of an activation that writes columns of FP8: the key of the one that writes rows alone.
    std::vector<std::string> longer;
    double work = 0.0; // FLOPs; bytes where there are none
    std::vector<double>
        sides; // lengths, each >= 1; equal in number for all ops of one key, none where only work counts
};
// The second quantity, beside its work, that a family's time grows with: the elements of a product's operands and
// result, of all its groups; the rows of queries of all heads of attention, each of which has sums that begin and end;
// the bytes of a dispatch or combine over peers' memory, of a group_key(): a token's once for every member that one of
// its choices is with; 0 for other families.
double beside_work(const std::string& key, const std::vector<double>& sides);

// The work and sides of an op, at the Program's expected rows.
CostPoint cost_point(const Op& op, const Program& program);

} // namespace moe::program
