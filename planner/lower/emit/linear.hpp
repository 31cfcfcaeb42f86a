// Linear layers in every precision, alone or piece by piece beside their communication over TP.
#pragma once

#include "planner/lower/emit/builder.hpp"

#include <optional>
#include <string>

namespace moe::emit {

// Row-wise and column-wise copies of a tensor in the open module's precision; no_tensor where not asked for. By rows
// alone (Builder::by_rows()) and with wgrad in BF16, which reads x itself, `column` is x; with one scale it is what the
// row-wise copy of a gradient stands for. `linear` is the layer that multiplies them, `counts` are those of routed
// rows.
struct Quantized {
    program::TensorId row = program::no_tensor, column = program::no_tensor;
};
Quantized quantize(Builder& b, program::TensorId x, const std::string& name, const std::string& linear, bool row,
                   bool column, program::TensorId counts = program::no_tensor);
// True where the rows of these widths that an op leaves, one behind the other, can be quantized as they are written: by
// rows, in blocks of which none lies in two widths.
bool quantizes_as_written(const Builder& b, std::int64_t width, int widths = 1);
// A row-wise copy in the activation precision.
program::TensorId dequantize(Builder& b, program::TensorId x, const std::string& name,
                             program::TensorId counts = program::no_tensor);
// The tensor of a column-wise copy of rows of this shape, of so many pieces of them.
program::TensorId column_tensor(Builder& b, const program::Tensor& shape, const std::string& name,
                                program::TensorId counts = program::no_tensor, int pieces = 1);
// For wgrad in FP8 where copies are kept row-wise alone: the column-wise copy of x, which may be a row-wise one, of so
// many pieces of its rows. `e5m2`: it is a row-wise gradient with one scale.
program::TensorId columns(Builder& b, program::TensorId x, const std::string& name, bool e5m2,
                          program::TensorId counts = program::no_tensor, int pieces = 1);

// Low-rank matrices A [rank, k] and B [n, rank] beside a weight; see plan::Lora.
struct Adapter {
    Weight a, b;
    program::TensorId low = program::no_tensor; // alpha / rank * x A^T, of the rows of y: what B's wgrad reads
    std::optional<Weight> beside = {};          // B of Linear::beside
};

// y = x W^T with what its backward needs. Under a low precision x is quantized into a row-wise copy for the forward
// GEMM and a column-wise one that is kept for wgrad; `shared_input` keeps x itself instead (its other consumer needs it
// anyway) and quantizes again in the backward pass. By rows alone the row-wise copy is kept, which is
// widened for wgrad or, for wgrad in FP8, made into the column-wise one; x may come quantized.
struct Linear {
    Weight weight;
    std::string name;
    bool gather = false; // input is sharded over TP along tokens: gather it first (column-parallel)
    bool shared_input = false;
    bool quantize = true; // router and gates stay in the activation precision
    std::optional<Adapter> adapter = {};
    // A second weight of the same input, whose columns of y lie behind those of `weight`: of what ParameterSet keeps
    // under key + beside.
    std::optional<Weight> beside = {};
    program::TensorId saved = program::no_tensor;                              // local input that wgrad reads
    std::int64_t rows = 0;                                                     // rows of y
    std::int64_t width() const { return weight.n + (beside ? beside->n : 0); } // columns of y
};
program::TensorId linear_forward(Builder& b, Linear& linear, program::TensorId x, program::Dtype out_dtype);
// Gives a linear layer the weights of a key, [n, k] together, with the adapter that is declared for them.
void bind(Builder& b, Linear& linear, const std::string& key, std::int64_t n, std::int64_t k);
std::optional<Adapter> adapter_of(Builder& b, const std::string& key, std::int64_t n, std::int64_t k, int copies = 1);
// dy [rows, n] -> dx: [rows, k], reduce-scattered back over TP when the input was gathered. Emits wgrad as well, of a
// frozen weight that of its adapter alone. `low`:
// dy by rows where the op before has quantized it.
program::TensorId linear_backward(Builder& b, const Linear& linear, program::TensorId dy,
                                  program::TensorId low = program::no_tensor);
// wgrad alone, of an input that has no gradient.
void linear_wgrad(Builder& b, const Linear& linear, program::TensorId dy);

// linear_forward() and linear_backward() for row-parallel weights: y is summed over TP and scattered along tokens
// (tensor `name`), dy is gathered.
program::TensorId linear_forward_scattered(Builder& b, Linear& linear, program::TensorId x, program::Dtype out_dtype,
                                           const std::string& name);
program::TensorId linear_backward_gathered(Builder& b, const Linear& linear, program::TensorId dy,
                                           const std::string& name);

} // namespace moe::emit
