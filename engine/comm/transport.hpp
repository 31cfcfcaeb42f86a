// Messages between the processes of a run, over TCP: who is there, what has come, and who has fallen silent.
#pragma once

#include "engine/comm/launch.hpp"
#include "engine/comm/meeting.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace moe::comm {

// One process. Every pair of processes has a connection. A thread reads whatever comes, so that nobody who sends waits
// for a reader, and says once a second that this process lives. A process that dies (its connection closes), stops (it
// is silent for `patience` seconds) or fails (it says so) ends the wait of all others.
class Transport {
public:
    struct Limits {
        double meeting = 120.0; // seconds until all processes have come
        double patience = 15.0; // seconds of silence after which a process counts as stopped
    };

    // Meets the other processes. `fingerprint`: of what all must have in common. Throws Error: (bad_input) where
    // processes disagree, (failure) where some do not come.
    Transport(const Launch& launch, std::uint64_t fingerprint, Limits limits);
    Transport(const Launch& launch, std::uint64_t fingerprint) : Transport(launch, fingerprint, Limits{}) {}
    ~Transport();
    Transport(const Transport&) = delete;
    Transport& operator=(const Transport&) = delete;

    int rank() const { return rank_; }
    int world() const { return static_cast<int>(peers_.size()); }
    // A word that all processes of this run share and no other run has.
    const std::string& run() const { return run_; }

    // Messages of one (sender, channel) arrive in order. A message to oneself is one like any other.
    void send(int to, std::uint64_t channel, const void* data, std::size_t bytes);
    // Waits for the next message, which must have out.size() bytes. Throws Error (failure) naming the rank that cannot
    // send it any more.
    void receive(int from, std::uint64_t channel, std::span<char> out);
    std::vector<char> receive(int from, std::uint64_t channel); // receives a message of any length
    double waited() const { return waited_; }                   // seconds in receive(), for the thread that calls it

    // True where a send or receive waits just now, or did within the last second and a half. For any thread.
    bool waits() const;

    // Between all processes; called by all in the same order.
    void broadcast(int root, std::span<char> data);
    std::vector<std::vector<char>> gather(int root, std::span<const char> data); // data of all ranks, only at the root
    bool any(bool here);
    // Says farewell and waits for that of the others, so that what is under way still arrives.
    void close();
    // Throws as a wait for them would where another process has died, stopped or failed.
    void check_peers();
    std::string gone(); // what check_peers() would say, or why another process has ended the run; empty while all live
    // Tells the others why this process ends; their waits throw Aborted, and aborted() says why.
    void abort(const std::string& why);
    std::string aborted(); // reason of an abort; empty while all is well

private:
    struct Peer {
        int socket = -1;
        std::mutex sending;
        std::map<std::uint64_t, std::deque<std::vector<char>>> mail; // messages by channel; mutex_ guards the rest
        std::vector<std::vector<char>> empty;                        // buffers to use again
        std::chrono::steady_clock::time_point heard;
        bool closed = false, farewell = false;
        std::string why; // why this process closed the connection
    };
    // The part of a message that has come so far.
    struct Arrival {
        std::uint64_t header[2] = {0, 0};
        std::size_t have = 0; // bytes of header and data that have come
        std::vector<char> data;
    };

    void read_loop();
    bool read_some(int peer, Arrival& arrival);
    static bool make_room(Arrival& arrival);
    bool end_of(Peer& peer, std::string why);
    void deliver(int peer, Arrival& arrival);
    void beat();
    void look(int from);
    bool push(int to, const void* data, std::size_t bytes);
    void check(int from);
    std::vector<char> take(int from, std::uint64_t channel);

    int rank_ = 0;
    Limits limits_;
    std::string run_;
    std::vector<std::unique_ptr<Peer>> peers_; // peers by rank; this process has no socket
    std::mutex mutex_;
    std::condition_variable arrived_;
    std::string aborted_; // the first reason that another process gave
    Socket listener_;     // rank 0's: who still calls is told that the run has begun
    std::thread reader_;
    std::atomic<bool> ending_{false};
    int wake_[2] = {-1, -1}; // pipe that ends the reader's wait
    double waited_ = 0.0;
    std::atomic<std::chrono::steady_clock::rep> looked_{0}; // time when a waiting send or receive last looked
};

} // namespace moe::comm
