// The CUDA back end's table, and the question whether this machine can run it.
#include "kernels/cuda/cuda_kernels.hpp"

#include "kernels/cuda/check.hpp"
#include "kernels/cuda/families.hpp"
#include "kernels/cuda/scratch.hpp"

namespace moe {
namespace {

__global__ void probe() {}

} // namespace

bool cuda_supported(std::string& why) {
    why.clear();
    int devices = 0, device = 0, major = 0, minor = 0;
    cudaError_t status = cudaGetDeviceCount(&devices);
    if (status == cudaSuccess && devices == 0) status = cudaErrorNoDevice;
    if (status == cudaSuccess) status = cudaGetDevice(&device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (status != cudaSuccess) {
        why = std::string("no CUDA device: ") + cudaGetErrorString(status);
        cudaGetLastError(); // The next launch's check must not find this failure.
        return false;
    }
    // The kernels are compiled for single architectures: whether the device's is among them, the runtime knows.
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, probe) != cudaSuccess) {
        why = "the CUDA kernels are not compiled for this device's compute capability " + std::to_string(major) + "." +
              std::to_string(minor) + " (build option gpu_archs)";
        cudaGetLastError();
    }
    return why.empty();
}

const Kernels* cuda_kernels() {
    static const Kernels table = [] {
        Kernels t{};
        t.name = "cuda";
        cuda::add_activation(t);
        cuda::add_activation_columns(t);
        cuda::add_attention(t);
        cuda::add_attention_cached(t);
        cuda::add_attention_grad(t);
        cuda::add_tensor_attention(t);
        cuda::add_tensor_attention_grad(t);
        cuda::add_library_attention(t);
        cuda::add_largest_logits(t, false);
        cuda::add_balance(t);
        cuda::add_bias(t);
        cuda::add_elementwise(t);
        cuda::add_drop(t);
        cuda::add_short_conv(t);
        cuda::add_gated_norm(t);
        cuda::add_state_cached(t);
        cuda::add_delta_rule(t);
        cuda::add_deviate(t);
        cuda::add_domains(t);
        cuda::add_embedding(t);
        cuda::add_expert_scale(t);
        cuda::add_gemm(t);
        cuda::add_layer_norm(t);
        cuda::add_loss(t);
        cuda::add_muon(t);
        cuda::add_norm(t);
        cuda::add_optimizer(t);
        cuda::add_permute(t);
        cuda::add_places(t);
        cuda::add_quantize(t);
        cuda::add_quantize_columns(t);
        cuda::add_requantize_columns(t);
        cuda::add_rope(t);
        cuda::add_mla_rope(t);
        cuda::add_round(t);
        cuda::add_router(t);
        cuda::add_scale(t);
        cuda::add_scaled_gemm(t);
        cuda::add_scaled_wgrad(t);
        cuda::add_sinkhorn(t);
        cuda::add_slots(t);
        cuda::add_ssd(t);
        cuda::add_sort(t);
        cuda::add_sparse(t);
        cuda::add_value_norm(t);
        return t;
    }();
    std::string why;
    static const bool supported = cuda_supported(why) && !cuda_gemm_library().empty() &&
                                  !cuda_attention_library().empty(); // The library is opened before any capture.
    return supported ? &table : nullptr;
}

void cuda_forget_stream(void* stream) {
    cuda::forget_attention_stream(stream);
    cuda::forget_gemm_stream(stream);
    cuda::forget_scratch(static_cast<cudaStream_t>(stream));
}

const Kernels* cuda_plain_kernels() {
    if (cuda_kernels() == nullptr) return nullptr;
    static const Kernels table = [] {
        Kernels plain = *cuda_kernels();
        plain.name = "cuda, plain";
        cuda::add_attention(plain);
        cuda::add_largest_logits(plain, true);
        cuda::add_attention_grad(plain);
        cuda::add_plain_gemm(plain);
        cuda::add_plain_scaled_gemm(plain);
        cuda::add_plain_scaled_wgrad(plain);
        return plain;
    }();
    return &table;
}

} // namespace moe
