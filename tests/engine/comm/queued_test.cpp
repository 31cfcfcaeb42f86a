// Communication as devices queue it, with a library of collectives between threads in NCCL's place: the same bits as
// ranks that read each other's memory.
#include "engine/backends/cpu/table.hpp"
#include "engine/bench/collective_bench.hpp"
#include "engine/comm/queued.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/mesh.hpp"
#include "planner/program/communicators.hpp"
#include "planner/program/measured.hpp"
#include "tests/engine/comm/prompt.hpp"
#include "tests/engine/train/parity.hpp"
#include "tests/engine/train/random_cases.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

namespace {

// scopes: those that are records of their own.
void check_same(const plan::Plan& plan, const std::string& what, plan::CudaGraph scopes = plan::CudaGraph::none) {
    static const ops::Backend recording = [] {
        ops::Backend b = prompt_backend();
        b.can_replay = true;
        return b;
    }();
    INFO(what, " cuda_graph=", plan::to_string(scopes));
    plan::Plan scoped = plan;
    scoped.cuda_graph = scopes;
    const Trained want = train_three(plan),
                  got = train_three(scoped, 1, scopes == plan::CudaGraph::none ? &prompt_backend() : &recording);
    check_bits(got, want);
    CHECK(got.overflow == want.overflow);
}

} // namespace

TEST_CASE("queued communication: the bits of ranks that read each other's memory") {
    const std::pair<const char*, Fields> cases[] = {
        {"qwen3", {{"tp", "4"}}},
        {"qwen3", {{"ep", "4"}}},
        {"qwen3", {{"ep", "4"}, {"capacity", "1.25"}}},
        {"qwen3", {{"ep", "2"}, {"etp", "2"}}},
        {"qwen3", {{"tp", "2"}, {"ep", "4"}, {"etp", "1"}, {"ep_overlap", "on"}}},
        {"qwen3", {{"tp", "2"}, {"tp_overlap", "on"}}},
        {"qwen3", {{"cp", "4"}, {"cp_comm", "ring"}}},
        {"qwen3", {{"cp", "4"}, {"cp_comm", "alltoall"}}},
        {"deepseek3", {{"cp", "2"}, {"cp_comm", "alltoall"}, {"ep", "4"}}},
        {"deepseek3-mtp", {{"pp", "4"}}},
        {"qwen2", {{"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}}},
        {"qwen2", {{"pp", "2"}, {"vpp", "2"}, {"schedule", "zb-v"}}},
        {"gptoss", {{"pp", "2"}, {"vpp", "2"}, {"schedule", "dualpipe-v"}, {"ep", "2"}}},
        {"mixtral", {{"ep", "4"}, {"dispatcher", "allgather"}}},
        {"qwen3", {{"ep", "4"}, {"dispatcher", "hybridep"}, {"domain", "1"}}},
        {"qwen3", {{"ep", "4"}, {"dispatcher", "hybridep"}, {"domain", "1"}, {"capacity", "1.25"}}},
        {"deepseek3", {{"tp", "2"}, {"ep", "4"}, {"dispatcher", "hybridep"}, {"domain", "1"}, {"ep_overlap", "on"}}}};
    for (const auto& [model, fields] : cases) {
        std::string what = model;
        for (const auto& [field, value] : fields) what.append(" ").append(field).append("=").append(value);
        check_same(small_plan(model, 4, fields), what);
    }
    CHECK(departures().left > 0);
    CHECK(departures().abandoned == 0);
}

TEST_CASE("queued communication: domains exchange chunks where all ranks have windows, else whole slots, to the bit") {
    ops::Backend backend = prompt_backend();
    train::TrainOptions options;
    options.steps = 3;
    options.table = &backend;
    const Fields domains{{"ep", "4"}, {"dispatcher", "hybridep"}, {"domain", "1"}};
    Fields planned = domains;
    planned.emplace_back("capacity", "1.25");
    for (const Fields& fields : {domains, planned}) {
        const plan::Plan plan = small_plan("qwen3", 4, fields);
        const Trained want = train_three(plan);
        const auto check = [&](const comm::CollectiveLibrary& (*library)(), const std::string& by, bool chunks) {
            INFO(by);
            backend.collectives = library;
            const std::int64_t before = bytes_in_chunks();
            check_bits(train_three(plan, 1, &backend), want);
            CHECK((bytes_in_chunks() > before) == chunks);
            CHECK(train::Trainer(plan, options).joined().slots_by == by);
        };
        check(prompt_library, "whole slots by messages: the library of collectives has no windows", false);
        check([]() -> const comm::CollectiveLibrary& { return prompt_library(Windows::all); },
              "chunks of 128 rows by threads", true);
        check([]() -> const comm::CollectiveLibrary& { return prompt_library(Windows::one_refused); },
              "whole slots by messages: another rank cannot have a window", false);
        check([]() -> const comm::CollectiveLibrary& { return prompt_library(Windows::one_closed); },
              "whole slots by messages: another rank cannot have a window", false);
    }
    // A token goes to both of two domains nearly always: whole slots are quicker.
    backend.collectives = []() -> const comm::CollectiveLibrary& { return prompt_library(Windows::all); };
    const plan::Plan full = small_plan("qwen2", 2, {{"ep", "2"}, {"dispatcher", "hybridep"}, {"domain", "1"}});
    const std::int64_t before = bytes_in_chunks();
    check_bits(train_three(full, 1, &backend), train_three(full));
    CHECK(bytes_in_chunks() == before);
    CHECK(train::Trainer(full, options).joined().slots_by ==
          "whole slots by messages: nearly all of their rows are expected to be filled");
    backend.collectives = prompt_library;
    CHECK(train::Trainer(small_plan("qwen3", 4, {{"ep", "4"}}), options).joined().slots_by.empty());
}

TEST_CASE("parts of a step that are records of their own give the bits of its ops") {
    using plan::CudaGraph;
    const std::pair<const char*, Fields> cases[] = {
        {"qwen3", {{"ep", "2"}, {"ep_overlap", "on"}}},
        {"qwen3", {{"fsdp", "on"}, {"recompute", "full"}}},
        {"qwen3", {{"fsdp", "on"}, {"gradients", "bf16"}, {"precision", "bf16"}}},
        {"llama", {{"tp", "2"}, {"offload", "core_attn+attn_norm"}}},
        {"qwen3", {{"ep", "2"}, {"capacity", "1.25"}}},
        {"deepseek3-mtp", {{"pp", "2"}}}};
    for (const auto& [model, fields] : cases)
        for (const CudaGraph scopes : {CudaGraph::attn, CudaGraph::mlp | CudaGraph::moe_router, CudaGraph::partial})
            check_same(small_plan(model, 2, fields), model, scopes);

    ops::Backend recording = prompt_backend();
    recording.can_replay = true;
    train::TrainOptions options;
    options.table = &recording;
    const auto records = [&](Fields fields, const char* scopes) {
        fields.emplace_back("cuda_graph", scopes);
        train::Trainer trainer(small_plan("qwen3", 1, fields), options);
        trainer.step(made_up_tokens(61));
        return trainer.queued_step();
    };
    const std::size_t layers = small_plan("qwen3", 1, {}).model->layers.size();
    const auto batches = static_cast<std::size_t>(small_plan("qwen3", 1, {}).micro_batches());
    const device::QueuedStep attention = records({}, "attn"), all = records({}, "partial");
    CHECK(attention.records >= 2 * layers * batches);
    CHECK(all.records >= attention.records);
    CHECK(all.host_seconds > 0.0);
    CHECK(records({{"capacity", "2"}}, "attn").records <= all.records); // whole layers: rows are planned
    CHECK_THROWS_WITH_AS(records({}, "attn+full"), doctest::Contains("full holds every scope"), Error);
    options.table = &prompt_backend();
    CHECK_THROWS_WITH_AS(records({}, "attn"), doctest::Contains("cuda_graph = attn is not supported by backend"),
                         Error);
}

TEST_CASE("a recorded step's ops take what they do without stamps, the launch before them left out") {
    ops::Backend backend = prompt_backend();
    backend.open = open_clocked;
    const plan::Plan plan = small_plan("qwen3", 1, {});
    train::TrainOptions options;
    options.steps = 6;
    options.permits = 2;
    options.table = &backend;
    train::Trainer trainer(plan, options);
    const train::SampleSource source = made_up_tokens(plan.model->vocab);
    for (int step = 0; step < 6; ++step) trainer.step(source);
    const program::Timeline timeline = trainer.timeline();
    REQUIRE_FALSE(timeline.rows.empty());
    for (const program::TimelineRow& row : timeline.rows) CHECK(row.busy / clocked.op == nearly(1.0));
}

TEST_CASE("queued communication: random plans") {
    plan::CudaGraph scopes = plan::CudaGraph::none; // in turn
    for (const RandomCase& c : random_cases(11, draws(60), 5)) {
        const plan::Plan plan = plan_of(c);
        // Within a domain hybridep needs memory that GPUs share.
        if (plan.dispatcher != plan::Dispatcher::hybridep || plan.ep == 1 || plan::expert_inner(plan) == 1)
            check_same(plan, c.text(), scopes);
        scopes = scopes == plan::CudaGraph::none   ? plan::CudaGraph::attn
                 : scopes == plan::CudaGraph::attn ? plan::CudaGraph::partial
                                                   : plan::CudaGraph::none;
    }
}

TEST_CASE("queued communication: a machine with fewer devices than ranks is refused") {
    ops::Backend few = prompt_backend();
    few.devices = [] { return 2; };
    train::TrainOptions options;
    options.table = &few;
    CHECK_THROWS_WITH_AS(train::Trainer(small_plan("qwen3", 4, {{"ep", "2"}}), options),
                         doctest::Contains("4 ranks on this machine, but it has 2 GPUs, and every rank needs one"),
                         Error);
}

TEST_CASE("queued communication: a rank that fails abandons what others wait for") {
    ops::Backend failing = prompt_backend();
    failing.table[static_cast<std::size_t>(program::OpKind::adamw)] = [](const ops::OpContext& c) {
        if (c.position.rank == 1) fail("no kernel for this");
    };
    train::TrainOptions options;
    options.table = &failing;
    const int before = departures().abandoned;
    {
        train::Trainer trainer(small_plan("qwen3", 2, {{"tp", "2"}}), options);
        CHECK_THROWS_WITH_AS(trainer.step(made_up_tokens(61)), doctest::Contains("rank 1: adamw (layer -1, slot "),
                             Error);
    }
    CHECK(departures().abandoned > before);
}

TEST_CASE("queued communication: what the library says of its connections ends the step, with rank, op and remedy") {
    static const comm::CollectiveLibrary losing = [] {
        comm::CollectiveLibrary l = prompt_library();
        l.trouble = [](void*) -> std::string { return "NCCL: remote process exited"; };
        return l;
    }();
    ops::Backend stuck = prompt_backend();
    stuck.open = open_stuck;
    stuck.collectives = []() -> const comm::CollectiveLibrary& { return losing; };
    train::TrainOptions options;
    options.table = &stuck;
    train::Trainer trainer(small_plan("qwen3", 2, {{"tp", "2"}}), options);
    std::string said;
    try {
        trainer.step(made_up_tokens(61));
    } catch (const Error& error) {
        said = error.what();
    }
    CHECK_MESSAGE(said.find("NCCL: remote process exited") != std::string::npos, said);
    CHECK_MESSAGE(said.find("rank ") == 0, said);
    CHECK_MESSAGE(said.find("(layer ") != std::string::npos, said);
    CHECK_MESSAGE(said.find("--resume") != std::string::npos, said);
}

TEST_CASE("queued communication: a communicator that cannot be joined names rank, use and remedy") {
    static const comm::CollectiveLibrary full = [] {
        comm::CollectiveLibrary l = prompt_library();
        l.join = [](const comm::MeetingPoint&, int, int, int) -> void* {
            fail("NCCL: unhandled cuda error: out of memory");
        };
        return l;
    }();
    ops::Backend none = prompt_backend();
    none.collectives = []() -> const comm::CollectiveLibrary& { return full; };
    train::TrainOptions options;
    options.table = &none;
    CHECK_THROWS_WITH_AS(train::Trainer(small_plan("qwen3", 2, {{"ep", "2"}}), options),
                         doctest::Contains("out of memory; where memory is short use a smaller mbs"), Error);
}

TEST_CASE("communicators and buffers are those that the planner counts") {
    const auto check = [](const plan::Plan& plan, const std::string& what) {
        INFO(what);
        train::TrainOptions options;
        options.table = &prompt_backend();
        const train::Trainer trainer(plan, options);
        if (plan.capacity > 0.0) return; // a second Program shares the buffers
        const comm::Joined& joined = trainer.joined();
        const program::Communicators counted = program::communicators_of(trainer.programs().front(), plan::Mesh(plan));
        CHECK(counted.buffer_bytes + std::max(8 * plan.gpus, 1) == joined.buffer_bytes); // greetings
        std::vector<int> collective, pairwise;
        int messages = 0;
        for (const auto& [group, bytes] : joined.each)
            if (group.messages())
                ++messages;
            else
                (group.pairwise ? pairwise : collective).push_back(static_cast<int>(group.ranks.size()));
        CHECK(counted.collective == collective);
        CHECK(counted.pairwise == pairwise);
        CHECK(counted.messages == messages);
        bool copies = false; // whether activations are offloaded
        for (program::OpWalk walk(trainer.programs().front()); !walk.done(); walk.next())
            copies = copies || (program::copies_with_host(walk.op().kind) && walk.op().phase != program::Phase::step);
        CHECK(program::reserved_sms_of(trainer.programs().front(), plan.pp) ==
              (messages > 0 ? 2 * program::message_channels : 0) + (copies ? program::host_copy_blocks : 0));
    };
    for (const RandomCase& c : random_cases(5, draws(60), 5))
        if (c.ranks > 1) check(plan_of(c), c.text());
}

namespace {

// Peers that show each other their memory and move nothing.
const comm::PeerLibrary& idle_peers() {
    static const PeerKernels kernels{
        [](int, std::int64_t) { return std::int64_t{64}; },
        [](const PeerGroup&, const TokenShape&, Src, const std::int32_t*, const std::int32_t*, const float*, Dst,
           float*, std::int32_t*, void*) {},
        [](const PeerGroup&, const TokenShape&, const std::uint8_t*, const float*, const std::int32_t*,
           const std::int32_t*, const float*, std::uint8_t*, float*, float*, std::int32_t*, void*) {},
        [](const PeerGroup&, const TokenShape&, Src, const std::int32_t*, const std::int32_t*, const std::int32_t*,
           const float*, Dst, Dst, float*, void*) {},
        [](const PeerGroup&, const void*, void*, std::int64_t, void*) {}};
    static const comm::PeerLibrary library{[](char* memory) {
                                               comm::PeerLibrary::Handle handle{};
                                               std::memcpy(handle.data(), &memory, sizeof memory);
                                               return handle;
                                           },
                                           [](const comm::PeerLibrary::Handle& handle, std::string&) {
                                               char* memory = nullptr;
                                               std::memcpy(&memory, handle.data(), sizeof memory);
                                               return memory;
                                           },
                                           [](const comm::PeerLibrary::Handle&, char*) {},
                                           []() -> const PeerKernels& { return kernels; }};
    return library;
}

} // namespace

TEST_CASE("every kind of communication between devices is measured over sizes, by the number of ranks" *
          doctest::skip(sanitized())) {
    ops::Backend backend = prompt_backend();
    backend.peers = idle_peers;
    for (const int ranks : thinned(std::vector<int>{2, 4})) {
        const bench::CollectiveBench result = bench::run_collective_bench(backend, ranks, 8 << 20);
        std::size_t families = 0;
        const auto check = [&](const std::string& family, std::size_t calls) {
            INFO(family, " among ", ranks);
            const auto found = result.measured.find(family);
            REQUIRE(found != result.measured.end());
            CHECK(found->second.size() == calls);
            for (std::size_t i = 1; i < found->second.size(); ++i)
                CHECK(found->second[i].work >= found->second[i - 1].work);
            ++families;
        };
        for (const program::OpKind kind :
             {program::OpKind::all_gather, program::OpKind::reduce_scatter, program::OpKind::all_reduce,
              program::OpKind::all_to_all_rows, program::OpKind::all_gather_rows, program::OpKind::reduce_scatter_rows,
              program::OpKind::all_to_all, program::OpKind::ring_exchange, program::OpKind::send})
            if (kind != program::OpKind::send || ranks == 2)
                check(program::group_key(program::to_string(kind), ranks), ranks == 2 ? 6 : 5);
        for (const char* family : {"dispatch_tokens", "combine_tokens"})
            for (const char* values : {"", ".values"})
                for (const char* beside : {"", ".beside"})
                    check(program::group_key(std::string(family) + values + beside, ranks), 3);
        check(program::group_key(program::peer_gather_key, ranks), 4);
        for (const char* family : {"ce_max.bf16", "ce_sum.bf16", "ce_grad.bf16", "ce_loss"}) check(family, 1);
        CHECK(result.measured.size() == families);
    }
    CHECK_THROWS_AS(bench::run_collective_bench(backends::cpu_backend(), 2), Error);
}
