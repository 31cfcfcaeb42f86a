// The CUDA back end against the CPU's: loss, every gradient and trained weights; skipped where there is no device.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "engine/backends/backends.hpp"
#include "engine/backends/cuda_module.hpp"
#include "engine/ops/backend.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/program/communicators.hpp"
#include "tests/engine/train/cuda_parity.hpp"
#include "tests/support/folder.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string_view>

using namespace moe;

namespace {

constexpr int skipped_status = 77; // meson's and automake's exit status of a skipped test

} // namespace

TEST_CASE("cuda: FP32 training is the CPU's, op by op and as a graph") {
    for (const char* model :
         {"qwen3", "qwen2", "deepseek3", "deepseek3-mtp", "deepseek2", "mixtral", "gptoss", "llama"}) {
        check_model(model, {}, 1e-4);
        check_model(model, {{"mbs", "2"}, {"cuda_graph", "full"}}, 1e-4);
    }
    check_model("qwen3", {{"recompute", "full"}, {"mbs", "4"}}, 1e-4);
    check_model("deepseek3", {{"recompute", "mla_up_proj+mlp+moe_act"}, {"cuda_graph", "full"}}, 1e-4);
}

TEST_CASE("cuda: factors, gates, norms and rotations of other families are the CPU's, in a graph too") {
    for (const char* model : {"granite",   "olmoe",     "afmoe",    "laguna",   "mimo",   "hunyuan",   "ernie",
                              "nemotron",  "gpt",       "dbrx",     "mistral4", "llama4", "qwen3next", "qwen3.5",
                              "nemotronh", "nemotron3", "granite4", "gemma4",   "step",   "phimoe",    "erniebias"}) {
        check_model(model, {}, 1e-4);
        check_model(model, {{"mbs", "2"}, {"cuda_graph", "full"}, {"recompute", "full"}}, 1e-4);
        check_model(model, {{"documents", "mask"}, {"mbs", "2"}}, 1e-4);
        // Behind a bound the gradient is 0: a value that rounds to the other side of Step's narrow ones changes it
        // whole.
        if (std::string_view(model) != "step") check_rounding(model, {{"precision", "bf16"}}, 2.0);
    }
}

TEST_CASE("cuda: balanced routers, the selection bias and dropped copies are the CPU's") {
    for (const char* kind : {"aux_loss", "seq_aux_loss", "global_aux_loss"}) {
        const Fields fields{{"load_balancing", kind}, {"aux_loss", "0.1"}, {"z_loss", "0.01"}, {"mbs", "2"}};
        check_model("qwen3", fields, 1e-4);
        check_model("deepseek2", fields, 1e-4);
    }
    check_model("deepseek3", {{"aux_loss", "0.1"}, {"bias_update", "0.01"}, {"cuda_graph", "full"}}, 1e-4);
    for (const char* policy : {"probs", "position"})
        for (const char* scope : {"sub_sequence", "full_sequence"})
            check_model("qwen3",
                        {{"expert_capacity", "1"}, {"drop_policy", policy}, {"drop_scope", scope}, {"mbs", "2"}}, 1e-4);
    check_model("qwen2", {{"balance", "forced"}, {"cuda_graph", "full"}}, 1e-4);
    check_model("qwen2", {{"load_balancing", "sinkhorn"}, {"recompute", "moe"}}, 1e-4);
    check_model("qwen2", {{"load_balancing", "sinkhorn"}, {"mbs", "2"}, {"cuda_graph", "full"}}, 1e-4);
    for (const char* model : {"qwen3", "deepseek3-mtp", "gptoss"}) {
        check_model(model, {{"input_jitter", "0.1"}, {"recompute", "moe"}}, 1e-4);
        check_model(model, {{"input_jitter", "0.1"}, {"mbs", "2"}, {"cuda_graph", "full"}}, 1e-4);
    }
}

TEST_CASE("cuda: a step by the host, and moments of FP8, are the CPU's, in a graph too") {
    for (const Fields& fields : {Fields{{"offload", "optimizer_step"}}, Fields{{"optimizer", "adamw+fp8_exp_avg"}},
                                 Fields{{"offload", "optimizer_step"}, {"optimizer", "adamw+fp8_exp_avg"}},
                                 Fields{{"offload", "optimizer"}, {"optimizer", "adamw+fp8_exp_avg"}}}) {
        for (const char* model : {"qwen3", "deepseek3-mtp", "gptoss"}) {
            const double tolerance = fields.back().first == "optimizer" ? 1e-3 : 1e-4;
            check_model(model, fields, tolerance);
            Fields replayed = fields;
            replayed.insert(replayed.end(), {{"cuda_graph", "full"}, {"mbs", "2"}, {"recompute", "moe"}});
            check_model(model, replayed, tolerance);
        }
        Fields rounded = fields;
        rounded.emplace_back("precision", "bf16");
        check_model("qwen3", rounded, 2e-2, true);
    }
}

TEST_CASE("cuda: documents that are masked are the CPU's, in a graph too") {
    for (const char* model : {"qwen3", "deepseek3", "deepseek3-mtp", "gptoss", "llama"}) {
        check_model(model, {{"documents", "mask"}}, 1e-4);
        check_model(model, {{"documents", "mask"}, {"mbs", "2"}, {"cuda_graph", "full"}}, 1e-4);
        check_model(model, {{"documents", "mask"}, {"recompute", "core_attn"}, {"precision", "bf16"}}, 2e-2, true);
    }
}

TEST_CASE("cuda: Muon moves matrices as on the CPU, in a graph too") {
    for (const char* model : {"qwen3", "deepseek3", "gptoss", "llama"}) {
        check_model(model, {{"optimizer", "muon"}}, 1e-4);
        check_model(model, {{"optimizer", "muon"}, {"mbs", "2"}, {"cuda_graph", "full"}}, 1e-4);
        check_model(model, {{"optimizer", "muon"}, {"offload", "optimizer"}}, 1e-4);
        check_model(model, {{"optimizer", "muon"}, {"precision", "bf16"}}, 2e-2, true);
    }
}

TEST_CASE("cuda: low-rank adapters move as on the CPU, in a graph too") {
    for (const char* model : {"qwen3", "deepseek3", "gptoss", "llama"}) {
        check_model(model, {{"lora", "8"}}, 1e-4);
        check_model(model, {{"lora", "8:8:attention"}, {"mbs", "2"}, {"cuda_graph", "full"}}, 1e-4);
        check_model(model, {{"lora", "4"}, {"offload", "optimizer"}, {"recompute", "layernorm"}}, 1e-4);
        check_model(model, {{"lora", "8"}, {"precision", "bf16"}}, 2e-2, true);
    }
}

TEST_CASE("cuda: router replay chooses what the CPU recorded, in a graph and recomputed too") {
    for (const char* model : {"qwen3", "deepseek3", "gptoss"}) {
        const Folder folder;
        const std::string original = folder / "cpu", again = folder / "gpu";
        const auto run = [&](const std::string& backend, const Fields& fields, bool turned, const std::string& record,
                             const std::string& replay) {
            train::TrainOptions options;
            options.steps = 3;
            options.lr = 1e-3;
            options.eps = 1e-3;
            options.backend = backend;
            options.record_routing = record;
            options.replay_routing = replay;
            train::Trainer trainer(small_plan(model, 1, fields), options);
            for (const auto& parameter : trainer.parameters()) {
                const std::string& name = parameter.first;
                if (!turned || (name.find("mlp.gate.weight") == std::string::npos &&
                                name.find("mlp.router.weight") == std::string::npos))
                    continue;
                std::vector<float> weight = trainer.read_weight(name);
                for (float& w : weight) w = -w;
                trainer.write_weight(name, weight);
            }
            std::vector<double> results;
            for (int step = 0; step < 3; ++step) {
                const train::StepResult result = trainer.step(made_up_tokens(61));
                results.insert(results.end(), {result.loss, result.grad_norm});
            }
            return results;
        };
        run("cpu", {}, false, original, "");
        const std::vector<double> want = run("cpu", {}, true, "", original);
        for (const Fields& fields : {Fields{}, Fields{{"cuda_graph", "full"}, {"mbs", "2"}},
                                     Fields{{"recompute", "moe"}, {"capacity", "1"}}}) {
            const std::vector<double> got = run("cuda", fields, true, again, original);
            for (std::size_t i = 0; i < want.size(); ++i) CHECK(std::abs(got[i] / want[i] - 1.0) < 1e-4);
            for (int step = 1; step <= 3; ++step)
                CHECK(read_file(train::routing_file(again, step)) == read_file(train::routing_file(original, step)));
        }
    }
}

TEST_CASE("cuda: offloaded activations and optimizer states come back, in a graph too") {
    for (const char* graph : {"none", "full"}) {
        check_model("qwen3", {{"offload", "optimizer"}, {"cuda_graph", graph}}, 1e-4);
        check_model("qwen3", {{"offload", "moe_act+qkv_linear+core_attn"}, {"mbs", "2"}, {"cuda_graph", graph}}, 1e-4);
        check_model("deepseek3", {{"offload", "attn_norm+mlp_norm+optimizer"}, {"cuda_graph", graph}}, 1e-4);
    }
}

// Near ties of an indexer's scores would fall either way in BF16.
TEST_CASE("cuda: sparse attention and its indexers are the CPU's in FP32, in a graph too") {
    for (const char* model : {"deepseek32", "glm5"}) {
        check_model(model, {}, 1e-4);
        check_model(model, {{"mbs", "2"}, {"cuda_graph", "full"}, {"recompute", "full"}}, 1e-4);
        check_model(model, {{"documents", "mask"}, {"mbs", "2"}}, 1e-4);
        for (const char* stage : {"dense_loss", "warm_up"}) check_model(model, {{"indexer_stage", stage}}, 1e-4);
    }
}

// No near tie of two logits can send a token elsewhere where every expert is chosen. On the CPU, initial weights that
// are off by 1e-5 of themselves change no gradient of these runs by more than 0.94 % and no weight by more than 0.75 %.
TEST_CASE("cuda: BF16 training is the CPU's within its rounding") {
    for (const char* model :
         {"qwen3", "qwen2", "deepseek3", "deepseek3-mtp", "deepseek2", "mixtral", "gptoss", "llama"}) {
        check_model(model, {{"precision", "bf16"}}, 2e-2, true);
        check_model(model, {{"precision", "bf16"}, {"mbs", "2"}, {"cuda_graph", "full"}}, 2e-2, true);
    }
}

// Tokens go where their positions say, on both sides the same way.
TEST_CASE("cuda: twenty optimizer steps with replayed routing are the CPU's") {
    for (const char* model :
         {"qwen3", "qwen2", "deepseek3", "deepseek3-mtp", "deepseek2", "mixtral", "gptoss", "llama"}) {
        Fields fields{{"cuda_graph", "full"}};
        if (std::string(model) != "llama") fields.emplace_back("balance", "forced");
        check_model(model, fields, 1e-4, false, 20);
        fields.emplace_back("precision", "bf16");
        check_model(model, fields, 2e-2, false, 20);
    }
}

// One token that goes to another expert changes that expert's gradient by far more than rounding: the loss alone is
// held here.
TEST_CASE("cuda: BF16 losses with routing are the CPU's") {
    for (const char* model : {"qwen3", "qwen2", "deepseek3", "deepseek2", "mixtral"}) {
        INFO(model);
        const plan::Plan plan = small_plan(model, 1, {{"precision", "bf16"}});
        const CudaResult got = train_on(plan, "cuda"), expected = train_on(plan, "cpu");
        for (std::size_t i = 0; i < 3; ++i) {
            CHECK(std::abs(got.losses[i] / expected.losses[i] - 1.0) < 1e-3);
            CHECK(std::abs(got.norms[i] / expected.norms[i] - 1.0) < 2e-2);
        }
    }
}

TEST_CASE("cuda: deterministic runs repeat bit for bit, as a graph too") {
    for (const char* precision : {"fp32", "bf16", "fp8-blockwise", "nvfp4"}) {
        const auto model = precision == std::string("fp8-blockwise") ? wide_model("qwen2") : small_model("qwen2");
        const CudaResult first =
            train_on(small_plan(model, 1, {{"precision", precision}, {"deterministic", "on"}}), "cuda");
        for (const char* graph : {"none", "full"}) {
            const plan::Plan plan =
                small_plan(model, 1, {{"precision", precision}, {"deterministic", "on"}, {"cuda_graph", graph}});
            const CudaResult again = train_on(plan, "cuda");
            CHECK(again.losses == first.losses);
            CHECK(again.norms == first.norms);
            CHECK(again.weights == first.weights);
        }
    }
}

TEST_CASE("cuda: a captured step copies nothing between host and device but what is offloaded") {
    train::TrainOptions options;
    options.steps = 2;
    options.backend = "cuda";
    std::size_t copied = 0; // tensors that the program copies to the host or back
    const auto queued = [&](Fields fields) {
        fields.emplace_back("cuda_graph", "full");
        train::Trainer trainer(small_plan("deepseek3", 1, fields), options);
        trainer.step(made_up_tokens(61));
        copied = 0;
        for (program::OpWalk walk(trainer.programs().front()); !walk.done(); walk.next())
            if (program::copies_with_host(walk.op().kind)) copied += walk.op().out.size();
        return trainer.queued_step();
    };
    const device::QueuedStep plain = queued({}), recomputed = queued({{"recompute", "full"}, {"precision", "bf16"}});
    CHECK(plain.nodes > 100);
    CHECK(plain.host_copies == 0);
    CHECK(recomputed.host_copies == 0);
    CHECK(plain.fills == 0);
    CHECK(recomputed.fills == 0);
    CHECK(plain.host_seconds > 0.0);
    CHECK(copied == 0);
    for (const char* offload : {"optimizer", "attn_norm+core_attn", "moe_act+optimizer"}) {
        INFO(offload);
        const device::QueuedStep step = queued({{"offload", offload}});
        CHECK(step.host_copies == copied);
        CHECK(copied > 0);
    }
    const plan::Plan eager = small_plan("deepseek3", 1, {});
    CHECK(train::Trainer(eager, options).queued_step().nodes == 0);
}

TEST_CASE("cuda: graphs of parts of a step give the bits of its ops") {
    for (const char* model : {"qwen3", "deepseek3", "llama"}) {
        const Fields fields{{"mbs", "2"}, {"deterministic", "on"}};
        const CudaResult expected = train_on(small_plan(model, 1, fields), "cuda");
        for (const char* scopes : {"attn", "moe_router+shared_experts", "mlp", "partial"}) {
            INFO(model, " ", scopes);
            Fields all = fields;
            all.emplace_back("cuda_graph", scopes);
            const plan::Plan plan = small_plan(model, 1, all);
            const CudaResult got = train_on(plan, "cuda");
            CHECK(got.losses == expected.losses);
            CHECK(got.norms == expected.norms);
            CHECK(got.gradients == expected.gradients);
            CHECK(got.weights == expected.weights);
        }
    }
    train::TrainOptions options;
    options.steps = 2;
    options.backend = "cuda";
    const auto queued = [&](const char* graph) {
        train::Trainer trainer(small_plan("deepseek3", 1, {{"cuda_graph", graph}}), options);
        trainer.step(made_up_tokens(61));
        return trainer.queued_step();
    };
    const device::QueuedStep whole = queued("full"), attention = queued("attn"), all = queued("partial");
    CHECK(whole.records == 1);
    CHECK(attention.records > 4); // each layer forward and backward
    CHECK(attention.nodes > 2 * attention.records);
    CHECK(attention.nodes < all.nodes);
    CHECK(all.nodes < whole.nodes);
    CHECK(all.fills == 0);
    CHECK(all.host_copies == 0);
    CHECK(all.host_seconds > 0.0);
}

TEST_CASE("cuda: the last step is recorded op by op") {
    for (const char* graph : {"none", "full", "partial"}) {
        const plan::Plan plan = small_plan("deepseek3", 1, {{"cuda_graph", graph}});
        train::TrainOptions options;
        options.steps = 3;
        options.backend = "cuda";
        train::Trainer trainer(plan, options);
        trainer.step(made_up_tokens(61));
        trainer.step(made_up_tokens(61));
        CHECK_THROWS_WITH_AS(trainer.timeline(), doctest::Contains("no step has been recorded"), Error);
        trainer.step(made_up_tokens(61));
        const program::Timeline timeline = trainer.timeline();
        CHECK(timeline.step_seconds > 0.0);
        REQUIRE(timeline.rows.size() == trainer.recorder(0).ops());
        double busy = 0.0, end = 0.0;
        std::size_t timed = 0;
        for (std::size_t i = 0; i < timeline.rows.size(); ++i) {
            const program::TimelineRow& row = timeline.rows[i];
            if (i > 0) CHECK(row.start >= timeline.rows[i - 1].start);
            CHECK(row.end >= row.start);
            CHECK(row.busy >= 0.0);
            CHECK(row.busy <= row.end - row.start + 1e-9);
            end = std::max(end, row.end);
            busy += row.busy;
            timed += row.busy > 0.0;
        }
        CHECK(timed > timeline.rows.size() / 2); // events resolve half a microsecond
        // All of one clock, the device's: a host's clock beside it, on a busy machine, holds nothing.
        CHECK(busy > 0.1 * end);
    }
}

TEST_CASE("cuda: memory beyond the staging's size goes there and back") {
    const std::unique_ptr<device::Device> device = backends::backend_named("cuda").open(false, 0);
    CHECK(device->allocate(std::size_t{1} << 50) == nullptr);
    std::vector<std::uint32_t> there((std::size_t{70} << 18) + 3), back(there.size());
    for (std::size_t i = 0; i < there.size(); ++i) there[i] = static_cast<std::uint32_t>(i * 2654435761u);
    const std::size_t bytes = there.size() * sizeof there[0];
    char* memory = device->allocate(bytes);
    REQUIRE(memory != nullptr);
    device->fill(memory, 0xff, bytes);
    device->write(memory, there.data(), bytes - 4);
    device->read(back.data(), memory, bytes);
    CHECK(back.back() == 0xffffffffu);
    there.back() = 0xffffffffu;
    CHECK(there == back);
    device->release(memory);
}

TEST_CASE("cuda: what it cannot run is refused by name") {
    train::TrainOptions options;
    options.backend = "cuda";
    const auto refused = [&](const plan::Plan& plan, const char* text) {
        CHECK_THROWS_WITH_AS(train::Trainer(plan, options), doctest::Contains(text), Error);
    };
    refused(small_plan(small_model("qwen3", {}), 128, {{"dp", "128"}}, {16, 128}),
            "128 ranks on this machine, but it has ");
    refused(small_plan("qwen3", 1, {{"cuda_graph", "attn+full"}}), "cuda_graph = attn+full: full holds every scope");
}

int main(int argc, char** argv) {
    backends::open_cuda_module(backends::cuda_module_places()); // a module that is not there is no reason to skip
    try {
        backends::backend_named("cuda");
    } catch (const Error& error) {
        std::printf("engine on CUDA: skipped: %s\n", error.what());
        return skipped_status;
    }
    doctest::Context context(argc, argv);
    return context.run();
}
