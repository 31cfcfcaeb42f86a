// Independent pieces of work on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace moe {

// asked: 0 = as many as the machine has.
inline std::size_t thread_count(int asked) {
    if (asked > 0) return static_cast<std::size_t>(asked);
    return std::max(1U, std::thread::hardware_concurrency());
}

// The calling thread and helpers that stay from one run to the next: an allocator keeps what a thread has freed for
// that thread, and loses it with the thread. For one caller at a time.
class Workers {
public:
    explicit Workers(std::size_t threads) {
        for (std::size_t i = 1; i < threads; ++i) helpers_.emplace_back([this, i] { help(i); });
    }
    ~Workers() {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        begins_.notify_all();
        for (std::thread& helper : helpers_) helper.join();
    }
    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    std::size_t size() const { return helpers_.size() + 1; }

    // Runs work(worker, 0) ... work(worker, count-1), worker < size(), and passes on the first exception by index.
    template <class Work>
    void run(std::size_t count, const Work& work) {
        std::atomic<std::size_t> next{0};
        std::vector<std::exception_ptr> errors(count);
        const std::function<void(std::size_t)> loop = [&](std::size_t worker) {
            for (std::size_t i = next++; i < count; i = next++) {
                try {
                    work(worker, i);
                } catch (...) {
                    errors[i] = std::current_exception();
                }
            }
        };
        begin(loop, std::min(helpers_.size(), std::max<std::size_t>(count, 1) - 1));
        loop(0);
        end();
        for (const std::exception_ptr& error : errors)
            if (error) std::rethrow_exception(error);
    }

private:
    void begin(const std::function<void(std::size_t)>& loop, std::size_t helpers) {
        {
            const std::lock_guard lock(mutex_);
            loop_ = &loop;
            wanted_ = helpers;
        }
        for (std::size_t i = 0; i < helpers; ++i) begins_.notify_one();
    }
    // Helpers that have not come by now find nothing left to do.
    void end() {
        std::unique_lock lock(mutex_);
        wanted_ = 0;
        ends_.wait(lock, [this] { return busy_ == 0; });
    }
    void help(std::size_t worker) {
        std::unique_lock lock(mutex_);
        while (true) {
            begins_.wait(lock, [this] { return stop_ || wanted_ > 0; });
            if (stop_) return;
            --wanted_;
            ++busy_;
            const std::function<void(std::size_t)>& loop = *loop_;
            lock.unlock();
            loop(worker);
            lock.lock();
            if (--busy_ == 0) ends_.notify_one();
        }
    }

    std::vector<std::thread> helpers_;
    std::mutex mutex_;
    std::condition_variable begins_, ends_;
    const std::function<void(std::size_t)>* loop_ = nullptr;
    std::size_t wanted_ = 0, busy_ = 0; // helpers that the run still takes, and those at work
    bool stop_ = false;
};

// One run of workers of its own.
template <class Work>
void in_parallel(std::size_t count, std::size_t threads, const Work& work) {
    Workers(std::min(threads, count)).run(count, work);
}

} // namespace moe
