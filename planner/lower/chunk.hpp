// One model chunk of a pipeline rank: what it holds, and the emitters of its forward and backward.
#pragma once

#include "planner/lower/layers/layers.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/schedule.hpp"
#include "planner/plan/stack_traits.hpp"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace moe::lower {

// The layers that one chunk holds, in execution order.
struct ChunkSpec {
    int chunk = 0, stage = 0;
    bool embedding = false, loss = false;
    std::vector<std::pair<int, int>> layers; // (global index, kind)
    std::vector<int> mtp;                    // kinds
    bool receives = false, sends = false;    // false at the model's ends and in segments
    int previous = -1, next = +1;            // pipeline ranks of the stages before and behind, less mine
    int branches = 0;          // MTP layers that an earlier stage computed, whose outputs arrive beside the trunk
    bool heads_behind = false; // the LM head passes of these MTP layers are made on a later stage, with the loss
    bool beside_mtp = false;   // a segment: the head of a stage with MTP, whose gradient its backward adds
};

// Describes virtual stage `stage` of the cut `all` as the chunk of the rank that runs it.
ChunkSpec spec_of(const plan::Plan& plan, const std::vector<plan::Stage>& all, int stage);

class DecoderLayer;
struct MtpLayer;

// Keeps what backward needs between the two templates. `plan` must outlive it.
class Chunk {
public:
    Chunk(const plan::Plan& plan, const ChunkSpec& spec);
    ~Chunk();

    void declare(emit::ParameterSet& set) const;
    void forward(emit::Builder& b);
    void backward(emit::Builder& b);

private:
    // MTP reads what the LM head reads: on a stage before the loss it brings the final norm along, and what it sends on
    // is normed. In Megatron-LM the norm stays with the head, and MTP on another stage reads what has not passed it.
    bool norm_with_mtp() const {
        return plan::stack_traits(plan_).final_norm_with_mtp && spec_.heads_behind && !mtp_.empty();
    }
    void forward_mtp(emit::Builder& b, program::TensorId h);
    program::TensorId segment_dout(emit::Builder& b) const; // the gradient that comes from a segment behind this one
    program::TensorId backward_mtp(emit::Builder& b);       // gradient of what forward_mtp() was given
    static program::TensorId mtp_ids(const emit::Builder& b, std::size_t i);
    program::TensorId receive(emit::Builder& b, const std::string& name, int delta, int tag, int stage);
    void send(emit::Builder& b, program::TensorId x, int delta, int tag, int stage);

    const plan::Plan& plan_;
    const model::Model& model_;
    ChunkSpec spec_;
    layers::EmbeddingLayer embedding_;
    layers::HeadLayer head_;
    std::vector<std::unique_ptr<DecoderLayer>> layers_;
    layers::Norm final_norm_; // the final norm, where MTP comes before the loss
    std::vector<std::unique_ptr<MtpLayer>> mtp_;
    std::vector<layers::HeadLayer> late_heads_; // heads of MTP layers on an earlier stage
    std::vector<program::TensorId> branches_;   // outputs by MTP layer, on their way to the loss's stage
};

} // namespace moe::lower
