// Starts the command again by its own path, with progress as lines, and reads both of its streams until it ends.
#include "tools/ui/worker.hpp"

#include "planner/base/error.hpp"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <system_error>

namespace moe::tools::ui {

namespace {

class Pipe {
public:
    Pipe() {
        if (pipe2(ends_.data(), O_CLOEXEC) != 0) fail("no pipe: {}", std::generic_category().message(errno));
    }
    ~Pipe() {
        close_write();
        close(ends_[0]);
    }
    Pipe(const Pipe&) = delete;
    Pipe& operator=(const Pipe&) = delete;
    int read_end() const { return ends_[0]; }
    int write_end() const { return ends_[1]; }
    void close_write() {
        if (ends_[1] >= 0) close(ends_[1]);
        ends_[1] = -1;
    }

private:
    std::array<int, 2> ends_{};
};

std::vector<char*> pointers(const std::vector<std::string>& words) {
    std::vector<char*> list;
    for (const std::string& word : words) list.push_back(const_cast<char*>(word.c_str()));
    list.push_back(nullptr);
    return list;
}

std::string own_path() {
    std::array<char, 4096> path{};
    const ssize_t length = readlink("/proc/self/exe", path.data(), path.size());
    if (length <= 0) fail("cannot find the command's own file: /proc/self/exe does not tell it");
    return {path.data(), static_cast<std::size_t>(length)};
}

// The process of `words`, first of a group of its own so that all of it can be ended.
pid_t start(const std::vector<std::string>& words, const std::string& folder, const Pipe& out, const Pipe& err) {
    std::vector<std::string> environment{"MOE_PLAN_PROGRESS=lines", "NO_COLOR=1"};
    for (char** entry = environ; *entry != nullptr; ++entry) environment.emplace_back(*entry);
    const std::string path = own_path();
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&files, out.write_end(), STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, err.write_end(), STDERR_FILENO);
    posix_spawn_file_actions_addchdir_np(&files, folder.c_str());
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    sigset_t none;
    sigemptyset(&none);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
    pid_t child = 0;
    const int error =
        posix_spawn(&child, path.c_str(), &files, &attributes, pointers(words).data(), pointers(environment).data());
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&files);
    if (error != 0) fail("cannot start {}: {}", path, std::generic_category().message(error));
    return child;
}

// Hands over the whole lines of `text`, and keeps the rest.
void take_lines(std::string& text, const WorkerCalls& calls, WorkerResult& result) {
    for (std::size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n')) {
        result.last_line = text.substr(0, end);
        calls.line(result.last_line);
        text.erase(0, end + 1);
    }
}

} // namespace

WorkerResult run_worker(const std::vector<std::string>& words, const std::string& folder, const WorkerCalls& calls,
                        std::chrono::seconds longest, std::size_t most) {
    std::vector<std::string> command{"moe-plan"};
    command.insert(command.end(), words.begin(), words.end());
    Pipe out, err;
    const pid_t child = start(command, folder, out, err);
    out.close_write();
    err.close_write();
    const auto deadline = std::chrono::steady_clock::now() + longest;
    WorkerResult result;
    std::string lines, why;
    std::array<pollfd, 2> streams{{{out.read_end(), POLLIN, 0}, {err.read_end(), POLLIN, 0}}};
    while (streams[0].fd >= 0 || streams[1].fd >= 0) {
        poll(streams.data(), streams.size(), 100);
        for (pollfd& stream : streams) {
            if (stream.fd < 0 || stream.revents == 0) continue;
            std::array<char, 65536> piece;
            const ssize_t count = read(stream.fd, piece.data(), piece.size());
            if (count <= 0) {
                stream.fd = -1;
                continue;
            }
            std::string& text = stream.fd == out.read_end() ? result.out : lines;
            text.append(piece.data(), static_cast<std::size_t>(count));
        }
        take_lines(lines, calls, result);
        result.cancelled = calls.cancelled();
        if (result.out.size() + lines.size() > most) why = "the answer is too long";
        if (std::chrono::steady_clock::now() > deadline) why = fmt::format("not done after {} s", longest.count());
        if (result.cancelled || !why.empty()) {
            kill(-child, SIGKILL);
            break;
        }
    }
    int state = 0;
    while (waitpid(child, &state, 0) < 0 && errno == EINTR) {
    }
    result.status = WIFEXITED(state) && why.empty() ? WEXITSTATUS(state) : 1;
    if (!why.empty()) result.last_line = "moe-plan: " + why;
    return result;
}

} // namespace moe::tools::ui
