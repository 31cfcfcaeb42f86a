// A thread that compares where ranks stand with where they stood half a second ago.
#include "engine/run/watchdog.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>

namespace moe::run {

namespace {

constexpr double seconds_per_look = 0.5, patience_with_gone = 2.0;

} // namespace

Watchdog::Watchdog(int ranks, double patience_seconds, std::function<Standing(int)> standing,
                   std::function<void(const std::string&)> on_hang)
    : patience_(patience_seconds),
      standing_(std::move(standing)),
      on_hang_(std::move(on_hang)),
      ops_(static_cast<std::size_t>(ranks)),
      still_(static_cast<std::size_t>(ranks)),
      thread_([this] { watch(); }) {}

Watchdog::~Watchdog() {
    {
        const std::lock_guard<std::mutex> held(mutex_);
        ending_ = true;
    }
    wake_.notify_one();
    thread_.join();
}

void Watchdog::watch() {
    std::unique_lock<std::mutex> held(mutex_);
    while (!wake_.wait_for(held, std::chrono::duration<double>(seconds_per_look), [this] { return ending_; })) {
        for (std::size_t r = 0; r < ops_.size(); ++r) {
            const Standing now = standing_(static_cast<int>(r));
            const bool gets_on = now.waits || now.ops != ops_[r];
            still_[r] = gets_on ? 0 : still_[r] + 1;
            ops_[r] = now.ops;
            const double patience = now.gone.empty() ? patience_ : std::min(patience_, patience_with_gone);
            if (still_[r] * seconds_per_look <= patience) continue;
            if (!now.gone.empty()) return on_hang_(fmt::format("{}: {}", now.place, now.gone));
            const std::string with = now.others.empty() ? "it waits for nobody" : "it may wait for " + now.others;
            on_hang_(fmt::format("{}: hangs: nothing has ended for {:.0f} s and {}; if its work takes that long, raise "
                                 "--hang-timeout",
                                 now.place, patience_, with));
            return;
        }
    }
}

} // namespace moe::run
