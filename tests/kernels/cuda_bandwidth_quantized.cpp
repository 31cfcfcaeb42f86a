// Times the kernels that quantize and round operands.
#include "tests/kernels/cuda_bandwidth_cases.hpp"

#include <fmt/format.h>

namespace moe::test {
namespace {

class Cases : BandwidthCases {
public:
    using BandwidthCases::BandwidthCases;
    std::vector<Moved> run() {
        quantization();
        return std::move(moved_);
    }

private:
    std::uint8_t* take_bytes(Row n) { return static_cast<std::uint8_t*>(pool_.take(Type::f32, n / 4).data); }

    Fp8Columns take_columns(Row cols) {
        const Row blocks = column_blocks(copies, experts);
        return {take_bytes(blocks * cols * scale_block), pool_.floats(blocks * cols)};
    }

    void quantization() {
        for (const Row cols : {2048, 768}) {
            const FilledRows shape{copies, cols, 0};
            const Dst x = pool_.take(Type::bf16, copies * cols);
            std::uint8_t* const q = take_bytes(copies * cols);
            float* const scale = pool_.floats(copies * cols / scale_block);
            const double bytes = static_cast<double>(copies * cols) * (3.0 + 4.0 / scale_block);
            time(fmt::format("quantize_rows {}x{} bf16", copies, cols), bytes,
                 [=, this](void* s) { k_.quantize_rows(shape, x, nullptr, q, scale, s); });
            k_.quantize_rows(shape, x, nullptr, q, scale, nullptr);
            time(fmt::format("dequantize_rows {}x{} bf16", copies, cols), bytes,
                 [=, this](void* s) { k_.dequantize_rows(shape, q, scale, nullptr, x, s); });
        }
        quantizing_activations();
        quantizing_columns();
        permuting_columns();
        rounding();
        const QuantizedWeights shape{experts, 1536, 2048};
        const Row n = shape.groups * shape.n * shape.k;
        for (const Type type : {Type::bf16, Type::f32}) {
            const Dst w = pool_.take(type, n);
            std::uint8_t *const q = take_bytes(n), *const qt = take_bytes(n);
            float *const scale = pool_.floats(n / 16384), *const qt_scale = pool_.floats(n / 16384);
            time(fmt::format("quantize_weights 128x1536x2048 {}", type == Type::f32 ? "f32" : "bf16"),
                 of(type, static_cast<double>(n)) + 2.0 * static_cast<double>(n),
                 [=, this](void* s) { k_.quantize_weights(shape, w, q, scale, qt, qt_scale, s); });
            QuantizedWeights one = shape;
            one.one_scale = true, one.largest = pool_.floats(1);
            for (const bool delayed : {false, true}) {
                if (delayed) one.window = pool_.floats(1);
                time(fmt::format("quantize_weights 128x1536x2048 {} one scale{}", type == Type::f32 ? "f32" : "bf16",
                                 delayed ? " delayed" : ""),
                     of(type, static_cast<double>(n)) * (delayed ? 1.0 : 2.0) + 2.0 * static_cast<double>(n),
                     [=, this](void* s) { k_.quantize_weights(one, w, q, scale, qt, qt_scale, s); });
            }
        }
    }

    // Columns of routed rows, of BF16 (alone, and beside the rows' form) and of quantized rows.
    void quantizing_columns() {
        for (const Row cols : {2048, 768}) {
            const FilledRows shape{copies, cols, experts};
            const Row blocks = column_blocks(copies, experts);
            const auto* counts = pool_.ints(std::vector<std::int32_t>(experts, static_cast<int>(copies / experts)));
            const Dst x = pool_.take(Type::bf16, copies * cols);
            const Fp8Rows low{take_bytes(copies * cols), pool_.floats(copies * cols / scale_block)};
            const Fp8Columns to{take_bytes(blocks * cols * scale_block), pool_.floats(blocks * cols)};
            const double each = static_cast<double>(copies * cols), scales = each * 4.0 / scale_block;
            const std::string name = fmt::format("quantize_columns {}x{} bf16", copies, cols);
            add(name, 3.0 * each + scales, [=, this](void* s) { k_.quantize_columns(shape, x, counts, {}, to, s); });
            add(name + " and rows", 4.0 * each + 2.0 * scales,
                [=, this](void* s) { k_.quantize_columns(shape, x, counts, low, to, s); });
            k_.quantize_rows(shape, x, counts, low.data, low.scale, nullptr);
            time("re" + name, 2.0 * each + 2.0 * scales,
                 [=, this](void* s) { k_.requantize_columns(shape, low, counts, to, s); });
        }
    }

    // Columns of copies of tokens in E4M3.
    void permuting_columns() {
        constexpr Row cols = 2048;
        const PermuteShape shape{tokens, cols, top_k};
        const FilledRows rows{copies, cols, experts};
        std::vector<std::int32_t> places(copies);
        for (Row i = 0; i < copies; ++i) // Copy k of token t goes to the k-th eighth of the experts.
            places[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(i % top_k * tokens + i / top_k);
        const std::int32_t *const row_of = pool_.ints(places), *const counts = pool_.ints(std::vector<std::int32_t>(
                                                                   experts, static_cast<int>(copies / experts)));
        auto* const token_of = static_cast<std::int32_t*>(pool_.take(Type::f32, copies).data);
        const Fp8Rows low{take_bytes(tokens * cols), pool_.floats(tokens * cols / scale_block)};
        const Fp8Columns to = take_columns(cols);
        k_.quantize_rows({tokens, cols, 0}, pool_.take(Type::bf16, tokens * cols), nullptr, low.data, low.scale,
                         nullptr);
        const double each = static_cast<double>(copies * cols) * (1.0 + 4.0 / scale_block), read = each / top_k;
        time(fmt::format("permute_columns {}x{}", copies, cols), read + each,
             [=, this](void* s) { k_.permute_columns(shape, rows, low, row_of, counts, token_of, to, s); });
    }

    // Operands of fp8-tensor, in bytes and with what they stand for, and of emulated precisions: routed rows in both
    // forms, gradients of NVFP4 with all that its recipe has.
    void rounding() {
        for (const Row cols : {2048, 768}) {
            RoundShape shape;
            shape.rows = copies, shape.cols = cols, shape.groups = experts, shape.batch = 1;
            const auto* counts = pool_.ints(std::vector<std::int32_t>(experts, static_cast<int>(copies / experts)));
            const auto *const positions = pool_.ints(std::vector<std::int32_t>(1, 0)), *const noise =
                                                                                           pool_.ints({1, 2, 3});
            const Dst x = pool_.take(Type::bf16, copies * cols), row = pool_.take(Type::bf16, copies * cols),
                      column = pool_.take(Type::bf16, copies * cols);
            float* const largest = pool_.floats(2);
            const double each = 2.0 * static_cast<double>(copies * cols); // bytes of an operand
            const auto of = [&](const char* name, double bytes, Dst by_column, bool rows = true) {
                const Dst by_row = rows ? row : Dst{};
                time(fmt::format("round_operand {} {}x{}", name, copies, cols), bytes, [=, this](void* s) {
                    k_.round_operand(shape, x, counts, positions, noise, largest, by_row, by_column, s);
                });
            };
            of("mxfp8", 3.0 * each, column);
            shape.format = RoundFormat::e4m3;
            of("e4m3", 3.0 * each, {});
            shape.window = pool_.floats(1);
            of("e4m3 delayed", 2.0 * each, {});
            shape.codes = {take_bytes(copies * cols), pool_.floats(copies * cols / scale_block)};
            of("e4m3 delayed bytes", 1.5 * each, {}, false);
            shape.format = RoundFormat::e5m2;
            of("e5m2 delayed bytes and values", 2.5 * each, {});
            shape.window = nullptr;
            of("e5m2 bytes", 2.5 * each, {}, false);
            shape.codes = {};
            shape.format = RoundFormat::nvfp4, shape.transform = true;
            of("nvfp4", 4.0 * each, column);
            shape.stochastic = true;
            of("nvfp4 stochastic", 4.0 * each, column);
        }
    }

    // Activations of routed rows that leave E4M3: forward in place of BF16, backward beside it and with y again.
    void quantizing_activations() {
        ActivationShape shape;
        shape.rows = copies, shape.ffn = 768, shape.groups = experts;
        const auto each = static_cast<double>(copies * shape.ffn);
        const Dst x = pool_.take(Type::bf16, 2 * copies * shape.ffn),
                  dx = pool_.take(Type::bf16, 2 * copies * shape.ffn), y = pool_.take(Type::bf16, copies * shape.ffn),
                  dy = pool_.take(Type::bf16, copies * shape.ffn);
        const Fp8Rows q{take_bytes(2 * copies * shape.ffn), pool_.floats(copies * 12)};
        const float* const p = pool_.floats(copies);
        float* const dp = pool_.floats(copies);
        const std::int32_t* const counts =
            pool_.ints(std::vector<std::int32_t>(experts, static_cast<int>(copies / experts)));
        add(fmt::format("activation {}x768 routed bf16 to e4m3", copies), each * (4.0 + 1.0 + 4.0 / scale_block),
            [=, this](void* s) { k_.activation(shape, x, p, counts, {}, q, s); });
        add(fmt::format("activation_grad {}x768 routed bf16, e4m3 and y", copies),
            each * (12.0 + 2.0 + 8.0 / scale_block),
            [=, this](void* s) { k_.activation_grad(shape, dy, x, p, counts, dx, dp, y, q, s); });
        const Fp8Columns of_dx = take_columns(2 * shape.ffn), of_y = take_columns(shape.ffn);
        time(fmt::format("activation_grad_columns {}x768 routed bf16", copies), each * (11.0 + 20.0 / scale_block),
             [=, this](void* s) { k_.activation_grad_columns(shape, dy, x, p, counts, dp, q, of_dx, of_y, s); });
    }
};

} // namespace

std::vector<Moved> bandwidth_of_quantization(const std::string& part) { return Cases(part).run(); }

} // namespace moe::test
