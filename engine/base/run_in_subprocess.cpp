// A forked child that writes what its work returned, or threw, into a pipe.
#include "engine/base/run_in_subprocess.hpp"

#include "planner/base/error.hpp"

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string_view>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace moe::engine {

namespace {

constexpr char returned = 0; // first byte of an answer without an error; else the byte is the Fault

bool write_all(int file, std::string_view text) {
    while (!text.empty()) {
        const ssize_t written = ::write(file, text.data(), text.size());
        if (written < 0 && errno != EINTR) return false;
        if (written > 0) text.remove_prefix(static_cast<std::size_t>(written));
    }
    return true;
}

std::string read_all(int file) {
    std::string text;
    char piece[1 << 16];
    for (;;) {
        const ssize_t count = ::read(file, piece, sizeof piece);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return text;
        text.append(piece, static_cast<std::size_t>(count));
    }
}

std::string answer(char kind, std::string_view text) {
    std::string whole(1, kind);
    whole += text;
    return whole;
}

std::string answer_of(const std::function<std::string()>& work) {
    try {
        return answer(returned, work());
    } catch (const Error& error) {
        return answer(static_cast<char>(error.fault()), error.what());
    } catch (const std::exception& error) {
        return answer(static_cast<char>(Fault::failure), error.what());
    }
}

} // namespace

std::string run_in_subprocess(const std::function<std::string()>& work) {
    int ends[2];
    if (::pipe(ends) != 0) fail("a pipe to another process: {}", std::strerror(errno));
    const pid_t parent = ::getpid(), child = ::fork();
    if (child < 0) {
        const int why = errno;
        ::close(ends[0]);
        ::close(ends[1]);
        fail("another process: {}", std::strerror(why));
    }
    if (child == 0) {
        ::close(ends[0]);
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::getppid() != parent) ::_exit(EXIT_FAILURE); // The parent died before that call.
        const bool written = write_all(ends[1], answer_of(work));
        ::_exit(written ? EXIT_SUCCESS : EXIT_FAILURE); // _exit() skips what the parent has to do at its end.
    }
    ::close(ends[1]);
    const std::string said = read_all(ends[0]);
    ::close(ends[0]);
    int status = 0;
    while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    if (WIFSIGNALED(status)) fail("a process that measures ended by signal {}", WTERMSIG(status));
    if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS || said.empty())
        fail("a process that measures ended without an answer");
    if (said.front() != returned) throw Error(static_cast<Fault>(said.front()), said.substr(1));
    return said.substr(1);
}

} // namespace moe::engine
