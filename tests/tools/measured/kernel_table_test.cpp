// Names of kernels, as profiles show them, and the op kinds that the tables of profiles/kernels give them.
#include "planner/base/error.hpp"
#include "tests/support/folder.hpp"
#include "tests/tools/measured/refused.hpp"
#include "tools/measured/kernel_table.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <fstream>

using namespace moe;
using namespace moe::tools;

namespace {

// The first kind of the name's rule: the likeliest.
std::string kind_of(const KernelTable& table, const std::string& kernel, const std::string& collective = "") {
    const auto rule = table.rule_of({kernel, collective});
    return rule ? program::to_string(table.rules[*rule].kinds.front()) : "-";
}

void check_table_refused(const std::string& json, const std::string& words) {
    const Folder folder;
    std::ofstream(folder / "mine.json") << json;
    check_refused([&] { load_kernel_table(folder / "mine.json"); }, words);
}

} // namespace

TEST_CASE("kernel table: patterns") {
    CHECK(fits("gemm", "cutlass_gemm_kernel"));
    CHECK(fits("nccl*AllGather", "ncclDevKernel_AllGather_RING_LL"));
    CHECK_FALSE(fits("AllGather*nccl", "ncclDevKernel_AllGather_RING_LL"));
    CHECK(fits("^nccl", "ncclDevKernel"));
    CHECK_FALSE(fits("^nccl", "my_ncclDevKernel"));
    CHECK(fits("a*a", "aa"));
    CHECK_FALSE(fits("a*a", "a"));
    CHECK(fits("a*", "a"));
    CHECK(fits("*a", "ba"));
    CHECK_FALSE(fits("A", "a"));
}

TEST_CASE("kernel table: what people see in profiles") {
    const KernelTable torch = load_kernel_table("pytorch"), megatron = load_kernel_table("megatron");
    for (const KernelTable* table : {&torch, &megatron}) {
        CHECK(kind_of(*table, "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT") == "gemm");
        CHECK(kind_of(*table, "void cublasLt::splitKreduce_kernel<32, 16, int, float>") == "gemm");
        CHECK(
            kind_of(*table,
                    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<"
                    "cute::tuple<int, int, int>>>>") == "grouped_gemm");
        CHECK(kind_of(*table, "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>") == "attention");
        CHECK(kind_of(*table, "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<>") ==
              "attention_grad");
        CHECK(kind_of(*table, "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7") ==
              "attention_grad");
        CHECK(kind_of(*table, "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7") == "attention");
        CHECK(kind_of(*table, "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == "all_gather");
        CHECK(kind_of(*table, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL") == "reduce_scatter");
        CHECK(kind_of(*table, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL") == "all_reduce");
        CHECK(kind_of(*table, "ncclDevKernel_SendRecv", "all_to_allv") == "all_to_all_rows");
        CHECK(kind_of(*table, "ncclDevKernel_SendRecv", "send") == "send");
        CHECK(kind_of(*table, "ncclDevKernel_SendRecv", "recv") == "recv");
        CHECK(kind_of(*table, "void deep_ep::intranode::dispatch<8, 768>(int4*)") == "dispatch_tokens");
        CHECK(kind_of(*table, "void deep_ep::internode::combine<>(int4*)") == "combine_tokens");
        CHECK(kind_of(*table, "void deep_ep::intranode::notify_dispatch<8>(int const*)") == "permute_map");
        CHECK(kind_of(*table, "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)") == "permute_map");
        CHECK(kind_of(*table, "void deep_ep::elastic::hybrid_combine_impl<>(int*)") == "combine_tokens");
        CHECK(kind_of(*table, "void hybrid_ep::device_sync_kernel<8>(unsigned int*)") == "dispatch_tokens");
        CHECK(kind_of(*table, "Memcpy DtoH (Device -> Pinned)") == "copy_to_host");
        CHECK(kind_of(*table, "Memset (Device)") == "zero");
        CHECK(
            kind_of(*table,
                    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<..FusedAdamMathFunctor<float, 4>"
                    ">") == "adamw");
        // The names are those of cuDNN and PyTorch 2.11, not all of them demangled.
        CHECK(kind_of(*table,
                      "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13Gemm"
                      "UniversalINS5_17GroupProblemShapeIN4cute5tupleIJiiiEEEEE") == "grouped_gemm");
        CHECK(kind_of(*table, "void cudnn::fusion::fmha_reduce_head<true>(void const*, void*, unsigned int)") ==
              "attention_grad");
        CHECK(kind_of(*table,
                      "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<TensorListMetadata<1>, "
                      "at::native::LpNormFunctor<c10::BFloat16>>") == "sum_squares");
        CHECK(kind_of(*table, "nobody_knows_this_kernel") == "-");
    }
    // A SendRecv whose collective the profile does not tell may be any of them.
    const auto rule = torch.rule_of({"ncclDevKernel_SendRecv", ""});
    REQUIRE(rule);
    CHECK(torch.rules[*rule].kinds.size() == 5);

    // FSDP2's copies of shards run over many tensors, as the optimizer does.
    CHECK(kind_of(torch, "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, at::native::CopyFunctor<"
                         "c10::BFloat16, float, 2, 1, 1>, at::native::Copy<c10::BFloat16, float>>") == "copy_columns");

    CHECK(kind_of(megatron, "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<>") == "rmsnorm");
    CHECK(kind_of(megatron, "void transformer_engine::normalization::rmsnorm_bwd_general_kernel<>") == "rmsnorm_grad");
    CHECK(kind_of(megatron, "_permute_kernel") == "permute");
    CHECK(kind_of(megatron, "_unpermute_kernel") == "unpermute");
    CHECK(kind_of(megatron, "_sort_chunks_by_map_kernel") == "sort_rows");
    CHECK(kind_of(megatron,
                  "void transformer_engine::fused_router::fused_topk_with_score_function_forward_kernel<float>") ==
          "router");
    CHECK(kind_of(megatron, "void transformer_engine::dispatch::mxfp8::quantize_kernel::quantize_mxfp8_kernel<>") ==
          "quantize");
    CHECK(kind_of(torch, "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>") ==
          "rmsnorm");
    CHECK(kind_of(torch, "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>") == "router");
}

TEST_CASE("kernel table: every stack has one") {
    CHECK(kernel_table_of("bridge-26.08").name == "megatron");
    CHECK(kernel_table_of("mcore-2603.07685").name == "megatron");
    CHECK(kernel_table_of("torchtitan").name == "pytorch");
    CHECK(kernel_table_of("automodel").name == "pytorch");
    CHECK(kernel_table_of("moe-plan").name == "pytorch");
}

TEST_CASE("kernel table: a file of one's own stands before its base") {
    const Folder folder;
    std::ofstream(folder / "mine.json") << R"({"name": "mine", "base": "pytorch",
        "rules": {"my products": {"names": ["^my_", "nvjet*special"], "kinds": ["grouped_gemm"]}}})";
    const KernelTable table = load_kernel_table(folder / "mine.json");
    CHECK(table.name == "mine");
    CHECK(kind_of(table, "my_gemm") == "grouped_gemm");
    CHECK(kind_of(table, "nvjet_special_1") == "grouped_gemm");
    CHECK(kind_of(table, "nvjet_1") == "gemm");
}

TEST_CASE("kernel table: what is wrong in a file is named") {
    const auto with_rule = [](const std::string& rule) {
        return fmt::format(R"({{"name": "x", "rules": {{"a": {}}}}})", rule);
    };
    check_table_refused("[", "not valid JSON");
    check_table_refused(R"({"name": "x"})", "rules");
    check_table_refused(R"({"name": "x", "rule": {}})", "did you mean rules");
    check_table_refused(with_rule(R"({"names": ["a"], "kinds": ["gem"]})"), "unknown op kind 'gem': did you mean gemm");
    check_table_refused(with_rule(R"({"names": ["a"], "kinds": []})"), "kinds is empty");
    check_table_refused(with_rule(R"({"names": [], "kinds": ["gemm"]})"), "names is empty");
    check_table_refused(with_rule(R"({"names": ["*"], "kinds": ["gemm"]})"), "fits every kernel");
    check_table_refused(with_rule(R"({"names": ["a"], "kinds": ["gemm", "send"]})"), "communication");
    const Folder folder;
    std::ofstream(folder / "mine.json") << fmt::format(R"({{"name": "x", "base": "{}", "rules": {{}}}})",
                                                       folder / "mine.json");
    CHECK_THROWS_WITH_AS(load_kernel_table(folder / "mine.json"), doctest::Contains("on top of each other"), Error);
}
