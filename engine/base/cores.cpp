// Hand-over of permits between the ranks of one process, and the end of all of them when one fails.
#include "engine/base/cores.hpp"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include <pthread.h>
#include <sched.h>

namespace moe::engine {

namespace {

// The core of each permit: all cores that this process may use, when it uses all of them and ranks have to take turns.
// Anything else is left to the operating system, which sees what other processes do.
std::vector<int> permit_cores(int permits, int ranks) {
    std::vector<int> cores;
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (ranks > permits && ::sched_getaffinity(0, sizeof allowed, &allowed) == 0)
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &allowed)) cores.push_back(core);
    if (static_cast<int>(cores.size()) != permits) cores.assign(static_cast<std::size_t>(permits), -1);
    return cores;
}

} // namespace

Cores::Cores(int ranks, int permits) : members_(static_cast<std::size_t>(std::max(1, ranks))) {
    const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    permits_ = std::min(this->ranks(), permits > 0 ? permits : cores);
    free_ = permit_cores(permits_, this->ranks());
    ready_.reserve(members_.size());
    threads_.reserve(members_.size());
    try {
        for (int rank = 0; rank < this->ranks(); ++rank) threads_.emplace_back([this, rank] { work(rank); });
    } catch (const std::system_error& error) {
        {
            const Lock held = lock();
            closing_ = true;
            for (Member& member : members_) member.wake.notify_all();
        }
        for (std::thread& thread : threads_) thread.join();
        fail("cannot start thread {} of {}: {}; use fewer ranks", threads_.size() + 1, ranks, error.what());
    }
}

Cores::~Cores() {
    {
        const Lock held = lock();
        closing_ = true;
        for (Member& member : members_) member.wake.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
}

void Cores::run(const std::function<void(int)>& job) {
    Lock held = lock();
    if (failure_) std::rethrow_exception(failure_);
    job_ = &job;
    active_ = ranks();
    for (int rank = 0; rank < ranks(); ++rank) {
        members_[static_cast<std::size_t>(rank)].state = State::ready;
        ready_.push_back(rank);
    }
    grant();
    all_idle_.wait(held, [this] { return active_ == 0; });
    job_ = nullptr;
    if (failure_) std::rethrow_exception(failure_);
}

void Cores::work(int rank) {
    Member& self = members_[static_cast<std::size_t>(rank)];
    Lock held = lock();
    while (true) {
        self.wake.wait(
            held, [&] { return closing_ || self.state == State::running || (failure_ && self.state == State::ready); });
        if (closing_) return;
        const bool permit = self.state == State::running;
        if (permit) {
            const std::function<void(int)>& job = *job_;
            held.unlock();
            std::exception_ptr failure;
            try {
                job(rank);
            } catch (const Aborted&) {
                // The rank that failed has reported already.
            } catch (...) {
                failure = std::current_exception();
            }
            held.lock();
            if (failure) set_failure(failure);
        }
        if (self.state == State::running) give_back(self);
        self.state = State::idle;
        grant();
        check_deadlock();
        if (--active_ == 0) all_idle_.notify_one();
    }
}

void Cores::park(Lock& held, int rank, const char* what) {
    using Clock = std::chrono::steady_clock;
    check();
    const Clock::time_point start = Clock::now();
    Member& self = members_[static_cast<std::size_t>(rank)];
    self.state = State::parked;
    self.waits_for = what;
    give_back(self);
    grant();
    check_deadlock();
    self.wake.wait(held, [&] { return failure_ || self.state == State::running; });
    if (self.state != State::running) {
        // Woken by a failure: the rank unwinds beside the others without a permit.
        self.state = State::idle;
        throw Aborted();
    }
    check();
    self.waited += std::chrono::duration<double>(self.granted - start).count();
}

void Cores::unpark(int rank) {
    Member& member = members_[static_cast<std::size_t>(rank)];
    if (member.state != State::parked) return;
    member.state = State::ready;
    ready_.push_back(rank);
    grant();
}

bool Cores::waits(int rank) const {
    const Lock held(mutex_, std::try_to_lock);
    return held && members_[static_cast<std::size_t>(rank)].state != State::running;
}

void Cores::grant() {
    while (!free_.empty() && !ready_.empty()) {
        const int rank = ready_.front();
        Member& member = members_[static_cast<std::size_t>(rank)];
        ready_.erase(ready_.begin());
        if (member.state != State::ready) continue;
        bind(rank, free_.back());
        free_.pop_back();
        member.state = State::running;
        member.granted = std::chrono::steady_clock::now();
        member.wake.notify_one();
    }
}

void Cores::give_back(Member& member) { free_.push_back(member.core); }

// A thread that sleeps is moved by this alone: it wakes up on the core it is bound to.
void Cores::bind(int rank, int core) {
    Member& member = members_[static_cast<std::size_t>(rank)];
    if (member.core == core) return;
    member.core = core;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<std::size_t>(core), &set);
    // A rank that cannot be pinned runs all the same, only its wake-ups are slower.
    ::pthread_setaffinity_np(threads_[static_cast<std::size_t>(rank)].native_handle(), sizeof set, &set);
}

void Cores::set_failure(std::exception_ptr failure) {
    if (failure_) return;
    failure_ = std::move(failure);
    for (Member& member : members_) member.wake.notify_one();
}

// No rank runs or may run, yet some wait: nobody is left to wake them.
void Cores::check_deadlock() {
    if (failure_) return;
    for (const Member& member : members_)
        if (member.state == State::running || member.state == State::ready) return;
    std::string waits;
    for (std::size_t rank = 0; rank < members_.size(); ++rank) {
        const Member& member = members_[rank];
        if (member.state == State::parked)
            waits += fmt::format("{}rank {} waits for {}", waits.empty() ? "" : "; ", rank, member.waits_for);
    }
    if (waits.empty()) return;
    set_failure(std::make_exception_ptr(Error(Fault::failure, "deadlock: " + waits)));
}

} // namespace moe::engine
