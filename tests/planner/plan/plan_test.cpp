// Plans: every rule of check_plan, the round trip of plan.json, hand-edited files, and fields by name.
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/plan/plan.hpp"
#include "tests/planner/base/fault_of.hpp"

#include <doctest/doctest.h>

#include <functional>
#include <string>

namespace {

using Edit = std::function<void(moe::plan::Plan&)>;

// DeepSeek-V3 on 256 GB200 as NVIDIA publishes it: TP1 PP4 VPP4 EP64, MXFP8.
moe::plan::Plan sound() {
    static const auto model = std::make_shared<const moe::model::Model>(moe::families::load_model("DeepSeek-V3"));
    static const auto hardware =
        std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("gb200-nvl72"));
    moe::plan::Plan plan;
    plan.model = model;
    plan.hardware = hardware;
    plan.stack = "bridge-26.08";
    plan.seq = 4096;
    plan.gbs = 4096;
    plan.gpus = 256;
    plan.dp = plan.ep = 64;
    plan.pp = plan.vpp = 4;
    plan.schedule = moe::plan::ScheduleKind::interleaved;
    plan.precision = moe::machine::Precision::mxfp8;
    plan.dispatcher = moe::plan::Dispatcher::hybridep;
    plan.cuda_graph = moe::plan::CudaGraph::full;
    plan.recompute = moe::plan::recompute::mla_up_proj | moe::plan::recompute::moe_act;
    return plan;
}

moe::plan::Plan with_model(const char* name) {
    moe::plan::Plan plan = sound();
    plan.model = std::make_shared<const moe::model::Model>(moe::families::load_model(name));
    plan.recompute = 0;
    return plan;
}

std::string counter(const Edit& edit) {
    moe::plan::Plan plan = sound();
    edit(plan);
    const moe::plan::PlanFault found = moe::plan::check_plan(plan);
    CAPTURE(found.message);
    if (found) CHECK(found.message.size() > 10);
    return found.counter;
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
    const std::size_t at = text.find(from);
    REQUIRE(at != std::string::npos);
    return text.replace(at, from.size(), to);
}

std::string fault(const std::string& text) {
    return fault_of([&] { moe::plan::plan_from_json(text, "p.json"); });
}

} // namespace

TEST_CASE("the published plan is sound, and every broken axis is counted under its own reason") {
    CHECK(counter([](moe::plan::Plan&) {}).empty());
    CHECK(counter([](moe::plan::Plan& p) { p.seq = 0; }) == "range");
    CHECK(counter([](moe::plan::Plan& p) { p.tp = -1; }) == "range");
    CHECK(counter([](moe::plan::Plan& p) { p.gbs = std::int64_t{1} << 40; }) == "range");
    CHECK(counter([](moe::plan::Plan& p) { p.seq = 1 << 27, p.mbs = 4096; }) == "range");
    CHECK(counter([](moe::plan::Plan& p) { p.capacity = 0.5; }) == "range");
    CHECK(counter([](moe::plan::Plan& p) { p.capacity = -1.0; }) == "range");
    CHECK(counter([](moe::plan::Plan& p) { p.dp = 32; }) == "tp*cp*dp*pp != gpus");
    CHECK(counter([](moe::plan::Plan& p) { p.tp = p.cp = p.dp = p.pp = 1 << 22; }) == "tp*cp*dp*pp != gpus");
    CHECK(counter([](moe::plan::Plan& p) { p.edp = 2; }) == "etp*ep*edp*pp != gpus");
    CHECK(counter([](moe::plan::Plan& p) { p.gpus = 240, p.dp = p.ep = 60; }) == "experts % ep");
    CHECK(counter([](moe::plan::Plan& p) { p.gpus = 60, p.pp = 4, p.dp = 5, p.tp = 3, p.ep = 1, p.edp = 15; }) ==
          "heads % tp");
    CHECK(counter([](moe::plan::Plan& p) { p.gpus = 12, p.dp = 3, p.ep = 1, p.etp = 3; }) == "expert ffn % etp");
    CHECK(counter([](moe::plan::Plan& p) { p.mbs = 3; }) == "gbs % (dp*mbs)");
    CHECK(counter([](moe::plan::Plan& p) { p.gbs = 64 * 4096 * 2; }) == "micro-batches");         // of one rank
    CHECK(counter([](moe::plan::Plan& p) { p.gbs = 64 * 4096, p.vpp = 15; }) == "micro-batches"); // of all stages
    CHECK(counter([](moe::plan::Plan& p) { p.cp = 2, p.dp = 32, p.seq = 4094; }) == "seq % (2*cp)");
    CHECK(counter([](moe::plan::Plan& p) { p.tp = 2, p.dp = 32, p.seq = 4095; }) == "tokens % tp");
    CHECK(counter([](moe::plan::Plan& p) { p.gbs = 64 * 6; }) == "micro-batches % pp");
    CHECK(counter([](moe::plan::Plan& p) { p.vpp = 1; }) == "interleaved needs pp, vpp > 1");
    CHECK(counter([](moe::plan::Plan& p) { p.schedule = moe::plan::ScheduleKind::one_f_one_b; }) ==
          "vpp without interleaved");
    CHECK(counter([](moe::plan::Plan& p) { p.vpp = 16; }) == "pp*vpp > layers");
    CHECK(counter([](moe::plan::Plan& p) { p.layout = "Et|t|L"; }) == "layout");
    CHECK(counter([](moe::plan::Plan& p) { p.layout = "Et*4|(tttt|)*14tmL"; }).empty());
    CHECK(counter([](moe::plan::Plan& p) { p.rank_order = "tp-cp"; }) == "rank_order");
    CHECK(counter([](moe::plan::Plan& p) { p.ep = 1, p.ep_overlap = true, p.edp = 64; }) == "ep_overlap");
    CHECK(counter([](moe::plan::Plan& p) { p.recompute = moe::plan::recompute::full | moe::plan::recompute::mlp; }) ==
          "recompute");
    CHECK(counter([](moe::plan::Plan& p) { p.recompute = 1U << 20; }) == "recompute");
    CHECK(counter([](moe::plan::Plan& p) { p.offload = 1U << 20; }) == "offload");
    CHECK(counter([](moe::plan::Plan& p) { p.attention_precision = moe::machine::Precision::fp8_blockwise; }) ==
          "attention_precision");
    CHECK(counter([](moe::plan::Plan& p) { p.head_precision = moe::machine::Precision::fp32; }) == "head_precision");
    CHECK(counter([](moe::plan::Plan& p) { p.fp8_scaling = moe::plan::Fp8Scaling::delayed; }) == "fp8_scaling");
    CHECK(counter([](moe::plan::Plan& p) { p.fp8_wgrad = true, p.precision = moe::machine::Precision::bf16; }) ==
          "fp8_wgrad");
    CHECK(counter([](moe::plan::Plan& p) { p.gradients = moe::machine::Precision::mxfp8; }) == "gradients");
    CHECK(counter([](moe::plan::Plan& p) { p.tp_overlap = true; }) == "tp_overlap");
    CHECK(counter([](moe::plan::Plan& p) { p.paged_stash = true; }) == "paged_stash");
    CHECK(counter([](moe::plan::Plan& p) { p.paged_stash = true, p.capacity = 1.5; }).empty());
    CHECK(counter([](moe::plan::Plan& p) { p.cp_comm = moe::plan::ContextComm::alltoall; }) == "cp_comm");
    CHECK(counter([](moe::plan::Plan& p) { p.schedule = moe::plan::ScheduleKind::zero_bubble; }) ==
          "zero-bubble needs pp > 1, vpp 1");
    CHECK(counter([](moe::plan::Plan& p) { p.schedule = moe::plan::ScheduleKind::dualpipe_v; }) ==
          "dualpipe-v needs pp > 1, vpp 2");
    for (const char* text : {"", "even", "zipf:", "zipf:-1", "zipf:x", "dirichlet:0", "dirichlet:1e999"}) {
        CAPTURE(text);
        CHECK(counter([text](moe::plan::Plan& p) { p.routing = text; }) == "routing");
    }
    CHECK(counter([](moe::plan::Plan& p) { p.model = nullptr; }) == "model");
    CHECK(counter([](moe::plan::Plan& p) { p.hardware = nullptr; }) == "hardware");
}

TEST_CASE("rules that depend on the model and the hardware") {
    moe::plan::Plan dense = with_model("Llama3-8B");
    dense.vpp = 2;
    CHECK(moe::plan::check_plan(dense).counter == "ep without experts");
    dense.ep = 1, dense.edp = 64;
    CHECK(moe::plan::check_plan(dense).counter.empty());
    dense.recompute = moe::plan::recompute::moe_act;
    CHECK(moe::plan::check_plan(dense).counter == "recompute");
    dense.recompute = moe::plan::recompute::mla_up_proj;
    CHECK(moe::plan::check_plan(dense).counter == "recompute");

    moe::plan::Plan qwen = with_model("Qwen3-235B-A22B");
    qwen.tp = 8, qwen.dp = 8;
    for (const char* whole : {"torchtitan", "torchtitan-0.2", "automodel"}) {
        qwen.stack = whole;
        CHECK(moe::plan::check_plan(qwen).counter == "kv_heads % tp");
    }
    for (const char* several : {"moe-plan", "bridge-26.08"}) { // 4 key heads, each on two ranks
        qwen.stack = several;
        CHECK(moe::plan::check_plan(qwen).counter.empty());
    }
    CHECK(moe::plan::key_replicas(qwen) == 2);
    CHECK(moe::plan::group_size(qwen, {moe::plan::Domain::dense, moe::plan::axis::key_parts}) == 4);
    qwen.stack = with_model("Qwen3-235B-A22B").stack;
    qwen.tp = 4, qwen.dp = 16;
    CHECK(moe::plan::check_plan(qwen).counter.empty());
    CHECK(moe::plan::key_replicas(qwen) == 1);

    moe::plan::Plan mimo = with_model("MiMo-V2-Flash"); // layers of 4 and of 8 key heads
    mimo.stack = "moe-plan";
    mimo.tp = 8, mimo.dp = 8;
    CHECK(moe::plan::check_plan(mimo).counter != "kv_heads % tp");
    mimo.tp = 16, mimo.dp = 4;
    CHECK(moe::plan::check_plan(mimo).counter == "kv_heads % tp");

    moe::plan::Plan hopper = sound();
    hopper.hardware = std::make_shared<const moe::machine::Hardware>(moe::machine::load_hardware("h100"));
    CHECK(moe::plan::check_plan(hopper).counter == "precision");
    hopper.precision = moe::machine::Precision::fp8_blockwise;
    CHECK(moe::plan::check_plan(hopper).counter.empty());
}

TEST_CASE("plan.json carries the whole plan and gives the same text again") {
    moe::plan::Plan plan = sound();
    plan.layout = "Et*4|(tttt|)*14tmL";
    plan.optimizer.moments = moe::plan::Moments::bf16;
    plan.capacity = 1.25;
    plan.ep_overlap = true;
    plan.lora = moe::plan::lora_from_string("16:8.5:experts");
    plan.precision = moe::machine::Precision::bf16;
    const std::string text = moe::plan::plan_to_json(plan);
    const moe::plan::Plan again = moe::plan::plan_from_json(text, "p.json");
    CHECK(moe::plan::plan_to_json(again) == text);
    CHECK(again.model->name == "DeepSeek-V3");
    CHECK(again.model->layers == plan.model->layers);
    CHECK(again.model->kinds == plan.model->kinds);
    CHECK(again.hardware->memory_bytes == plan.hardware->memory_bytes);
    CHECK(again.recompute == plan.recompute);
    CHECK(again.capacity == 1.25);
    CHECK(again.ep_overlap);
    CHECK(again.optimizer.narrow());
    CHECK(again.lora == moe::plan::Lora{16, 8.5, moe::plan::adapted::experts});
    CHECK(again.cuda_graph == moe::plan::CudaGraph::full);
    CHECK(again.layout == plan.layout);
}

TEST_CASE("a plan edited by hand is refused by field and numbers") {
    const std::string text = moe::plan::plan_to_json(sound());
    CHECK(fault(text).empty());
    CHECK(fault(replaced(text, "\"ep\": 64", "\"ep\": 48")) ==
          "2: p.json: etp * ep * edp * pp = 1 * 48 * 1 * 4 = 192, but gpus = 256");
    CHECK(fault(replaced(text, "\"gbs\": 4096", "\"gbs\": 4097"))
              .find("gbs = 4097 is not divisible by dp * mbs = 64 * 1") != std::string::npos);
    CHECK(fault(replaced(text, "\"tp\": 1", "\"tp\": \"1\"")).find("p.json: mesh: tp = \"1\"") != std::string::npos);
    CHECK(fault(replaced(text, "\"tp\": 1", "\"tp\": 0")).find("mesh: tp = 0: must be a whole number from 1") !=
          std::string::npos);
    CHECK(fault(replaced(text, "\"tp\": 1,", "")).find("field \"tp\" is missing") != std::string::npos);
    CHECK(fault(replaced(text, "\"rank_order\"", "\"rank_ordre\""))
              .find("unknown field \"rank_ordre\": did you mean rank_order?") != std::string::npos);
    CHECK(fault(replaced(text, "\"precision\": \"mxfp8\"", "\"precision\": \"mxfp9\"")).find("did you mean mxfp8?") !=
          std::string::npos);
    CHECK(fault(replaced(text, "\"moe_act\"", "\"moe_akt\""))
              .find("recompute module 'moe_akt' is unknown: did you mean moe_act?") != std::string::npos);
    CHECK(fault(replaced(text, "\"schema_version\": 1", "\"schema_version\": 2")).find("schema_version = 2") !=
          std::string::npos);
    CHECK(fault(replaced(text, "\"schema_version\": 1,", "")).find("\"schema_version\" is missing") !=
          std::string::npos);
    CHECK(
        fault(replaced(text, "\"hidden_size\": 7168", "\"hidden_size\": -1")).find("p.json: model: hidden_size = -1") !=
        std::string::npos);
    CHECK(fault(replaced(text, "\"sm_count\": 152", "\"sm_count\": true")).find("p.json: hardware: sm_count = true") !=
          std::string::npos);
    CHECK(fault(replaced(text, "\"gradients\": \"fp32\"", "\"gradients\": \"mxfp8\"")).find("gradients = mxfp8") !=
          std::string::npos);
    CHECK(fault(replaced(text, "\"ep_overlap\": false", "\"ep_overlap\": 0")).find("must be true or false") !=
          std::string::npos);
    CHECK(fault(text.substr(0, text.size() / 2)).find("not valid JSON") != std::string::npos);
    CHECK(fault_of([] { moe::plan::load_plan("/no/such/plan.json"); }) ==
          "2: cannot read /no/such/plan.json: No such file or directory");
}

TEST_CASE("a truncated plan is refused in one short line wherever it ends") {
    const std::string text = moe::plan::plan_to_json(sound());
    for (std::size_t length = 0; length + 2 < text.size(); length += 13) {
        const std::string line = fault(text.substr(0, length));
        CAPTURE(line);
        CHECK(line.starts_with("2: p.json: not valid JSON: "));
        CHECK(line.find('\n') == std::string::npos);
        CHECK(line.size() < 250);
    }
}

TEST_CASE("every field of --fix is set by name") {
    moe::plan::Plan plan = sound();
    const auto set = [&](const char* field, const char* value) { moe::plan::set_field(plan, field, value); };
    set("tp", "2"), set("cp", "3"), set("pp", "5"), set("vpp", "7"), set("dp", "11"), set("ep", "13"), set("etp", "17");
    CHECK(plan.tp * plan.cp * plan.pp * plan.vpp * plan.dp * plan.ep * plan.etp == 2 * 3 * 5 * 7 * 11 * 13 * 17);
    set("mbs", "4"), set("layout", "Et|tL"), set("schedule", "1f1b"), set("rank_order", "tp-ep-cp-dp-pp");
    CHECK(plan.mbs == 4);
    CHECK(plan.layout == "Et|tL");
    CHECK(plan.schedule == moe::plan::ScheduleKind::one_f_one_b);
    CHECK(plan.rank_order == "tp-ep-cp-dp-pp");
    set("precision", "fp8-blockwise"), set("recompute", "layernorm+moe_act"), set("offload", "moe_act+optimizer");
    CHECK(plan.precision == moe::machine::Precision::fp8_blockwise);
    CHECK(plan.recompute == (moe::plan::recompute::layernorm | moe::plan::recompute::moe_act));
    CHECK(plan.offload == (moe::plan::offload::moe_act | moe::plan::offload::optimizer));
    set("recompute", "none"), set("offload", "none"), set("layout", "none");
    CHECK(plan.recompute == 0);
    CHECK(plan.offload == 0);
    CHECK(plan.layout.empty());
    set("optimizer", "adamw+bf16_moments"), set("fsdp", "on"), set("dispatcher", "deepep"), set("capacity", "1.5");
    CHECK(plan.optimizer.narrow());
    CHECK(plan.fsdp);
    CHECK(plan.dispatcher == moe::plan::Dispatcher::deepep);
    CHECK(plan.capacity == 1.5);
    set("optimizer", "adamw"), set("fsdp", "off"), set("capacity", "none"), set("ep_overlap", "on"),
        set("cuda_graph", "partial");
    CHECK_FALSE(plan.optimizer.narrow());
    CHECK_FALSE(plan.fsdp);
    CHECK(plan.capacity == 0.0);
    CHECK(plan.ep_overlap);
    CHECK(plan.cuda_graph == moe::plan::CudaGraph::partial);
    set("cuda_graph", "attn+moe_router"), set("cp_comm", "alltoall"), set("tp_overlap", "on"), set("delay_wgrad", "on");
    CHECK(plan.cuda_graph == (moe::plan::CudaGraph::attn | moe::plan::CudaGraph::moe_router));
    CHECK(plan.cp_comm == moe::plan::ContextComm::alltoall);
    CHECK((plan.tp_overlap && plan.delay_wgrad));
    set("lora", "16");
    CHECK(plan.lora == moe::plan::Lora{16, 32.0, moe::plan::adapted::all});
    set("lora", "none");
    CHECK_FALSE(plan.lora.on());
    set("paged_stash", "on"), set("memory_efficient_permutation", "off");
    CHECK((plan.paged_stash && !plan.memory_efficient_permutation));
    set("attention_precision", "fp8-tensor"), set("head_precision", "mxfp8"), set("expert_precision", "nvfp4");
    CHECK(plan.core_attention() == moe::machine::Precision::fp8_tensor);
    CHECK(plan.head() == moe::machine::Precision::mxfp8);
    CHECK(plan.experts() == moe::machine::Precision::nvfp4);
    set("attention_precision", "default"), set("head_precision", "default"), set("expert_precision", "default");
    CHECK(plan.core_attention() == moe::machine::Precision::bf16);
    CHECK(plan.head() == moe::machine::Precision::bf16);
    CHECK(plan.experts() == moe::machine::Precision::fp8_blockwise);
    set("fp8_scaling", "delayed"), set("gradients", "bf16"), set("routing", "zipf:1.1"), set("schedule", "zero-bubble");
    CHECK(plan.fp8_scaling == moe::plan::Fp8Scaling::delayed);
    set("fp8_wgrad", "on");
    CHECK(plan.fp8_wgrad);
    set("fp8_wgrad", "off");
    CHECK_FALSE(plan.fp8_wgrad);
    CHECK(plan.gradients == moe::machine::Precision::bf16);
    CHECK(plan.routing == "zipf:1.1");
    CHECK(plan.schedule == moe::plan::ScheduleKind::zero_bubble);
}

TEST_CASE("bad values of --fix are refused") {
    moe::plan::Plan plan = sound();
    const auto fault = [&](const char* field, const char* value) {
        return fault_of([&] { moe::plan::set_field(plan, field, value); });
    };
    CHECK(fault("tpp", "1").find("unknown plan field 'tpp': did you mean tp?") != std::string::npos);
    for (const char* value : {"", "0", "-1", "2x", "1.0", "99999999999999999999", "none"}) {
        CAPTURE(value);
        CHECK(fault("tp", value) == std::string("2: tp=") + value + ": must be a whole number from 1 to 4194304");
    }
    CHECK(fault("fsdp", "maybe").find("must be on or off") != std::string::npos);
    CHECK(fault("capacity", "nan").find("capacity=nan") != std::string::npos);
    CHECK(fault("capacity", "-2").find("capacity=-2") != std::string::npos);
    CHECK(fault("recompute", "layernorm+").find("recompute module '' is unknown") != std::string::npos);
    CHECK(fault("schedule", "gpipe").find("known are 1f1b, interleaved") != std::string::npos);
    CHECK(fault("dispatcher", "hybridEP").find("did you mean hybridep?") != std::string::npos);
}

TEST_CASE("recompute sets, offload sets and graph scopes are written and read alike") {
    for (unsigned set = 0; set < 256; ++set) {
        CHECK(moe::plan::recompute::from_string(moe::plan::recompute::to_string(set)) == set);
        CHECK(moe::plan::offload::from_string(moe::plan::offload::to_string(set)) == set);
    }
    for (unsigned set = 0; set < 64; ++set) {
        const auto graph = static_cast<moe::plan::CudaGraph>(set);
        CHECK(moe::plan::cuda_graph_from_string(moe::plan::to_string(graph)) == graph);
    }
    CHECK(moe::plan::to_string(moe::plan::CudaGraph::partial) == "partial");
}
