// Prints results, log lines and the progress line of the verbs.
#include "tools/print/console.hpp"

#include "planner/base/error.hpp"
#include "tools/print/terminal.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <system_error>
#include <utility>

namespace moe::tools {

namespace {
thread_local Listener* current = nullptr;

bool progress_as_lines() {
    const char* wish = std::getenv("MOE_PLAN_PROGRESS");
    return wish != nullptr && std::string_view(wish) == "lines";
}

} // namespace

Listener* listener() { return current; }

Listening::Listening(Listener& listener) : before_(std::exchange(current, &listener)) {}

Listening::~Listening() { current = before_; }

void print(std::string_view text) {
    if (current != nullptr) return current->printed(text);
    const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
    if (!written || std::fflush(stdout) != 0)
        fail("cannot write to stdout: {}", std::generic_category().message(errno));
}

Console::~Console() { clear(); }

int Console::stream() const { return output_.json ? STDERR_FILENO : STDOUT_FILENO; }

void Console::clear() {
    if (!shown_) return;
    std::fputs("\r\033[K", stderr);
    std::fflush(stderr);
    shown_ = false;
}

void Console::warning(std::string_view text) {
    if (silent_) return;
    if (listener_ != nullptr) return listener_->noted(text);
    clear();
    std::fputs(fmt::format("{}\n", inked(text, Ink::warning, STDERR_FILENO)).c_str(), stderr);
}

void Console::line(std::string_view text) {
    if (silent_ || (output_.json && output_.quiet)) return;
    if (listener_ != nullptr && output_.json) return listener_->noted(text);
    clear();
    const std::string whole = fmt::format("{}\n", text);
    if (output_.json)
        std::fputs(whole.c_str(), stderr);
    else
        print(whole);
}

void Console::table(const Table& table, int indent) {
    const int width = output_.verbose ? std::numeric_limits<int>::max() : width_of(stream());
    const Table::Fitted fitted = table.fitted(width, indent);
    const std::size_t end = fitted.text.find('\n');
    const std::string_view text(fitted.text);
    std::string whole = inked(text.substr(0, end), Ink::strong, stream());
    if (end != std::string_view::npos) whole += text.substr(end);
    line(whole);
    if (fitted.dropped.empty()) return;
    const std::string note =
        fmt::format("(columns left out: {}; --verbose shows them)", fmt::join(fitted.dropped, ", "));
    const std::string margin(static_cast<std::size_t>(indent), ' ');
    for (const std::string& part : wrapped(note, static_cast<std::size_t>(width - indent)))
        line(inked(margin + part, Ink::faint, stream()));
}

void Console::progress(std::string_view text) {
    if (listener_ != nullptr) return listener_->progress(text);
    if (silent_ || output_.quiet) return;
    if (progress_as_lines()) {
        const auto now = std::chrono::steady_clock::now();
        if (now < next_line_) return;
        next_line_ = now + std::chrono::milliseconds(200);
        std::fputs(fmt::format("progress: {}\n", text).c_str(), stderr);
        return;
    }
    if (!is_terminal(STDERR_FILENO)) return;
    std::fputs(fmt::format("\r\033[K{}", text).c_str(), stderr);
    std::fflush(stderr);
    shown_ = true;
}

} // namespace moe::tools
