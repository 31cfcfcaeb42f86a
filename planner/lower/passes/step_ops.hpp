// The ops by which a step begins and finishes a flat bucket, from the bucket's size: the one list of gathers,
// quantizing, zeroing, gradient reductions, norm and AdamW that lowering emits and that estimate and bound price.
#pragma once

#include "planner/program/program.hpp"

#include <cstddef>

namespace moe::passes {

// All of a bucket that tells what a step does with it.
struct BucketSize {
    plan::Domain domain = plan::Domain::dense;
    std::int64_t elements = 0;
    plan::Group group; // axes 0 when its size is 1
    int group_size = 1;
    program::Dtype weight_dtype = program::Dtype::bf16; // dtype in which products read them
    int layer = -1;                                     // FSDP: see Bucket
    int matrices = 0;                                   // quantized one by one, see Bucket
    bool quantizable = false;                           // see Bucket
    bool resharded = false;                             // FSDP: the templates of the chunk gather and reduce it
    bool copy = false;                                  // see Bucket
    bool frozen = false;                                // see Bucket
    // Muon: what Newton-Schulz multiplies; Bucket::Muon's parts, window and bytes that it works in.
    program::MuonAttr muon{};
    int parts = 1;
    std::int64_t window = 0, muon_bytes = 0;
    std::uint16_t cut = 0;  // see Bucket
    bool one_scale = false; // see Bucket

    // True where new weights are gathered in BF16 through the gradient buffer before they are quantized.
    bool is_muon() const { return muon.matrices > 0.0; }
    bool staged() const { return program::is_quantized(weight_dtype) && (matrices == 0 || group_size > 1); }
};
BucketSize size_of(const program::Program& program, const program::Bucket& bucket);

double gradient_bytes(const plan::Plan& plan); // bytes of one element of emit::gradient_dtype()
// A bucket as products read it: quantized weights are kept row-wise and column-wise.
double weight_bytes(const BucketSize& bucket);
// The gradients of a bucket before they are reduced; frozen weights have none.
double gradient_bytes(const plan::Plan& plan, const BucketSize& bucket);
// Master weights and moments of this rank's shard; Muon has one moment, frozen weights have nothing.
double optimizer_bytes(const plan::Plan& plan, const BucketSize& bucket);

enum class StepWork : std::uint8_t {
    round,    // this rank's new weights from master to BF16, where matrices are quantized from what was gathered
    gather,   // new weights of all ranks
    quantize, // quantizes what was gathered; matrices of a bucket of one rank: master
    zero,     // gradients that no product sets
    reduce,   // gradients, inside the last backward
    square,   // sum of the squares of this rank's gradients
    fetch,    // offloaded optimizer states, from the host; where the host steps: gradients, to it
    update,   // AdamW; Muon: its momentum
    store,    // optimizer states, back to the host; where the host steps: new weights, from it
    // Muon's, between update and store.
    spread,        // updates of all ranks that hold shards, into the gradients
    collect,       // slices that this rank's shard touches
    join,          // those of the other ranks of tensor parallelism
    orthogonalize, // Newton-Schulz, and the new weights
};
inline constexpr std::size_t step_work_count = 13;

// An op of the begin or finish slot, or a reduction of the last backward; `times` of them, all alike.
struct StepOp {
    program::OpKind kind{};
    program::Stream stream = program::Stream::compute;
    program::Module module = program::Module::data_parallel;
    program::Dtype dtype = program::Dtype::f32; // dtype by which it is priced
    plan::Group group{};
    double bytes = 0.0, flops = 0.0; // figures of the op, as Op's
    int times = 1;
    bool in_blocks = false;   // quantize: a matrix, see QuantizeAttr
    program::MuonAttr muon{}; // of newton_schulz
};
// True where a step does this work with the bucket.
bool has_work(const plan::Plan& plan, const BucketSize& bucket, StepWork work);
// The op, of work that the bucket has. zero: of all gradients; quantize: as many ops as matrices, of their mean size.
StepOp step_op(const plan::Plan& plan, const BucketSize& bucket, StepWork work);
// These two are step_op() for some gradients, and for one matrix with the scales of both its forms.
StepOp zero_op(const plan::Plan& plan, const BucketSize& bucket, double elements);
StepOp quantize_op(const plan::Plan& plan, const BucketSize& bucket, double elements, double scales);
// Gradients rounded to the BF16 copy that is reduced (emit::reduces_copy), or its sums back.
StepOp narrow_op(double elements);
// The sum of the gradients' squares over all ranks, and of so many scalars in all.
StepOp norm_op(int scalars);
// Delayed scaling: the largest magnitudes of a stage's operands over its ranks.
StepOp scales_op(int operands);

// The order of the begin slot, over the buckets of all chunks of a rank: visit(bucket, work), whether the bucket has
// that work or not. Gradients through whose buffer weights pass are zeroed behind the gathers. Where products set them,
// little is left, and that is zeroed at once: early_zero(bucket). Whole buckets follow all gathers, so that the first
// forward need not wait for them.
template <class EarlyZero, class Visit>
void each_begin_op(std::size_t buckets, EarlyZero early_zero, Visit visit) {
    for (std::size_t b = 0; b < buckets; ++b) {
        for (const StepWork work : {StepWork::round, StepWork::gather, StepWork::quantize}) visit(b, work);
        if (early_zero(b)) visit(b, StepWork::zero);
    }
    for (std::size_t b = 0; b < buckets; ++b)
        if (!early_zero(b)) visit(b, StepWork::zero);
}
// The order of the finish slot, before and behind the norm over all ranks. Offloaded states come bucket by bucket, and
// go back behind their update. Muon's updates travel while AdamW and Newton-Schulz work on other buckets; muon(bucket)
// tells its buckets.
template <class Visit>
void each_op_before_norm(std::size_t buckets, Visit visit) {
    for (std::size_t b = 0; b < buckets; ++b) visit(b, StepWork::square);
}
template <class Muon, class Visit>
void each_op_behind_norm(std::size_t buckets, Muon muon, Visit visit) {
    for (std::size_t b = 0; b < buckets; ++b) visit(b, StepWork::fetch);
    for (std::size_t b = 0; b < buckets; ++b)
        if (muon(b))
            for (const StepWork work : {StepWork::update, StepWork::spread}) visit(b, work);
    for (std::size_t b = 0; b < buckets; ++b)
        if (!muon(b))
            for (const StepWork work : {StepWork::update, StepWork::store}) visit(b, work);
    for (std::size_t b = 0; b < buckets; ++b)
        if (muon(b))
            for (const StepWork work : {StepWork::collect, StepWork::join, StepWork::orthogonalize, StepWork::store})
                visit(b, work);
}

} // namespace moe::passes
