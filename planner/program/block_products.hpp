// Which dense products multiply whole blocks of values in mxfp8 or nvfp4, as tensor cores that scale blocks can.
#pragma once

#include "planner/machine/precision.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/op.hpp"

#include <unordered_map>

namespace moe::program {

inline constexpr std::int64_t block_product_step = 32; // sizes of such a product are multiples of it

// The format that both operands of a product hold values of, in whole blocks of the contracted index; bf16 where they
// do not. Follows from the ops that wrote them: those that round (RoundAttr), copies to the host and back, and for
// mxfp8 gathers. nvfp4 has one scale for a tensor, and gathered ranks have one each. Pieces of rings and of
// reductions, products side by side and those of routed rows are bf16.
machine::Precision block_format(const Op& op, const Program& program);

// block_format() of every product of a program, which must outlive it.
class BlockProducts {
public:
    explicit BlockProducts(const Program& program);
    machine::Precision of(const Op& op) const {
        const auto found = formats_.find(&op);
        return found == formats_.end() ? machine::Precision::bf16 : found->second;
    }

private:
    std::unordered_map<const Op*, machine::Precision> formats_; // without bf16
};

} // namespace moe::program
