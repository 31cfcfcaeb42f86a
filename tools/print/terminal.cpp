// Asks the system about terminals and writes ANSI codes.
#include "tools/print/terminal.hpp"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

namespace moe::tools {

namespace {

constexpr int usual_width = 80;

const char* code_of(Ink ink) {
    switch (ink) {
    case Ink::strong:
        return "1";
    case Ink::faint:
        return "2";
    case Ink::warning:
        return "33";
    case Ink::error:
        return "31";
    }
    return "0";
}

} // namespace

bool is_terminal(int descriptor) { return ::isatty(descriptor) != 0; }

int width_of(int descriptor) {
    struct winsize size {};
    if (!is_terminal(descriptor) || ::ioctl(descriptor, TIOCGWINSZ, &size) != 0) return usual_width;
    return std::max(usual_width, static_cast<int>(size.ws_col));
}

bool takes_colour(int descriptor) {
    const char* refused = std::getenv("NO_COLOR");
    const char* kind = std::getenv("TERM");
    const bool dumb = kind == nullptr || std::string_view(kind) == "dumb";
    return is_terminal(descriptor) && (refused == nullptr || *refused == '\0') && !dumb;
}

std::string inked(std::string_view text, Ink ink, int descriptor) {
    if (!takes_colour(descriptor) || text.empty()) return std::string(text);
    return std::string("\033[") + code_of(ink) + "m" + std::string(text) + "\033[0m";
}

} // namespace moe::tools
