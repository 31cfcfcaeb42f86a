// Communication as devices queue it, with a library of collectives between threads in NCCL's place: the same bits as
// ranks that read each other's memory.
#include "engine/collective_bench.hpp"
#include "engine/comm/queued.hpp"
#include "engine/cpu/table.hpp"
#include "planner/communicators.hpp"
#include "planner/measured.hpp"
#include "tests/engine/parity.hpp"
#include "tests/engine/random_cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>

using namespace moe;

namespace {

// A communicator: members meet to read each other's operands; messages wait in boxes, so that nobody who sends waits.
class Gathering {
public:
    explicit Gathering(int members) : operands_(static_cast<std::size_t>(members)) {}

    // Calls job between a meeting of all and another.
    template <class Job>
    void together(int index, const void* x, Job job) {
        operands_[static_cast<std::size_t>(index)] = x;
        meet();
        job(operands_);
        meet();
    }
    void put(int from, int to, const void* x, std::int64_t bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const char* first = static_cast<const char*>(x);
        mail_[{from, to}].emplace_back(first, first + bytes);
        wake_.notify_all();
    }
    void take(int from, int to, void* y, std::int64_t bytes) {
        std::unique_lock<std::mutex> lock(mutex_);
        std::deque<std::vector<char>>& box = mail_[{from, to}];
        wake_.wait(lock, [&] { return !box.empty(); });
        if (static_cast<std::int64_t>(box.front().size()) != bytes)
            fail("a message of {} bytes, {} expected", box.front().size(), bytes);
        if (bytes > 0) std::memcpy(y, box.front().data(), box.front().size());
        box.pop_front();
    }

private:
    void meet() {
        std::unique_lock<std::mutex> lock(mutex_);
        const std::uint64_t round = rounds_;
        if (++arrived_ == operands_.size()) {
            arrived_ = 0;
            ++rounds_;
            wake_.notify_all();
        } else {
            wake_.wait(lock, [&] { return rounds_ != round; });
        }
    }

    std::vector<const void*> operands_;
    std::size_t arrived_ = 0;
    std::uint64_t rounds_ = 0;
    std::map<std::pair<int, int>, std::deque<std::vector<char>>> mail_;
    std::mutex mutex_;
    std::condition_variable wake_;
};

struct Seat {
    std::shared_ptr<Gathering> gathering;
    int members, index;
};

struct Halls { // of gatherings, by meeting point
    std::mutex mutex;
    std::uint64_t points = 0;
    std::map<std::uint64_t, std::weak_ptr<Gathering>> gatherings;
    int left = 0, abandoned = 0;
};
Halls& halls() {
    static Halls all;
    return all;
}

MeetingPoint meeting_point() {
    const std::lock_guard<std::mutex> lock(halls().mutex);
    MeetingPoint point{};
    std::memcpy(point.data(), &++halls().points, sizeof halls().points);
    return point;
}

void* join(const MeetingPoint& point, int members, int index, int) {
    std::uint64_t number = 0;
    std::memcpy(&number, point.data(), sizeof number);
    std::shared_ptr<Gathering> gathering;
    {
        const std::lock_guard<std::mutex> lock(halls().mutex);
        gathering = halls().gatherings[number].lock();
        if (!gathering) halls().gatherings[number] = gathering = std::make_shared<Gathering>(members);
    }
    gathering->together(index, nullptr, [](const auto&) {});
    return new Seat{gathering, members, index};
}

Seat& seat(void* member) { return *static_cast<Seat*>(member); }
void leave(void* member) {
    ++halls().left;
    delete &seat(member);
}
void abandon(void* member) {
    ++halls().abandoned;
    delete &seat(member);
}
std::string trouble(void*) { return {}; }
std::string lost(void*) { return "NCCL: remote process exited"; }

void all_gather(void* member, const void* x, void* y, std::int64_t bytes, void*) {
    seat(member).gathering->together(seat(member).index, x, [&](const std::vector<const void*>& all) {
        char* to = static_cast<char*>(y);
        for (const void* part : all) {
            if (to != part) std::memcpy(to, part, static_cast<std::size_t>(bytes));
            to += bytes;
        }
    });
}

void sum(const std::vector<const void*>& all, std::int64_t first, void* y, std::int64_t elements, Dtype dtype,
         bool max) {
    const Type type = dtype == Dtype::bf16 ? Type::bf16 : Type::f32;
    std::vector<const void*> parts;
    for (const void* x : all) parts.push_back(static_cast<const char*>(x) + bytes_of(dtype, first));
    const auto kernel = max ? cpu_kernels().reduce_max : cpu_kernels().reduce_sum;
    kernel({y, type}, parts.data(), static_cast<int>(parts.size()), elements, type, nullptr);
}

// By way of a copy: y may be a part of somebody's x.
void reduce(void* member, const void* x, void* y, std::int64_t first, std::int64_t elements, Dtype dtype, bool max) {
    std::vector<char> result(static_cast<std::size_t>(bytes_of(dtype, elements)));
    seat(member).gathering->together(seat(member).index, x, [&](const std::vector<const void*>& all) {
        sum(all, first, result.data(), elements, dtype, max);
    });
    if (!result.empty()) std::memcpy(y, result.data(), result.size());
}
void reduce_scatter(void* member, const void* x, void* y, std::int64_t elements, Dtype dtype, void*) {
    reduce(member, x, y, seat(member).index * elements, elements, dtype, false);
}
void all_reduce(void* member, const void* x, void* y, std::int64_t elements, Dtype dtype, bool max, void*) {
    reduce(member, x, y, 0, elements, dtype, max);
}

struct Waiting {
    void *member, *y;
    std::int64_t bytes;
    int from;
};
thread_local std::vector<Waiting> received;
thread_local bool in_group = false;

void take(const Waiting& w) { seat(w.member).gathering->take(w.from, seat(w.member).index, w.y, w.bytes); }
void begin_group() { in_group = true; }
void end_group() {
    in_group = false;
    for (const Waiting& w : std::exchange(received, {})) take(w);
}
void send(void* member, const void* x, std::int64_t bytes, int to, void*) {
    seat(member).gathering->put(seat(member).index, to, x, bytes);
}
void recv(void* member, void* y, std::int64_t bytes, int from, void*) {
    if (in_group)
        received.push_back({member, y, bytes, from});
    else
        take({member, y, bytes, from});
}
void copy(void* to, const void* from, std::int64_t bytes, void*) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
}

const CollectiveLibrary& library() {
    static const CollectiveLibrary all{meeting_point, join,           leave,      abandon,     trouble,
                                       all_gather,    reduce_scatter, all_reduce, begin_group, end_group,
                                       send,          recv,           copy};
    return all;
}

// What is queued is done at once, in the order of the calls; every signal must have been given before it is awaited.
class PromptQueue : public Queue {
public:
    void* stream(int) const override { return nullptr; }
    void reserve(std::size_t, std::size_t signals) override { given_.resize(std::max(given_.size(), signals)); }
    void prepare(bool, const std::function<void()>&) override {}
    void play(bool, const std::function<void()>& enqueue) override {
        given_.assign(given_.size(), false);
        enqueue();
    }
    bool replays() const override { return false; }
    void rehearse(const std::function<void()>&) override {} // what runs at once cannot be tried out
    void forget() override {}
    void fork(int) override {}
    void join(int) override {}
    void signal(std::size_t index, int) override { given_.at(index) = true; }
    void await(std::size_t index, int) override {
        if (!given_.at(index)) fail("signal {} is awaited before it is given", index);
    }
    void stamp(std::size_t, int) override {}
    double seconds(std::size_t) override { return 0.0; }
    void mark(int value, int number) override { marks_[static_cast<std::size_t>(number)] = value; }
    int marked(int number) const override { return marks_[static_cast<std::size_t>(number)]; }
    bool idle() override { return true; }
    void wait() override {}

private:
    std::vector<bool> given_;
    std::array<std::atomic<int>, queue_streams> marks_{};
};

class PromptDevice : public Device {
public:
    std::string name() const override { return "a device that is none"; }
    Queue* queue() override { return &queue_; }
    char* allocate(std::size_t bytes) override { return host_->allocate(bytes); }
    void release(char* memory) noexcept override { host_->release(memory); }
    void fill(void* target, int byte, std::size_t bytes) override { host_->fill(target, byte, bytes); }
    void write(void* target, const void* source, std::size_t bytes) override { host_->write(target, source, bytes); }
    void read(void* target, const void* source, std::size_t bytes) override { host_->read(target, source, bytes); }

private:
    std::unique_ptr<Device> host_ = open_host();
    PromptQueue queue_;
};

const Backend& prompt_backend() {
    static const Backend backend = [] {
        Backend b = cpu_backend();
        b.name = "prompt";
        b.open = [](bool, int) -> std::unique_ptr<Device> { return std::make_unique<PromptDevice>(); };
        b.devices = [] { return 16; };
        b.collectives = library;
        return b;
    }();
    return backend;
}

// Work that is queued never ends.
class StuckQueue : public PromptQueue {
public:
    bool idle() override { return false; }
};
class StuckDevice : public PromptDevice {
public:
    Queue* queue() override { return &stuck_; }

private:
    StuckQueue stuck_;
};

void check_same(const Plan& plan, const std::string& what) {
    INFO(what);
    const Trained want = train_three(plan), got = train_three(plan, 1, &prompt_backend());
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
        {"mixtral", {{"ep", "4"}, {"dispatcher", "allgather"}}}};
    for (const auto& [model, fields] : cases) {
        std::string what = model;
        for (const auto& [field, value] : fields) what += " " + field + "=" + value;
        check_same(small_plan(model, 4, fields), what);
    }
    CHECK(halls().left > 0);
    CHECK(halls().abandoned == 0);
}

TEST_CASE("queued communication: random plans") {
    for (const RandomCase& c : random_cases(11, 60, 5)) {
        const Plan plan = plan_of(c);
        if (plan.dispatcher != Dispatcher::hybridep) check_same(plan, c.text()); // which needs memory that GPUs share
    }
}

TEST_CASE("queued communication: a machine with fewer devices than ranks is refused") {
    Backend few = prompt_backend();
    few.devices = [] { return 2; };
    TrainOptions options;
    options.table = &few;
    CHECK_THROWS_WITH_AS(Trainer(small_plan("qwen3", 4, {{"ep", "2"}}), options),
                         doctest::Contains("4 ranks on this machine, but it has 2 GPUs, and every rank needs one"),
                         Error);
}

TEST_CASE("queued communication: a rank that fails abandons what others wait for") {
    Backend failing = prompt_backend();
    failing.table[static_cast<std::size_t>(OpKind::adamw)] = [](const OpContext& c) {
        if (c.position.rank == 1) fail("no kernel for this");
    };
    TrainOptions options;
    options.table = &failing;
    const int before = halls().abandoned;
    {
        Trainer trainer(small_plan("qwen3", 2, {{"tp", "2"}}), options);
        CHECK_THROWS_WITH_AS(trainer.step(made_up_tokens(61)), doctest::Contains("rank 1: adamw (layer -1, slot "),
                             Error);
    }
    CHECK(halls().abandoned > before);
}

TEST_CASE("queued communication: what the library says of its connections ends the step, with rank, op and remedy") {
    static const CollectiveLibrary losing = [] {
        CollectiveLibrary l = library();
        l.trouble = lost;
        return l;
    }();
    Backend stuck = prompt_backend();
    stuck.open = [](bool, int) -> std::unique_ptr<Device> { return std::make_unique<StuckDevice>(); };
    stuck.collectives = []() -> const CollectiveLibrary& { return losing; };
    TrainOptions options;
    options.table = &stuck;
    Trainer trainer(small_plan("qwen3", 2, {{"tp", "2"}}), options);
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
    static const CollectiveLibrary full = [] {
        CollectiveLibrary l = library();
        l.join = [](const MeetingPoint&, int, int, int) -> void* { fail("NCCL: unhandled cuda error: out of memory"); };
        return l;
    }();
    Backend none = prompt_backend();
    none.collectives = []() -> const CollectiveLibrary& { return full; };
    TrainOptions options;
    options.table = &none;
    CHECK_THROWS_WITH_AS(Trainer(small_plan("qwen3", 2, {{"ep", "2"}}), options),
                         doctest::Contains("out of memory; where memory is short use a smaller mbs"), Error);
}

TEST_CASE("communicators and buffers are those that the planner counts") {
    const auto check = [](const Plan& plan, const std::string& what) {
        INFO(what);
        TrainOptions options;
        options.table = &prompt_backend();
        const Trainer trainer(plan, options);
        if (plan.capacity > 0.0) return; // a second Program shares the buffers
        const Joined& joined = trainer.joined();
        const Communicators counted = communicators_of(trainer.programs().front(), Mesh(plan));
        CHECK(counted.buffer_bytes + std::max(8 * plan.gpus, 1) == joined.buffer_bytes); // greetings
        int collective = 0, pairwise = 0, messages = 0;
        for (const Joined::Member& member : joined.each)
            ++(member.circle.messages() ? messages : member.circle.pairwise ? pairwise : collective);
        CHECK(counted.collective == collective);
        CHECK(counted.pairwise == pairwise);
        CHECK(counted.messages == messages);
        CHECK(spared_multiprocessors(trainer.programs().front(), plan.pp) == (messages > 0 ? 2 * message_channels : 0));
    };
    for (const RandomCase& c : random_cases(5, 60, 5))
        if (c.ranks > 1) check(plan_of(c), c.text());
}

namespace {

// Peers that show each other their memory and move nothing.
const PeerLibrary& idle_peers() {
    static const PeerKernels kernels{[](int, std::int64_t) { return std::int64_t{64}; },
                                     [](const PeerGroup&, const TokenShape&, Src, const std::int32_t*,
                                        const std::int32_t*, const float*, Dst, float*, std::int32_t*, void*) {},
                                     [](const PeerGroup&, const TokenShape&, Src, const std::int32_t*,
                                        const std::int32_t*, const std::int32_t*, const float*, Dst, Dst, float*,
                                        void*) {},
                                     [](const PeerGroup&, const void*, void*, std::int64_t, void*) {}};
    static const PeerLibrary library{[](char* memory) {
                                         PeerLibrary::Handle handle{};
                                         std::memcpy(handle.data(), &memory, sizeof memory);
                                         return handle;
                                     },
                                     [](const PeerLibrary::Handle& handle, std::string&) {
                                         char* memory = nullptr;
                                         std::memcpy(&memory, handle.data(), sizeof memory);
                                         return memory;
                                     },
                                     [](const PeerLibrary::Handle&, char*) {},
                                     []() -> const PeerKernels& { return kernels; }};
    return library;
}

} // namespace

TEST_CASE("every kind of communication between devices is measured over sizes, by the number of ranks") {
    Backend backend = prompt_backend();
    backend.peers = idle_peers;
    for (const int ranks : {2, 4}) {
        const CollectiveBench result = run_collective_bench(backend, ranks, 8 << 20);
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
        for (const OpKind kind : {OpKind::all_gather, OpKind::reduce_scatter, OpKind::all_reduce,
                                  OpKind::all_to_all_rows, OpKind::all_gather_rows, OpKind::reduce_scatter_rows,
                                  OpKind::all_to_all, OpKind::ring_exchange, OpKind::send})
            if (kind != OpKind::send || ranks == 2) check(group_key(to_string(kind), ranks), ranks == 2 ? 6 : 5);
        for (const char* family : {"dispatch_tokens", "combine_tokens"})
            for (const char* values : {"", ".values"})
                for (const char* beside : {"", ".beside"})
                    check(group_key(std::string(family) + values + beside, ranks), 3);
        check(group_key(peer_gather_key, ranks), 4);
        for (const char* family : {"ce_max.bf16", "ce_sum.bf16", "ce_grad.bf16", "ce_loss"}) check(family, 1);
        CHECK(result.measured.size() == families);
    }
    CHECK_THROWS_AS(run_collective_bench(cpu_backend(), 2), Error);
}
