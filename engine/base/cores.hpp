// The gang of ranks of one process: a thread per rank, of which only as many run as there are cores.
//
// A rank runs while it holds one of `permits` permits and gives it back only while it waits for other ranks, so that
// the duration of an op is the op's own and not that of its neighbours. Permits pass on in the order in which ranks
// became ready; at the start of a job that is the order of ranks. Waiting blocks on a condition variable and never
// spins.
#pragma once

#include "planner/base/error.hpp"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moe::engine {

// Thrown in ranks that wait while another rank fails; the failure itself is reported by Cores::run.
class Aborted : public std::exception {
public:
    const char* what() const noexcept override { return "another rank failed"; }
};

class Cores {
public:
    using Lock = std::unique_lock<std::mutex>;

    // permits = 0: min(ranks, hardware threads).
    Cores(int ranks, int permits = 0);
    ~Cores();
    Cores(const Cores&) = delete;
    Cores& operator=(const Cores&) = delete;

    int ranks() const { return static_cast<int>(members_.size()); }
    int permits() const { return permits_; }

    // Runs job(rank) on every rank's thread and returns when all have ended. Rethrows the first failure; after one the
    // gang stays broken and every later call throws it again.
    void run(const std::function<void(int rank)>& job);

    // The lock of communicators. The lock guards all shared state of a communicator, so that no wake-up is lost.
    Lock lock() { return Lock(mutex_); }
    // Gives the permit away until unpark(rank), then waits for a permit. `what` (a literal) names the wait in the line
    // that reports a deadlock. Throws Aborted when another rank fails.
    void park(Lock& held, int rank, const char* what);
    // Throws Aborted when another rank has failed. Call with the lock held.
    void check() const {
        if (failure_) throw Aborted();
    }
    // The failure that ends all ranks, where it cannot wait until its rank's job has ended. The first one stays. Call
    // with the lock held.
    void set_failure(std::exception_ptr failure);
    // The rank may go on as soon as a permit is free. Call with the lock held, once per park().
    void unpark(int rank);
    // Seconds that a rank has waited in park() for others and for a permit since its thread began. The time that its
    // thread then takes to wake up is not waiting: the core is held meanwhile, and nobody else can use it. Only for
    // that rank's own thread, or between jobs.
    double waited(int rank) const { return members_[static_cast<std::size_t>(rank)].waited; }
    // True where the rank does not run just now: it is parked, or waits for a permit. For any thread; never blocks, and
    // says no where another thread holds the lock.
    bool waits(int rank) const;

private:
    enum class State { idle, ready, running, parked };
    static constexpr int no_core = -1; // core number of a permit that is not bound to a core
    struct Member {
        State state = State::idle;
        int core = no_core; // core of the permit that the rank holds, or held last
        std::condition_variable wake;
        const char* waits_for = "";
        std::chrono::steady_clock::time_point granted;
        double waited = 0.0;
    };

    void work(int rank);
    void grant(); // hands free permits to the first ready ranks; the caller holds the lock
    void give_back(Member& member);
    void bind(int rank, int core);
    void check_deadlock();

    std::vector<Member> members_;
    std::vector<std::thread> threads_;
    std::vector<int> ready_; // ready ranks, first come first; room for all members, so that it never grows
    mutable std::mutex mutex_;
    std::condition_variable all_idle_;
    const std::function<void(int)>* job_ = nullptr;
    std::exception_ptr failure_;
    std::vector<int> free_; // cores of the permits that nobody holds
    int permits_ = 1, active_ = 0;
    bool closing_ = false;
};

} // namespace moe::engine
