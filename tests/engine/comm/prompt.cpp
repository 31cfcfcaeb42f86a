// Collectives between threads in NCCL's place, and devices that do at once what is queued on them.
#include "tests/engine/comm/prompt.hpp"

#include "engine/backends/cpu/table.hpp"
#include "engine/comm/collectives.hpp"
#include "engine/device/device.hpp"
#include "engine/device/streams.hpp"
#include "kernels/kernels.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

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

struct Membership {
    std::shared_ptr<Gathering> gathering;
    int members, index;
};

struct Halls { // of gatherings, by meeting point
    std::mutex mutex;
    std::uint64_t points = 0;
    std::map<std::uint64_t, std::weak_ptr<Gathering>> gatherings;
    Departures departures;
};
Halls& halls() {
    static Halls all;
    return all;
}

comm::MeetingPoint meeting_point() {
    const std::lock_guard<std::mutex> lock(halls().mutex);
    comm::MeetingPoint point{};
    std::memcpy(point.data(), &++halls().points, sizeof halls().points);
    return point;
}

void* join(const comm::MeetingPoint& point, int members, int index, int) {
    std::uint64_t number = 0;
    std::memcpy(&number, point.data(), sizeof number);
    std::shared_ptr<Gathering> gathering;
    {
        const std::lock_guard<std::mutex> lock(halls().mutex);
        gathering = halls().gatherings[number].lock();
        if (!gathering) halls().gatherings[number] = gathering = std::make_shared<Gathering>(members);
    }
    gathering->together(index, nullptr, [](const auto&) {});
    return new Membership{gathering, members, index};
}

Membership& membership(void* member) { return *static_cast<Membership*>(member); }
void depart(void* member, int Departures::*way) {
    delete &membership(member);
    const std::lock_guard<std::mutex> lock(halls().mutex);
    ++(halls().departures.*way);
}
void leave(void* member) { depart(member, &Departures::left); }
void abandon(void* member) { depart(member, &Departures::abandoned); }
std::string trouble(void*) { return {}; }

void all_gather(void* member, const void* x, void* y, std::int64_t bytes, void*) {
    membership(member).gathering->together(membership(member).index, x, [&](const std::vector<const void*>& all) {
        char* to = static_cast<char*>(y);
        for (const void* part : all) {
            if (to != part) std::memcpy(to, part, static_cast<std::size_t>(bytes));
            to += bytes;
        }
    });
}

void sum(const std::vector<const void*>& all, std::int64_t first, void* y, std::int64_t elements, program::Dtype dtype,
         bool max) {
    const Type type = dtype == program::Dtype::bf16 ? Type::bf16 : Type::f32;
    std::vector<const void*> parts;
    for (const void* x : all) parts.push_back(static_cast<const char*>(x) + program::bytes_of(dtype, first));
    const auto kernel = max ? cpu_kernels().reduce_max : cpu_kernels().reduce_sum;
    kernel({y, type}, parts.data(), static_cast<int>(parts.size()), elements, type, nullptr);
}

// The sum goes by way of a copy: y may be a part of somebody's x.
void reduce(void* member, const void* x, void* y, std::int64_t first, std::int64_t elements, program::Dtype dtype,
            bool max) {
    std::vector<char> result(static_cast<std::size_t>(program::bytes_of(dtype, elements)));
    membership(member).gathering->together(membership(member).index, x, [&](const std::vector<const void*>& all) {
        sum(all, first, result.data(), elements, dtype, max);
    });
    if (!result.empty()) std::memcpy(y, result.data(), result.size());
}
void reduce_scatter(void* member, const void* x, void* y, std::int64_t elements, program::Dtype dtype, void*) {
    reduce(member, x, y, membership(member).index * elements, elements, dtype, false);
}
void all_reduce(void* member, const void* x, void* y, std::int64_t elements, program::Dtype dtype, bool max, void*) {
    reduce(member, x, y, 0, elements, dtype, max);
}

struct Waiting {
    void *member, *y;
    std::int64_t bytes;
    int from;
};
thread_local std::vector<Waiting> received;
thread_local bool in_group = false;

void take(const Waiting& w) { membership(w.member).gathering->take(w.from, membership(w.member).index, w.y, w.bytes); }
void begin_group() { in_group = true; }
void end_group() {
    in_group = false;
    for (const Waiting& w : std::exchange(received, {})) take(w);
}
void send(void* member, const void* x, std::int64_t bytes, int to, void*) {
    membership(member).gathering->put(membership(member).index, to, x, bytes);
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

std::atomic<std::int64_t> chunk_bytes{0};

// What the kernel of a device does, by messages: of each slot no more than its filled chunks.
void exchange_chunks(const SlotGroup& group, const ChunkShape& shape, const void* x, const std::int32_t* counts,
                     void* y, void*) {
    const auto moved = [&](int from, int to) {
        return shape.moved_bytes(counts[shape.back ? to * group.members + from : from * group.members + to]);
    };
    void* const member = const_cast<void*>(group.library);
    for (int m = 0; m < group.members; ++m) {
        const std::int64_t bytes = moved(group.member, m);
        send(member, static_cast<const char*>(x) + m * shape.slot_bytes(), bytes, m, nullptr);
        if (m != group.member) chunk_bytes += bytes;
    }
    for (int m = 0; m < group.members; ++m)
        take({member, static_cast<char*>(y) + m * shape.slot_bytes(), moved(m, group.member), m});
}

class PromptWindow : public comm::SlotWindow {
public:
    PromptWindow(void* member, bool opens) : opens_(opens) {
        group_.members = membership(member).members;
        group_.member = membership(member).index;
        group_.library = member;
    }
    std::string open() override { return opens_ ? "" : "this window is stuck"; }
    SlotGroup group() const override { return group_; }
    const ExchangeKernels& kernels() const override {
        static const ExchangeKernels all{nullptr, exchange_chunks};
        return all;
    }
    std::string name() const override { return "threads"; }

private:
    SlotGroup group_;
    bool opens_;
};

template <Windows windows>
std::unique_ptr<comm::SlotWindow> slot_window(void* member, std::int64_t, int, std::string& why) {
    const bool second = membership(member).index == 1;
    if (windows == Windows::one_refused && second) {
        why = "no wall for a window";
        return nullptr;
    }
    return std::make_unique<PromptWindow>(member, windows == Windows::all || !second);
}

// A queue whose work is done at once, in the order of the calls; every signal must have been given before it is
// awaited.
class PromptQueue : public device::Queue {
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
    void signal(std::size_t index, int) override {
        if (in_part_) fail("signal {} is given within a part", index);
        given_.at(index) = true;
    }
    void await(std::size_t index, int) override {
        if (in_part_) fail("signal {} is awaited within a part", index);
        if (!given_.at(index)) fail("signal {} is awaited before it is given", index);
    }
    device::QueuedStep record_part(std::size_t number, const std::function<void()>& enqueue) override {
        if (!parts_.emplace(number, enqueue).second) fail("part {} is recorded twice", number);
        device::QueuedStep step;
        step.records = step.nodes = 1;
        return step;
    }
    void play_part(std::size_t number) override {
        in_part_ = true;
        parts_.at(number)();
        in_part_ = false;
    }
    void stamp(std::size_t, int) override {}
    double seconds(std::size_t) override { return 0.0; }
    void mark(int value, int number) override { marks_[static_cast<std::size_t>(number)] = value; }
    int marked(int number) const override { return marks_[static_cast<std::size_t>(number)]; }
    bool idle() override { return true; }
    void wait() override {}

private:
    std::vector<bool> given_;
    std::map<std::size_t, std::function<void()>> parts_;
    bool in_part_ = false;
    std::array<std::atomic<int>, device::queue_streams> marks_{};
};

class PromptDevice : public device::Device {
public:
    std::string name() const override { return "a device that is none"; }
    device::Queue* queue() override { return &queue_; }
    char* allocate(std::size_t bytes) override { return host_->allocate(bytes); }
    void release(char* memory) noexcept override { host_->release(memory); }
    void fill(void* target, int byte, std::size_t bytes) override { host_->fill(target, byte, bytes); }
    void write(void* target, const void* source, std::size_t bytes) override { host_->write(target, source, bytes); }
    void read(void* target, const void* source, std::size_t bytes) override { host_->read(target, source, bytes); }

private:
    std::unique_ptr<device::Device> host_ = device::open_host();
    PromptQueue queue_;
};

// Work that is queued never ends.
class StuckQueue : public PromptQueue {
public:
    bool idle() override { return false; }
};
class StuckDevice : public PromptDevice {
public:
    device::Queue* queue() override { return &stuck_; }

private:
    StuckQueue stuck_;
};

// Says of every step what it would have taken.
class ClockedQueue : public PromptQueue {
public:
    void reserve(std::size_t stamps, std::size_t signals) override {
        works_ = stamps - 1; // one stamp lies before the first
        PromptQueue::reserve(stamps, signals);
    }
    void play(bool stamped, const std::function<void()>& enqueue) override {
        PromptQueue::play(stamped, enqueue);
        stamped_ = stamped;
    }
    double played_seconds() override { return clocked.launch + seconds(works_); }
    double seconds(std::size_t stamp) override {
        return static_cast<double>(stamp) * (clocked.op + (stamped_ ? clocked.stamp : 0.0));
    }

private:
    std::size_t works_ = 0;
    bool stamped_ = false;
};
class ClockedDevice : public PromptDevice {
public:
    device::Queue* queue() override { return &clocked_; }

private:
    ClockedQueue clocked_;
};

} // namespace

Departures departures() {
    const std::lock_guard<std::mutex> lock(halls().mutex);
    return halls().departures;
}

const comm::CollectiveLibrary& prompt_library() {
    static const comm::CollectiveLibrary all{meeting_point, join,           leave,      abandon,     trouble,
                                             all_gather,    reduce_scatter, all_reduce, begin_group, end_group,
                                             send,          recv,           copy};
    return all;
}

const comm::CollectiveLibrary& prompt_library(Windows windows) {
    static const auto with = [](auto function) {
        comm::CollectiveLibrary all = prompt_library();
        all.slot_window = function;
        return all;
    };
    static const comm::CollectiveLibrary all = with(slot_window<Windows::all>),
                                         refused = with(slot_window<Windows::one_refused>),
                                         closed = with(slot_window<Windows::one_closed>);
    return windows == Windows::all ? all : windows == Windows::one_refused ? refused : closed;
}

std::int64_t bytes_in_chunks() { return chunk_bytes; }

const ops::Backend& prompt_backend() {
    static const ops::Backend backend = [] {
        ops::Backend b = backends::cpu_backend();
        b.name = "prompt";
        b.open = [](bool, int) -> std::unique_ptr<device::Device> { return std::make_unique<PromptDevice>(); };
        b.devices = [] { return 16; };
        b.collectives = prompt_library;
        return b;
    }();
    return backend;
}

std::unique_ptr<device::Device> open_stuck(bool, int) { return std::make_unique<StuckDevice>(); }
std::unique_ptr<device::Device> open_clocked(bool, int) { return std::make_unique<ClockedDevice>(); }
