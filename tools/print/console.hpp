// Where a verb's words go: results to stdout, everything else to stderr, a progress line only where a person looks.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <utility>

namespace moe::tools {

// Writes to stdout at once; throws Error (failure) when that fails (a full disk, a closed pipe).
void print(std::string_view text);

class Console {
public:
    // json: stdout belongs to the one document, so that what would be printed goes to stderr. silent: one of several
    // processes, another of which speaks.
    explicit Console(bool json, bool silent = false) : json_(json), silent_(silent) {}
    ~Console();
    Console(const Console&) = delete;
    Console& operator=(const Console&) = delete;

    // A line of the human-readable result or log.
    template <class... Args>
    void say(fmt::format_string<Args...> text, Args&&... args) {
        line(fmt::format(text, std::forward<Args>(args)...));
    }
    void line(std::string_view text);
    // A line to stderr.
    template <class... Args>
    void warn(fmt::format_string<Args...> text, Args&&... args) {
        warning(fmt::format(text, std::forward<Args>(args)...));
    }
    // Replaces the progress line; nothing happens unless stderr is a terminal.
    void progress(std::string_view text);

private:
    void clear();
    void warning(std::string_view text);
    bool json_, silent_;
    bool shown_ = false; // a progress line stands on the terminal
};

} // namespace moe::tools
