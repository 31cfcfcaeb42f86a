// Every plan gives the loss, the gradients and the trained weights of the one-rank plan.
#include "planner/base/error.hpp"
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>

using namespace moe;

TEST_CASE("parity: GQA with QK-norm and a softmax router") {
    check_plans("qwen3",
                {
                    {{"ep", "8"}},
                    {{"ep", "4"}},
                    {},
                    {{"tp", "4"}, {"ep", "8"}},
                    {{"tp", "4"}, {"ep", "2"}, {"etp", "4"}},
                    {{"tp", "2"}, {"ep", "4"}, {"etp", "2"}, {"mbs", "2"}},
                    {{"tp", "2"}, {"ep", "1"}, {"etp", "2"}},
                    {{"tp", "4"}, {"ep", "1"}, {"etp", "8"}},
                    {{"pp", "2"}, {"ep", "4"}},
                    {{"pp", "4"}, {"tp", "2"}, {"ep", "2"}},
                    {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "2"}},
                    {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"tp", "2"}, {"ep", "4"}, {"mbs", "2"}},
                    {{"rank_order", "ep-dp-tp-cp-pp"}, {"tp", "2"}, {"ep", "4"}},
                    {{"rank_order", "ep-dp-tp-cp-pp"}, {"tp", "2"}, {"ep", "2"}, {"etp", "2"}},
                    {{"pp", "4"}, {"schedule", "zero-bubble"}, {"ep", "2"}},
                    {{"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}, {"tp", "2"}, {"ep", "4"}},
                    {{"pp", "2"}, {"vpp", "2"}, {"schedule", "dualpipe-v"}, {"ep", "2"}, {"etp", "2"}, {"tp", "2"}},
                });
}

TEST_CASE("parity: GQA with biases and a gated shared expert") {
    check_plans("qwen2", {
                             {{"ep", "8"}, {"mbs", "1"}},
                             {{"tp", "8"}, {"ep", "2"}},
                             {{"tp", "2"}, {"ep", "2"}, {"etp", "2"}},
                             {{"tp", "2"}, {"pp", "2"}, {"ep", "2"}, {"mbs", "4"}},
                             {{"pp", "4"}, {"ep", "2"}},
                             {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "4"}},
                         });
}

TEST_CASE("parity: MLA with a query latent, sigmoid group-limited routing, a dense first layer") {
    check_plans("deepseek3",
                {
                    {{"ep", "8"}},
                    {{"tp", "2"}, {"ep", "4"}},
                    {{"tp", "8"}, {"ep", "8"}},
                    {{"tp", "4"}, {"ep", "4"}, {"etp", "2"}},
                    {{"pp", "2"}, {"tp", "2"}, {"ep", "4"}},
                    {{"pp", "4"}, {"ep", "2"}, {"mbs", "2"}},
                    {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"tp", "2"}, {"ep", "2"}, {"etp", "2"}},
                    {{"layout", "Ett|t|t|L"}, {"pp", "4"}, {"ep", "2"}},
                    {{"pp", "4"}, {"tp", "2"}, {"schedule", "zero-bubble"}, {"recompute", "full"}, {"ep", "2"}},
                    {{"pp", "4"}, {"tp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}, {"layout", "Et|t||t|t|||L"}},
                    {{"pp", "4"}, {"tp", "2"}, {"vpp", "2"}, {"schedule", "dualpipe-v"}, {"layout", "Et|t||t|t|||L"}},
                });
}

TEST_CASE("parity: MLA without a query latent, group-limited softmax routing") {
    check_plans("deepseek2", {
                                 {{"ep", "8"}},
                                 {{"tp", "2"}, {"ep", "8"}, {"mbs", "2"}},
                                 {{"tp", "4"}, {"pp", "2"}, {"ep", "2"}, {"etp", "2"}},
                                 {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "4"}},
                             });
}

TEST_CASE("parity: routing weights normalised after the choice") {
    check_plans("mixtral", {
                               {{"ep", "4"}},
                               {{"tp", "2"}, {"ep", "4"}, {"pp", "2"}},
                               {{"tp", "4"}, {"etp", "4"}, {"mbs", "2"}},
                           });
}

TEST_CASE("parity: tokens gathered by all ranks that share the experts") {
    const auto gathered = [](Fields fields) {
        fields.emplace_back("dispatcher", "allgather");
        return fields;
    };
    check_plans("qwen3", {gathered({{"ep", "8"}}), gathered({{"tp", "2"}, {"ep", "2"}, {"etp", "2"}, {"mbs", "2"}}),
                          gathered({{"pp", "2"}, {"ep", "4"}, {"recompute", "moe"}})});
    check_plans("deepseek3", {gathered({{"tp", "4"}, {"ep", "2"}, {"etp", "4"}})}, {{"aux_loss", "0.1"}});
    check_plans("gptoss", {gathered({{"tp", "2"}, {"ep", "4"}, {"mbs", "2"}})});
}

TEST_CASE("parity: tokens to ranks and back as one op") {
    const auto direct = [](Fields fields) {
        fields.emplace_back("dispatcher", "hybridep");
        return fields;
    };
    check_plans("qwen3",
                {direct({{"ep", "8"}}), direct({{"tp", "2"}, {"ep", "4"}, {"etp", "1"}, {"mbs", "2"}}),
                 direct({{"pp", "2"}, {"ep", "4"}, {"recompute", "moe"}}),
                 direct({{"pp", "2"}, {"ep", "4"}, {"delay_wgrad", "on"}, {"memory_efficient_permutation", "off"}})});
    check_plans("deepseek3", {direct({{"ep", "4"}, {"pp", "2"}, {"ep_overlap", "on"}})}, {{"aux_loss", "0.1"}});
    check_plans("gptoss", {direct({{"tp", "2"}, {"ep", "8"}, {"etp", "1"}})});
    check_plans("mixtral", {direct({{"tp", "2"}, {"ep", "8"}, {"etp", "1"}})});
}

TEST_CASE("parity: tokens to the domains that have their experts, and on to the ranks of a domain") {
    const auto levels = [](const char* domain, Fields fields) {
        fields.insert(fields.begin(), {{"dispatcher", "hybridep"}, {"domain", domain}});
        return fields;
    };
    check_plans("qwen3", {levels("2", {{"ep", "8"}}), levels("1", {{"ep", "4"}, {"tp", "2"}, {"mbs", "2"}}),
                          levels("4", {{"ep", "8"}, {"tp", "2"}, {"recompute", "moe"}}),
                          levels("2", {{"pp", "2"}, {"ep", "4"}, {"delay_wgrad", "on"}}),
                          levels("2", {{"ep", "8"}, {"ep_overlap", "on"}, {"mbs", "1"}}),
                          levels("4", {{"rank_order", "tp-cp-dp-ep-pp"}, {"ep", "4"}}), // neighbours are 2 apart
                          levels("1", {{"ep", "4"}, {"memory_efficient_permutation", "off"}, {"ep_overlap", "on"}}),
                          levels("1", {{"ep", "8"}, {"delay_wgrad", "on"}, {"recompute", "full"}})});
    check_plans("deepseek3", {levels("2", {{"ep", "4"}, {"pp", "2"}, {"ep_overlap", "on"}})}, {{"aux_loss", "0.1"}});
    check_plans("gptoss", {levels("4", {{"tp", "2"}, {"ep", "8"}})});
    check_plans("mixtral", {levels("2", {{"ep", "8"}, {"tp", "2"}})},
                {{"expert_capacity", "1"}, {"drop_scope", "full_sequence"}});
    check_plans("llama4", {levels("2", {{"ep", "4"}, {"tp", "2"}})}); // routing weights on what experts read
}

TEST_CASE("parity: windows, sinks, biases and clamped gates") {
    check_plans("gptoss", {
                              {{"ep", "8"}, {"tp", "4"}},
                              {{"tp", "2"}, {"ep", "4"}, {"mbs", "2"}},
                              {{"tp", "2"}, {"pp", "2"}, {"ep", "2"}, {"mbs", "4"}},
                              {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "4"}},
                              // Every member of ETP adds its share of the biases behind FC2.
                              {{"tp", "2"}, {"ep", "4"}, {"etp", "2"}},
                              {{"tp", "4"}, {"ep", "2"}, {"etp", "4"}, {"recompute", "moe"}},
                              {{"tp", "2"}, {"ep", "1"}, {"etp", "8"}, {"dispatcher", "allgather"}},
                          });
}

TEST_CASE("parity: factors, gates, norms of all heads, LayerNorm, rotations by layer, chunks") {
    // Each in turn; the random plans take the others.
    const std::vector<Fields> plans{{{"tp", "2"}, {"cp", "2"}, {"pp", "2"}, {"ep", "2"}, {"recompute", "full"}},
                                    {{"cp", "4"}, {"cp_comm", "alltoall"}, {"ep", "2"}, {"etp", "2"}},
                                    {{"tp", "4"}, {"ep", "8"}}};
    const std::vector<std::string> models{"granite", "olmoe", "afmoe", "laguna",   "mimo",
                                          "hunyuan", "ernie", "dbrx",  "mistral4", "llama4"};
    for (std::size_t i = 0; i < models.size(); ++i) check_plans(models[i], {plans[i % plans.size()]});
    check_plans("nemotron", {{{"tp", "4"}}});
    check_plans("step", {plans[0], plans[1], plans[2]});
    check_plans("phimoe", {plans[0], {{"tp", "4"}, {"ep", "8"}, {"dispatcher", "hybridep"}}});
    check_plans("erniebias", {plans[0], plans[2]});
    check_plans("qwen3.5", {{{"tp", "2"}, {"cp", "4"}, {"recompute", "core_attn"}}});
    check_plans("gpt", {{{"tp", "2"}, {"cp", "2"}, {"pp", "2"}}});
}

TEST_CASE("parity: gated delta nets") {
    check_plans("qwen3next", {
                                 {{"tp", "4"}, {"ep", "8"}, {"mbs", "2"}},
                                 {{"cp", "2"}, {"cp_comm", "alltoall"}, {"tp", "2"}, {"ep", "4"}},
                                 {{"cp", "8"}, {"ep", "2"}, {"etp", "2"}},
                                 {{"pp", "2"}, {"cp", "2"}, {"ep", "2"}, {"recompute", "full"}},
                                 {{"pp", "4"}, {"schedule", "zero-bubble"}, {"tp", "2"}},
                                 {{"tp", "2"}, {"ep", "2"}, {"offload", "core_attn"}},
                             });
    check_plans("qwen3next", {{{"cp", "2"}, {"tp", "2"}, {"mbs", "2"}}}, {{"documents", "mask"}});
}

TEST_CASE("parity: Mamba-2, layers of one part each, experts of a latent width") {
    check_plans("nemotronh", {
                                 {{"tp", "4"}, {"mbs", "2"}},
                                 {{"cp", "2"}, {"cp_comm", "alltoall"}, {"tp", "2"}},
                                 {{"pp", "4"}, {"schedule", "zero-bubble"}, {"tp", "2"}},
                                 {{"cp", "8"}, {"recompute", "core_attn"}},
                             });
    check_plans("nemotron3", {
                                 {{"tp", "4"}, {"ep", "8"}, {"mbs", "2"}},
                                 {{"cp", "8"}, {"ep", "2"}, {"etp", "2"}},
                                 {{"pp", "2"}, {"cp", "2"}, {"ep", "2"}, {"recompute", "full"}},
                                 {{"pp", "2"}, {"ep", "4"}, {"dispatcher", "hybridep"}, {"recompute", "moe"}},
                                 {{"tp", "2"}, {"ep", "2"}, {"offload", "core_attn"}, {"dispatcher", "allgather"}},
                                 // The op that reads a layer's input last writes that of the next.
                                 {{"ep", "2"}, {"offload", "attn_norm"}},
                             });
    for (const char* model : {"nemotronh", "nemotron3"})
        check_plans(model, {{{"cp", "2"}, {"tp", "2"}, {"mbs", "2"}}}, {{"documents", "mask"}});
}

TEST_CASE("parity: Mamba-2 beside experts, with Granite's factors") {
    check_plans("granite4", {
                                {{"tp", "4"}, {"ep", "8"}, {"mbs", "2"}},
                                {{"cp", "2"}, {"tp", "2"}, {"ep", "2"}, {"etp", "2"}},
                                {{"pp", "2"}, {"cp", "2"}, {"ep", "2"}, {"recompute", "full"}},
                                {{"pp", "4"}, {"schedule", "zero-bubble"}, {"tp", "2"}},
                                {{"pp", "2"}, {"ep", "4"}, {"dispatcher", "hybridep"}, {"recompute", "moe"}},
                            });
    check_plans("granite4", {{{"cp", "2"}, {"tp", "2"}, {"mbs", "2"}}}, {{"documents", "mask"}});
}

TEST_CASE("parity: norms of values and of branches, keys as values, capped logits, scaled layers") {
    check_plans("gemma4",
                {
                    {{"tp", "4"}, {"ep", "8"}, {"mbs", "2"}},
                    {{"tp", "2"}, {"cp", "2"}, {"ep", "2"}, {"etp", "2"}},
                    {{"cp", "4"}, {"cp_comm", "alltoall"}, {"ep", "2"}},
                    {{"pp", "2"}, {"cp", "2"}, {"ep", "2"}, {"recompute", "full"}},
                    {{"pp", "4"}, {"schedule", "zero-bubble"}, {"tp", "2"}},
                    {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "4"}, {"recompute", "layernorm"}},
                    {{"tp", "2"}, {"ep", "2"}, {"offload", "core_attn+attn_norm"}, {"dispatcher", "allgather"}},
                    {{"pp", "2"}, {"ep", "4"}, {"dispatcher", "hybridep"}, {"memory_efficient_permutation", "off"}},
                });
    check_plans("gemma4", {{{"ep", "4"}, {"tp", "2"}}}, {{"documents", "mask"}, {"aux_loss", "0.1"}});
}

TEST_CASE("parity: keys that an indexer picks, and its loss") {
    check_plans("deepseek32", {
                                  {{"ep", "8"}},
                                  {{"tp", "4"}, {"ep", "4"}, {"mbs", "2"}},
                                  {{"cp", "4"}, {"ep", "2"}, {"tp", "2"}},
                                  {{"cp", "8"}, {"recompute", "core_attn+mla_up_proj"}},
                                  {{"pp", "4"}, {"schedule", "zero-bubble"}, {"tp", "2"}, {"recompute", "full"}},
                                  {{"pp", "2"}, {"ep", "4"}, {"delay_wgrad", "on"}, {"offload", "core_attn"}},
                                  {{"tp", "2"}, {"cp", "2"}, {"fsdp", "on"}, {"ep", "2"}, {"tp_overlap", "on"}},
                              });
    check_plans("glm5", {
                            {{"tp", "2"}, {"cp", "2"}, {"ep", "8"}},
                            {{"pp", "2"}, {"ep", "2"}, {"recompute", "full"}},
                            {{"cp", "2"}, {"fsdp", "on"}, {"recompute", "core_attn"}},
                        });
    check_plans("deepseek32", {{{"cp", "2"}, {"tp", "2"}, {"mbs", "2"}}, {{"pp", "2"}, {"tp", "4"}}},
                {{"indexer_stage", "dense_loss"}, {"indexer_loss", "0.5"}});
    for (const char* model : {"deepseek32", "glm5"})
        check_plans(model, {{{"cp", "2"}, {"tp", "2"}, {"mbs", "2"}}}, {{"documents", "mask"}});
}

TEST_CASE("parity: routing weights behind FC2") {
    const Fields late{{"memory_efficient_permutation", "off"}};
    check_plans("qwen3", {{{"ep", "8"}}, {{"tp", "2"}, {"ep", "2"}, {"etp", "2"}}, {{"recompute", "moe"}, {"ep", "4"}}},
                late);
    check_plans("deepseek3",
                {{{"pp", "4"}, {"schedule", "zero-bubble"}, {"ep", "2"}},
                 {{"tp", "4"}, {"ep", "2"}, {"etp", "4"}, {"dispatcher", "allgather"}}},
                late);
    check_plans("gptoss", {{{"tp", "2"}, {"ep", "4"}, {"etp", "2"}}, {{"pp", "2"}, {"ep", "4"}, {"delay_wgrad", "on"}}},
                late);
}

TEST_CASE("parity: multi-token prediction") {
    check_plans("deepseek3-mtp", {
                                     {{"ep", "8"}},
                                     {{"tp", "4"}, {"ep", "2"}, {"etp", "2"}, {"mbs", "2"}},
                                     {{"tp", "2"}, {"ep", "4"}, {"recompute", "full"}, {"mbs", "2"}},
                                     {{"cp", "2"}, {"tp", "2"}, {"ep", "2"}},
                                     {{"pp", "2"}, {"ep", "4"}},
                                     {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"tp", "2"}},
                                     {{"pp", "4"}, {"tp", "2"}, {"mbs", "2"}},
                                 });
}

TEST_CASE("parity: multi-token prediction on any stage behind the layers") {
    check_plans("deepseek3-mtp",
                {
                    {{"pp", "2"}, {"ep", "4"}, {"layout", "Ettttmm|L"}, {"offload", "mlp_norm"}},
                    {{"pp", "4"}, {"tp", "2"}, {"layout", "Ett|tt|mm|L"}},
                    {{"pp", "4"}, {"ep", "2"}, {"layout", "Ettttmm|||L"}, {"recompute", "full"}},
                    {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"layout", "Ettt|t|mm|L"}, {"tp", "2"}},
                    {{"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}, {"layout", "Et|tttmm||L"}, {"tp", "2"}},
                    {{"pp", "2"}, {"vpp", "2"}, {"schedule", "dualpipe-v"}, {"layout", "Et|ttt|mm|L"}, {"tp", "2"}},
                    {{"pp", "4"}, {"schedule", "zero-bubble"}, {"layout", "Ett|tt|mm|L"}},
                });
}

TEST_CASE("parity: products beside their ring or reduction over TP") {
    const auto overlapped = [](Fields fields) {
        fields.emplace_back("tp_overlap", "on");
        return fields;
    };
    check_plans("qwen3", {overlapped({{"tp", "2"}, {"ep", "4"}}), overlapped({{"tp", "4"}, {"mbs", "2"}}),
                          overlapped({{"tp", "4"}, {"pp", "2"}, {"recompute", "layernorm+moe_act"}})});
    check_plans("qwen2", {overlapped({{"tp", "8"}, {"ep", "2"}})});
    check_plans("deepseek3", {overlapped({{"tp", "8"}, {"ep", "8"}, {"recompute", "full"}}),
                              overlapped({{"tp", "2"}, {"pp", "4"}, {"schedule", "zero-bubble"}})});
    check_plans("gptoss", {overlapped({{"tp", "4"}, {"cp", "2"}}), overlapped({{"tp", "4"}, {"recompute", "full"}})});
    check_plans("llama", {overlapped({{"tp", "4"}, {"mbs", "2"}, {"recompute", "mlp"}})});
}

TEST_CASE("parity: losses that balance sequences or the global batch, and the selection bias") {
    const std::vector<Fields> plans{
        {{"ep", "8"}},
        {{"tp", "4"}, {"ep", "2"}, {"mbs", "2"}},
        {{"tp", "2"}, {"ep", "4"}, {"pp", "2"}, {"mbs", "4"}, {"recompute", "moe"}},
        {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "2"}},
    };
    for (const char* kind : {"seq_aux_loss", "global_aux_loss"}) {
        check_plans("qwen3", plans, {{"load_balancing", kind}, {"aux_loss", "0.1"}, {"z_loss", "0.01"}});
        check_plans("deepseek3", plans, {{"load_balancing", kind}, {"aux_loss", "0.1"}, {"bias_update", "0.01"}});
    }
    check_plans("mixtral", {plans[1]}, {{"aux_loss", "0.1"}});
}

TEST_CASE("parity: the noise on routers' inputs is that of the token, under any plan") {
    const std::vector<Fields> plans{
        {{"ep", "8"}},
        {{"tp", "4"}, {"ep", "2"}, {"mbs", "2"}, {"recompute", "moe"}},
        {{"tp", "2"}, {"cp", "2"}, {"ep", "4"}, {"pp", "2"}, {"mbs", "4"}, {"recompute", "full"}},
        {{"cp", "4"}, {"cp_comm", "alltoall"}, {"ep", "2"}, {"mbs", "2"}, {"recompute", "moe"}},
        {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "2"}, {"delay_wgrad", "on"}},
        {{"pp", "4"}, {"schedule", "zero-bubble"}, {"ep", "2"}},
        {{"fsdp", "on"}, {"ep", "4"}, {"rank_order", "ep-dp-tp-cp-pp"}},
        {{"ep", "8"}, {"dispatcher", "allgather"}, {"capacity", "1"}},
        {{"ep", "4"}, {"ep_overlap", "on"}, {"delay_wgrad", "on"}},
    };
    check_plans("qwen3", plans, {{"input_jitter", "0.3"}});
    check_plans("deepseek3-mtp", {plans[0], plans[1], plans[2]}, {{"input_jitter", "0.3"}, {"bias_update", "0.01"}});
    check_plans("gptoss", {plans[2]}, {{"input_jitter", "0.3"}, {"documents", "mask"}, {"aux_loss", "0.1"}});
}

TEST_CASE("parity: Sinkhorn's choice under plans whose ranks see the same micro-batches") {
    const std::vector<Fields> plans{
        {{"ep", "8"}},
        {{"ep", "4"}, {"dispatcher", "allgather"}, {"recompute", "moe"}},
        {{"pp", "2"}, {"ep", "4"}, {"recompute", "full"}},
        {{"pp", "4"}, {"schedule", "zero-bubble"}, {"ep", "2"}, {"etp", "1"}},
        {{"fsdp", "on"}, {"ep", "2"}, {"etp", "2"}},
    };
    const auto common = [](const char* mbs) { return Fields{{"load_balancing", "sinkhorn"}, {"mbs", mbs}}; };
    check_plans("qwen2", plans, common("1"));
    check_plans("qwen2", {{{"pp", "4"}, {"ep", "2"}}}, common("2"));
    Fields noisy = common("1");
    noisy.emplace_back("input_jitter", "0.3");
    noisy.emplace_back("z_loss", "0.01");
    check_plans("qwen2", {plans[0], plans[2]}, noisy);
}

TEST_CASE("parity: a forced choice is the same on every rank") {
    check_plans("qwen2", {{{"tp", "4"}, {"ep", "2"}, {"mbs", "2"}}, {{"pp", "2"}, {"ep", "4"}}},
                {{"balance", "forced"}});
}

TEST_CASE("parity: dense") {
    check_plans("llama", {
                             {},
                             {{"tp", "4"}},
                             {{"tp", "2"}, {"pp", "2"}},
                             {{"tp", "2"}, {"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}},
                             {{"pp", "4"}, {"mbs", "2"}},
                         });
}
