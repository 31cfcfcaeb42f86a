// Notices a rank that lives but gets no further: inside an op, not waiting for others, and without end.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace moe::run {

// The standing of a rank, seen from another thread.
struct Standing {
    std::uint64_t ops = 0; // ops begun and ended so far: the count changes whenever the rank gets on
    bool waits = false;    // whether it waits for another rank, a core or its next step: not its own fault
    std::string place;     // "rank 5: gemm (layer 3, slot 7)"
    std::string others;    // "rank 1": who takes part in what a device does there; empty where it does it alone
    std::string gone = {}; // "rank 1 has died: ...": why the run cannot go on, whatever this rank does
};

// Looks at every rank of this process twice a second. Time is counted in looks, so that a process that was suspended
// as a whole is not taken for one that hangs.
class Watchdog {
public:
    // standing(i) of `ranks` ranks. Where another has gone, a rank that is still for two seconds may be waiting for it
    // in a call that looks at nothing: the line says who has gone. on_hang is called once, on the watchdog's thread,
    // with a line that names rank and op; it must not return to a run that goes on as if nothing were.
    Watchdog(int ranks, double patience_seconds, std::function<Standing(int)> standing,
             std::function<void(const std::string& line)> on_hang);
    ~Watchdog();
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;

private:
    void watch();

    double patience_;
    std::function<Standing(int)> standing_;
    std::function<void(const std::string&)> on_hang_;
    std::vector<std::uint64_t> ops_; // ops by rank, at the last look
    std::vector<int> still_;         // looks by rank since it got on
    std::mutex mutex_;
    std::condition_variable wake_;
    bool ending_ = false;
    std::thread thread_;
};

} // namespace moe::run
