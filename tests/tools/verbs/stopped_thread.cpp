// Single threads are stopped by ptrace: signals stop whole processes.
#include "tests/tools/verbs/stopped_thread.hpp"

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <thread>

namespace moe::test {

pid_t thread_named(pid_t process, const std::string& name) {
    std::error_code gone;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(process) + "/task", gone)) {
        std::string found;
        std::getline(std::ifstream(entry.path() / "comm"), found);
        if (found == name) return static_cast<pid_t>(std::stol(entry.path().filename().string()));
    }
    return 0;
}

bool stop_thread(pid_t thread) {
    if (::ptrace(PTRACE_SEIZE, thread, nullptr, nullptr) != 0) return false;
    int status = 0;
    return ::ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr) == 0 && ::waitpid(thread, &status, __WALL) == thread &&
           WIFSTOPPED(status);
}

bool await_end(pid_t process, pid_t thread, double seconds) {
    using Clock = std::chrono::steady_clock;
    const auto start = Clock::now();
    bool in_time = true;
    for (int status = 0;;) {
        const pid_t seen = ::waitpid(thread, &status, __WALL | WNOHANG);
        if (seen < 0 && errno == ECHILD) return in_time;
        if (seen == thread && (WIFEXITED(status) || WIFSIGNALED(status))) return in_time;
        if (std::chrono::duration<double>(Clock::now() - start).count() > seconds && in_time) {
            in_time = false;
            ::kill(process, SIGKILL);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
}

} // namespace moe::test
