// The tensors of a Program: element types, storage and shapes.
#pragma once

#include "planner/plan/group.hpp"

#include <cstdint>
#include <string>

namespace moe::program {

enum class Dtype : std::uint8_t { f32, bf16, fp8_tensor, fp8_block, fp8_columns, mxfp8, nvfp4, i32 };
// Bytes that `elements` of a dtype occupy, block scales included (fp8_block 1x128 FP32, fp8_columns 128x1 FP32, mxfp8
// 1x32 E8M0, nvfp4 1x16 E4M3).
std::int64_t bytes_of(Dtype dtype, std::int64_t elements);
inline constexpr std::int64_t fp8_block_size = 128;
// True where values have scales of their own, by tensor or by block.
constexpr bool is_quantized(Dtype dtype) { return dtype != Dtype::f32 && dtype != Dtype::bf16 && dtype != Dtype::i32; }
const char* to_string(Dtype dtype);

using TensorId = std::int32_t;
inline constexpr TensorId no_tensor = -1;

// The kinds of storage that a tensor may lie in.
enum class Storage : std::uint8_t {
    parameter,  // flat bucket of weights in storage precision, whole step
    gradient,   // flat bucket in the plan's dtype of gradients, whole step
    optimizer,  // this rank's shard of master weights and moments, whole run (offloaded: an activation of finish)
    activation, // produced in a slot; lifetime derived by plan_memory()
    input,      // written by the trainer before the step, one instance per micro-batch (ids, labels) or one (positions)
    scalar,     // small, one instance, zeroed by the trainer at step start (loss, norms, flags, hyper-parameters)
    host,       // in host memory: offloaded activations, one instance per micro-batch in flight, and optimizer states
};

struct Tensor {
    std::string name;
    Dtype dtype = Dtype::f32;
    Storage storage = Storage::activation;
    std::int64_t rows = 0, cols = 1; // allocated shape, row-major
    double expected_rows = 0.0;      // rows that hold data on average (routed tensors); = rows otherwise
    int chunk = -1;                  // activations and inputs: the model chunk they belong to
    bool per_micro_batch = true;     // inputs: one instance per micro-batch or one for all
    TensorId base = no_tensor;       // a view: elements [offset, offset + rows*cols) of `base`, in this tensor's dtype
    // Backward: the tensor whose contents this one holds again, recomputed, gathered or brought back; see
    // repeat_tensor().
    TensorId again_of = no_tensor;
    std::int64_t offset = 0;
    plan::Group shard_group{}; // axes set: the view is this rank's own slice, offset += index in group * elements()

    std::int64_t elements() const { return rows * cols; }
    // Matrices of fp8_block: the elements, and behind them (16 bytes aligned) the scales [rows, ceil(cols / 128)].
    // Those of fp8_columns, whose rows are whole blocks of 128: elements [rows / 128, cols, 128] and scales [rows /
    // 128, cols].
    std::int64_t scale_offset() const { return (elements() + 15) / 16 * 16; } // bytes
    std::int64_t bytes() const;
    double expected_bytes() const; // bytes with expected_rows
};

// The most rows that `rows` rows of so many groups take where each group begins a block of 128 of its own.
std::int64_t rows_in_blocks(std::int64_t rows, std::int64_t groups);
// The same of rows that groups share evenly, on average over what their last blocks lack.
double expected_in_blocks(double rows, std::int64_t groups);

} // namespace moe::program
