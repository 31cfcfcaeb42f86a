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

namespace moe {

// What one chunk holds, in execution order.
struct ChunkSpec {
    int chunk = 0, stage = 0;
    bool embedding = false, loss = false;
    std::vector<std::pair<int, int>> layers; // (global index, kind)
    std::vector<int> mtp;                    // kinds
    bool receives = false, sends = false;    // false at the model's ends and in segments
    int previous = -1, next = +1;            // pipeline ranks of the stages before and behind, less mine
    int branches = 0;          // MTP layers that an earlier stage computed, whose outputs arrive beside the trunk
    bool heads_behind = false; // the LM head passes of these MTP layers are made on a later stage, with the loss
};

// What virtual stage `stage` of the cut `all` is to the rank that runs it.
ChunkSpec spec_of(const Plan& plan, const std::vector<Stage>& all, int stage);

class DecoderLayer;
struct MtpLayer;

// Keeps what backward needs between the two templates. `plan` must outlive it.
class Chunk {
public:
    Chunk(const Plan& plan, const ChunkSpec& spec);
    ~Chunk();

    void declare(ParameterSet& set) const;
    void forward(Builder& b);
    void backward(Builder& b);

private:
    // MTP reads what the LM head reads: on a stage before the loss it brings the final norm along, and what it sends on
    // is normed. In Megatron-LM the norm stays with the head, and MTP on another stage reads what has not passed it.
    bool norm_with_mtp() const {
        return stack_traits(plan_).final_norm_with_mtp && spec_.heads_behind && !mtp_.empty();
    }
    void forward_mtp(Builder& b, TensorId h);
    TensorId segment_dout(Builder& b) const; // the gradient that comes from a segment behind this one
    TensorId backward_mtp(Builder& b);       // gradient of what forward_mtp() was given
    static TensorId mtp_ids(const Builder& b, std::size_t i);
    TensorId receive(Builder& b, const std::string& name, int delta, int tag, int stage);
    void send(Builder& b, TensorId x, int delta, int tag, int stage);

    const Plan& plan_;
    const Model& model_;
    ChunkSpec spec_;
    EmbeddingLayer embedding_;
    HeadLayer head_;
    std::vector<std::unique_ptr<DecoderLayer>> layers_;
    Norm final_norm_; // with MTP before the loss
    std::vector<std::unique_ptr<MtpLayer>> mtp_;
    std::vector<HeadLayer> late_heads_; // of MTP layers on an earlier stage
    std::vector<TensorId> branches_;    // by MTP layer, on their way to the loss's stage
};

} // namespace moe
