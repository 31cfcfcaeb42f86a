// One model chunk of a pipeline rank: what it holds, and the emitters of its forward and backward.
#pragma once

#include "planner/layers/layers.hpp"
#include "planner/schedule.hpp"

#include <memory>
#include <optional>
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
    bool mtp_before = false; // the MTP branch was computed by an earlier stage and arrives beside the trunk
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
    bool heads_here() const { return spec_.loss || !spec_.sends; }
    static TensorId mtp_ids(const Builder& b, std::size_t i);
    TensorId receive(Builder& b, const char* name, int delta, int tag, int stage);
    void send(Builder& b, TensorId x, int delta, int tag, int stage);

    const Plan& plan_;
    const Model& model_;
    ChunkSpec spec_;
    EmbeddingLayer embedding_;
    HeadLayer head_;
    std::vector<std::unique_ptr<DecoderLayer>> layers_;
    std::vector<std::unique_ptr<MtpLayer>> mtp_;
    std::optional<HeadLayer> late_mtp_head_;
};

} // namespace moe
