// Low-rank adapters: the choice of a plan that trains small matrices beside weights which stay as they are.
#pragma once

#include <string>

namespace moe::plan {

// Linear layers that adapters stand beside, by where they are: the projections of attention, the two of dense MLPs and
// shared experts, and those of routed experts.
namespace adapted {
inline constexpr unsigned attention = 1, dense = 2, experts = 4, all = attention | dense | experts;
std::string to_string(unsigned set);           // "attention+dense"
unsigned from_string(const std::string& text); // throws Error (bad_input) naming the known ones
} // namespace adapted

// LoRA (arXiv 2106.09685): y = x W^T + alpha / rank * (x A^T) B^T with W [n, k] frozen, A [rank, k] drawn and B
// [n, rank] zero at first. Weights without adapters are frozen as well. Matrices that are one product (queries, keys
// and values; gate and up) share one A, as in Megatron-Bridge's LoRA and unlike its CanonicalLoRA. rank 0: every
// weight is trained, and there are no adapters.
struct Lora {
    int rank = 0;
    double alpha = 0.0;
    unsigned targets = 0;
    bool on() const { return rank > 0; }
    bool adapts(unsigned target) const { return on() && (targets & target) != 0; }
    double scale() const { return alpha / rank; }
    bool operator==(const Lora&) const = default;
};

// "none", or RANK, RANK:ALPHA or RANK:ALPHA:TARGETS such as "16:32:attention+dense"; alpha is 32 and the targets are
// all where they are left out (Megatron-Bridge's default alpha). Throws Error (bad_input).
std::string to_string(const Lora& lora);
Lora lora_from_string(const std::string& text);

} // namespace moe::plan
