// Plans over several GPUs of this machine against the CPU back end; each case is skipped by name where there are fewer.
#include "engine/backends/backends.hpp"
#include "engine/ops/backend.hpp"
#include "engine/train/checkpoint_writer.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/train/cuda_parity.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <cstdio>

using namespace moe;

TEST_CASE("cuda ranks 2: data parallel with sharded optimizer states") { check_ranks(2, "qwen3", {{"mbs", "2"}}); }

TEST_CASE("cuda ranks 2: weights that are sharded and gathered layer by layer, dense and of experts") {
    check_ranks(2, "llama", {{"fsdp", "on"}});
    check_ranks(2, "llama", {{"fsdp", "on"}, {"fsdp_replicas", "2"}});
    check_ranks(2, "qwen3", {{"fsdp", "on"}, {"mbs", "2"}, {"recompute", "full"}});
    check_ranks(2, "qwen3", {{"fsdp", "on"}, {"ep", "2"}, {"delay_wgrad", "on"}});
    check_ranks(2, "deepseek3-mtp", {{"fsdp", "on"}, {"documents", "mask"}, {"offload", "optimizer"}});
    check_ranks(2, "mixtral", {{"fsdp", "on"}, {"tp", "2"}});
}

TEST_CASE("cuda ranks 2: graphs of parts of a step among communication give the bits of its ops") {
    if (!has_gpus(2)) return;
    const std::pair<const char*, Fields> plans[]{{"llama", {{"fsdp", "on"}}},
                                                 {"qwen3", {{"ep", "2"}, {"ep_overlap", "on"}, {"mbs", "2"}}},
                                                 {"qwen3", {{"tp", "2"}, {"etp", "2"}}},
                                                 {"deepseek3", {{"pp", "2"}, {"recompute", "full"}}}};
    for (const auto& [model, fields] : plans)
        for (const char* scopes : {"attn", "partial"}) {
            plan::Plan plan = small_plan(small_model(model), 2, fields);
            const CudaResult expected = train_on(plan, "cuda");
            plan::set_field(plan, "cuda_graph", scopes);
            const CudaResult got = train_on(plan, "cuda");
            INFO(model, " ", fields.front().first, " ", scopes);
            CHECK(got.losses == expected.losses);
            CHECK(got.norms == expected.norms);
            CHECK(got.gradients == expected.gradients);
            CHECK(got.weights == expected.weights);
        }
}

TEST_CASE("cuda ranks 4: copies of sharded weights, dense and of experts") {
    check_ranks(4, "llama", {{"fsdp", "on"}, {"fsdp_replicas", "2"}});
    check_ranks(4, "qwen3", {{"fsdp", "on"}, {"fsdp_replicas", "2"}, {"ep", "2"}});
    check_ranks(4, "qwen3", {{"fsdp", "on"}, {"ep", "2"}});
}

// The sums of two ranks in BF16 are rounded once, wherever they are added.
TEST_CASE("cuda ranks 2: a BF16 copy of gradients is reduced") {
    if (!has_gpus(2)) return;
    for (const char* fsdp : {"off", "on"}) {
        const plan::Plan plan = small_plan("qwen3", 2, {{"fsdp", fsdp}, {"gradients", "bf16"}});
        compare(std::string("BF16 gradients, fsdp ") + fsdp, train_on(plan, "cuda"), train_on(plan, "cpu"), 1e-2);
    }
}

TEST_CASE("cuda ranks 2: products write gradients in BF16") {
    if (!has_gpus(2)) return;
    // Every token goes to every expert: near ties of the router fall either way in BF16.
    for (const auto& model : {small_model("llama"), small_model("qwen3", {{"num_experts_per_tok", "8"}})}) {
        const Fields fields{{"fsdp", "on"}, {"gradients", "bf16"}, {"precision", "bf16"}};
        Fields split = fields;
        split.emplace_back("tp", "2");
        const plan::Plan plan = small_plan(model, 2, fields);
        compare_beside("BF16 gradients of products, " + model->name, train_on(plan, "cuda"), train_on(plan, "cpu"),
                       train_on(small_plan(model, 4, split), "cpu"), 2.0);
    }
}

TEST_CASE("cuda ranks 2: Muon over shards, and over slices of tensor parallelism") {
    check_ranks(2, "qwen3", {{"optimizer", "muon"}});
    check_ranks(2, "qwen3", {{"tp", "2"}, {"ep", "2"}, {"optimizer", "muon"}});
    check_ranks(2, "deepseek3", {{"tp", "2"}, {"etp", "2"}, {"optimizer", "muon"}});
}

TEST_CASE("cuda ranks 2: low-rank adapters beside frozen weights") {
    check_ranks(2, "qwen3", {{"ep", "2"}, {"lora", "8"}});
    check_ranks(2, "deepseek3", {{"tp", "2"}, {"etp", "2"}, {"lora", "8:8"}});
    check_ranks(2, "llama", {{"pp", "2"}, {"lora", "8:16:attention"}});
}

TEST_CASE("cuda ranks 2: tensor parallel with sequence parallelism") {
    check_ranks(2, "llama", {{"tp", "2"}});
    check_ranks(2, "deepseek3", {{"tp", "2"}, {"etp", "2"}});
}

TEST_CASE("cuda ranks 2: expert parallel, worst case and planned capacity, and folded over tensor parallel") {
    check_ranks(2, "qwen3", {{"ep", "2"}});
    check_ranks(2, "qwen3", {{"ep", "2"}, {"capacity", "1"}});
    check_ranks(2, "qwen3", {{"tp", "2"}, {"ep", "2"}, {"etp", "1"}});
    check_ranks(2, "mixtral", {{"ep", "2"}, {"dispatcher", "allgather"}});
}

TEST_CASE("cuda ranks 2: tokens over peers' memory") {
    check_ranks(2, "qwen3", {{"ep", "2"}, {"dispatcher", "hybridep"}});
    check_ranks(2, "deepseek3", {{"ep", "2"}, {"dispatcher", "hybridep"}, {"capacity", "1"}, {"recompute", "full"}});
    check_ranks(2, "mixtral", {{"tp", "2"}, {"ep", "2"}, {"etp", "1"}, {"dispatcher", "hybridep"}});
    check_ranks(2, "qwen3", {{"ep", "2"}, {"dispatcher", "hybridep"}, {"ep_overlap", "on"}});
}

// Every GPU is a domain of its own, as two nodes of one GPU each: nothing is reached over peers' memory.
TEST_CASE("cuda ranks 2: tokens between domains of one GPU") {
    const Fields apart{{"ep", "2"}, {"dispatcher", "hybridep"}, {"domain", "1"}};
    const auto with = [&apart](Fields fields) {
        fields.insert(fields.end(), apart.begin(), apart.end());
        return fields;
    };
    check_ranks(2, "qwen3", apart);
    check_ranks(2, "deepseek3", with({{"capacity", "1"}, {"recompute", "full"}}));
    check_ranks(2, "mixtral", with({{"tp", "2"}, {"etp", "1"}}));
    check_ranks(2, "qwen3", with({{"ep_overlap", "on"}}));
    if (has_gpus(2)) check_model("qwen3", with({{"precision", "bf16"}}), 2e-2, true, 3, 2);
}

TEST_CASE("cuda ranks 2: tokens between domains have the same bits by NCCL's device API and by its messages") {
    if (!has_gpus(2)) return;
    for (const Fields& more : {Fields{}, Fields{{"precision", "bf16"}}, Fields{{"capacity", "1"}, {"mbs", "2"}}}) {
        Fields fields{{"ep", "2"}, {"dispatcher", "hybridep"}, {"domain", "1"}, {"cuda_graph", "full"}};
        fields.insert(fields.end(), more.begin(), more.end());
        const plan::Plan plan = small_plan("qwen3", 2, fields);
        const CudaResult chunks = train_on(plan, "cuda"), slots = train_on(plan, "cuda", 3, 1, false);
        CHECK(slots.slots_by == "whole slots by messages: the library of collectives has no windows");
        if (chunks.slots_by.find("chunks of 128 rows by NCCL ") != 0) {
            std::printf("skipped: %s\n", chunks.slots_by.c_str());
            return;
        }
        CHECK(chunks.losses == slots.losses);
        CHECK(chunks.norms == slots.norms);
        CHECK(chunks.gradients == slots.gradients);
        CHECK(chunks.weights == slots.weights);
    }
}

TEST_CASE("cuda ranks 4: tokens between domains of two GPUs, and within them") {
    const Fields pairs{{"ep", "4"}, {"dispatcher", "hybridep"}, {"domain", "2"}};
    check_ranks(4, "qwen3", pairs);
    check_ranks(4, "deepseek3", {{"ep", "4"}, {"dispatcher", "hybridep"}, {"domain", "2"}, {"ep_overlap", "on"}});
}

// The tolerance is as on one GPU (cuda_test.cpp): beside what TP 2, which rounds other sums, changes on the CPU.
TEST_CASE("cuda ranks 2: tokens that are quantized before they travel over peers' memory") {
    if (!has_gpus(2)) return;
    const auto model = wide_model("qwen3", {{"hidden_size", "512"}, {"num_experts_per_tok", "8"}});
    const Fields fields{{"precision", "fp8-blockwise"}, {"mbs", "2"}, {"ep", "2"}, {"dispatcher", "hybridep"}};
    const auto trained = [&](const Fields& more, const char* backend) {
        Fields all = fields;
        all.insert(all.end(), more.begin(), more.end());
        return train_on(small_plan(model, 2, all, {16, 8}), backend);
    };
    const CudaResult expected = trained({}, "cpu"), other = trained({{"tp", "2"}, {"etp", "1"}}, "cpu");
    const CudaResult queued = trained({}, "cuda"), replayed = trained({{"cuda_graph", "full"}}, "cuda");
    for (std::size_t i = 0; i < 3; ++i) CHECK(std::abs(queued.losses[i] / expected.losses[i] - 1.0) < 2e-3);
    compare_beside("qwen3 on 2 GPUs: precision=fp8-blockwise ep=2 dispatcher=hybridep", queued, expected, other, 2.0);
    CHECK(replayed.losses == queued.losses);
    CHECK(replayed.gradients == queued.gradients);
    CHECK(replayed.weights == queued.weights);
}

TEST_CASE("cuda ranks 2: context parallel by a ring and by heads") {
    check_ranks(2, "qwen3", {{"cp", "2"}, {"cp_comm", "ring"}});
    check_ranks(2, "qwen3", {{"cp", "2"}, {"cp_comm", "alltoall"}, {"ep", "2"}});
}

TEST_CASE("cuda ranks 2: documents stay apart under context parallelism") {
    check_ranks(2, "qwen3", {{"documents", "mask"}, {"cp", "2"}, {"mbs", "2"}});
    check_ranks(2, "gptoss", {{"documents", "mask"}, {"cp", "2"}, {"cp_comm", "alltoall"}});
}

TEST_CASE("cuda ranks 2: TP above the number of key heads") {
    const Fields one_head{{"num_key_value_heads", "1"}};
    check_ranks(2, "qwen3", {{"tp", "2"}, {"ep", "2"}}, one_head);
    check_ranks(2, "qwen2", {{"tp", "2"}, {"tp_overlap", "on"}}, one_head);
    check_ranks(2, "olmoe", {{"tp", "2"}, {"optimizer", "muon"}}, one_head);
    check_ranks(2, "gptoss", {{"tp", "2"}, {"fsdp", "on"}}, one_head);
    check_ranks(2, "laguna", {{"tp", "2"}, {"lora", "8"}}, one_head);
}

TEST_CASE("cuda ranks 4: TP above the number of key heads") {
    const Fields two_heads{{"num_key_value_heads", "2"}};
    check_ranks(4, "qwen3", {{"tp", "4"}, {"ep", "2"}}, two_heads);
    check_ranks(4, "qwen2", {{"tp", "4"}, {"optimizer", "muon"}}, two_heads);
}

TEST_CASE("cuda ranks 2: pipelines, interleaved, and a V with split backwards") {
    check_ranks(2, "qwen3", {{"pp", "2"}});
    check_ranks(2, "deepseek3-mtp", {{"pp", "2"}});
    check_ranks(2, "qwen2", {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}});
    check_ranks(2, "qwen2", {{"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}});
}

TEST_CASE("cuda ranks 2: EP and TP overlap") {
    check_ranks(2, "qwen3", {{"tp", "2"}, {"ep", "2"}, {"etp", "1"}, {"ep_overlap", "on"}});
    check_ranks(2, "qwen3", {{"tp", "2"}, {"etp", "2"}, {"tp_overlap", "on"}});
}

TEST_CASE("cuda ranks 4: everything at once") {
    check_ranks(4, "qwen3", {{"tp", "2"}, {"ep", "4"}, {"etp", "1"}});
    check_ranks(4, "qwen3", {{"pp", "2"}, {"ep", "2"}});
    check_ranks(4, "qwen3", {{"pp", "2"}, {"ep", "2"}, {"dispatcher", "hybridep"}});
    check_ranks(4, "qwen3", {{"tp", "2"}, {"ep", "4"}, {"etp", "1"}, {"dispatcher", "hybridep"}});
    check_ranks(4, "deepseek3", {{"cp", "2"}, {"tp", "2"}, {"ep", "2"}, {"etp", "2"}});
}

TEST_CASE("cuda ranks 2: BF16 with every expert chosen") {
    if (!has_gpus(2)) return;
    check_model("qwen3", {{"precision", "bf16"}, {"ep", "2"}}, 2e-2, true, 3, 2);
    check_model("qwen3", {{"precision", "bf16"}, {"ep", "2"}, {"dispatcher", "hybridep"}}, 2e-2, true, 3, 2);
    check_model("qwen3", {{"precision", "bf16"}, {"tp", "2"}, {"etp", "2"}, {"cuda_graph", "full"}}, 2e-2, true, 3, 2);
}

TEST_CASE("cuda ranks 2: the last step is recorded on every rank, op by op") {
    if (!has_gpus(2)) return;
    train::TrainOptions options;
    options.steps = 2;
    options.backend = "cuda";
    train::Trainer trainer(small_plan("qwen3", 2, {{"ep", "2"}, {"cuda_graph", "full"}}), options);
    trainer.step(made_up_tokens(61));
    const double seconds = trainer.step(made_up_tokens(61)).seconds;
    const program::Timeline timeline = trainer.timeline();
    REQUIRE(timeline.rows.size() == trainer.recorder(0).ops() + trainer.recorder(1).ops());
    for (const program::TimelineRow& row : timeline.rows) {
        CHECK(row.start >= 0.0);
        CHECK(row.end <= seconds);
        CHECK(row.end >= row.start);
    }
    std::printf("%zu communicators took %.3f GiB of a GPU:", trainer.joined().communicators,
                trainer.joined().bytes / (1 << 30));
    for (const comm::Joined::Member& member : trainer.joined().each) {
        CHECK(member.bytes > 0.0);
        std::printf(" %s %.0f MiB", member.group.pairwise ? "pairwise" : "", member.bytes / (1 << 20));
    }
    std::printf("\n");
}

TEST_CASE("cuda ranks 2: a rank that fails ends the run with its own line") {
    if (!has_gpus(2)) return;
    static std::atomic<bool> armed;
    armed = false;
    ops::Backend failing = backends::backend_named("cuda");
    failing.table[static_cast<std::size_t>(program::OpKind::adamw)] = [](const ops::OpContext& c) {
        if (armed && c.position.rank == 1) fail("no kernel for this");
    };
    train::TrainOptions options;
    options.table = &failing;
    train::Trainer trainer(small_plan("qwen3", 2, {{"tp", "2"}, {"etp", "2"}}), options);
    trainer.step(made_up_tokens(61));
    armed = true;
    CHECK_THROWS_WITH_AS(trainer.step(made_up_tokens(61)), doctest::Contains("rank 1: adamw (layer -1"), Error);
}

TEST_CASE("cuda ranks 2: a checkpoint goes on on one GPU and on the CPU") {
    if (!has_gpus(2)) return;
    const Folder folder;
    train::TrainOptions options;
    options.lr = 1e-3;
    options.eps = 1e-3; // see train_on()
    const train::SampleSource source = made_up_tokens(61);
    const auto on = [&](const char* backend, int ranks, const Fields& fields) {
        options.backend = backend;
        return std::make_unique<train::Trainer>(small_plan("qwen3", ranks, fields), options);
    };
    const auto two = on("cuda", 2, {{"ep", "2"}, {"cuda_graph", "full"}});
    for (int i = 0; i < 2; ++i) two->step(source);
    train::CheckpointWriter writer(folder.path.string(), "-test");
    writer.save(*two);
    writer.finish();
    REQUIRE(writer.saved_step() == 2);
    const double loss = two->step(source).loss;
    const auto goes_on = [&](train::Trainer& trainer) {
        std::vector<std::string> skipped;
        const auto saved = weights::newest_checkpoint(folder.path.string(), skipped);
        REQUIRE(saved);
        trainer.restore(*saved);
        return trainer.step(source).loss;
    };
    CHECK(goes_on(*on("cuda", 1, {})) == nearly(loss).epsilon(1e-4));
    CHECK(goes_on(*on("cpu", 2, {{"tp", "2"}})) == nearly(loss).epsilon(1e-4));
    CHECK(goes_on(*on("cuda", 2, {{"ep", "2"}, {"cuda_graph", "full"}})) == loss); // to the bit
}

TEST_CASE("cuda ranks 2: a plan that has no room says so before anybody waits") {
    if (!has_gpus(2)) return;
    train::TrainOptions options;
    options.backend = "cuda";
    const plan::Plan plan =
        small_plan(small_model("qwen3", {{"vocab_size", "134217728"}, {"hidden_size", "256"}}), 2, {{"ep", "2"}});
    CHECK_THROWS_WITH_AS(train::Trainer(plan, options), doctest::Contains("GiB"), Error);
}
