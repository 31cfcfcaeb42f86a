// Prints results, log lines and the progress line of the verbs.
#include "tools/print/console.hpp"

#include "planner/base/error.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace moe::tools {

void print(std::string_view text) {
    const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
    if (!written || std::fflush(stdout) != 0)
        fail("cannot write to stdout: {}", std::generic_category().message(errno));
}

Console::~Console() { clear(); }

void Console::clear() {
    if (!shown_) return;
    std::fputs("\r\033[K", stderr);
    std::fflush(stderr);
    shown_ = false;
}

void Console::warning(std::string_view text) {
    if (silent_) return;
    clear();
    std::fputs(fmt::format("{}\n", text).c_str(), stderr);
}

void Console::line(std::string_view text) {
    if (silent_) return;
    clear();
    const std::string whole = fmt::format("{}\n", text);
    if (json_)
        std::fputs(whole.c_str(), stderr);
    else
        print(whole);
}

void Console::progress(std::string_view text) {
    if (silent_ || ::isatty(STDERR_FILENO) == 0) return;
    std::fputs(fmt::format("\r\033[K{}", text).c_str(), stderr);
    std::fflush(stderr);
    shown_ = true;
}

} // namespace moe::tools
