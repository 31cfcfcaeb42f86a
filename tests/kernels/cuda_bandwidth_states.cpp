// Times the memory-bound kernels of layers with a state: short convolutions and gated norms.
#include "tests/kernels/cuda_bandwidth_cases.hpp"

namespace moe::test {
namespace {

class Cases : BandwidthCases {
public:
    using BandwidthCases::BandwidthCases;
    std::vector<Moved> run() {
        StateShape gated_delta{16384, 1, 16, 32, 128, 128, 4}, mamba{16384, 1, 8, 64, 128, 64, 4};
        mamba.rule = StateRule::ssd;
        layer("Qwen3-Next", gated_delta);
        layer("Nemotron-3-Nano", mamba);
        return std::move(moved_);
    }

private:
    void layer(const std::string& name, const StateShape& s) {
        const Type type = Type::bf16;
        const double convolved = of(type, static_cast<double>(s.rows * s.convolved())),
                     values = of(type, static_cast<double>(s.rows * s.values()));
        const auto projected = [&] { return pool_.take(type, s.rows * s.projected()); };
        const auto normed = [&] { return pool_.take(type, s.rows * s.values()); };
        const bool biased = s.rule == StateRule::ssd;
        const Dst p = projected(), dp = projected(), c = pool_.take(type, s.rows * s.convolved()),
                  w = pool_.take(type, s.convolved() * s.kernel),
                  bias = biased ? pool_.take(type, s.convolved()) : Dst{};
        float *const dw = pool_.floats(s.convolved() * s.kernel), *const dbias =
                                                                      biased ? pool_.floats(s.convolved()) : nullptr;
        add("short_conv " + name, 2 * convolved, [=, this](void* stream) { k_.short_conv(s, p, w, bias, c, stream); });
        time("short_conv_grad " + name, 3 * convolved,
             [=, this](void* stream) { k_.short_conv_grad(s, c, p, w, bias, dp, dw, dbias, stream); });
        const Dst z = projected(), dz = projected(), o = normed(), y = normed(), dout = normed(),
                  weight = pool_.take(type, s.values());
        float* const dweight = pool_.floats(s.values());
        add("gated_norm " + name, 3 * values, [=, this](void* stream) { k_.gated_norm(s, o, z, weight, y, stream); });
        time("gated_norm_grad " + name, 5 * values,
             [=, this](void* stream) { k_.gated_norm_grad(s, y, o, z, weight, dout, dz, dweight, stream); });
    }
};

} // namespace

std::vector<Moved> bandwidth_of_states(const std::string& part) { return Cases(part).run(); }

} // namespace moe::test
