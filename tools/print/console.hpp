// The console of a verb: results go to stdout, everything else to stderr, a progress line only where a person looks.
#pragma once

#include "tools/print/listener.hpp"
#include "tools/print/output.hpp"
#include "tools/print/table.hpp"

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <string_view>
#include <utility>

namespace moe::tools {

// Writes to stdout at once, or to the listener of this thread; throws Error (failure) when that fails (a full disk, a
// closed pipe).
void print(std::string_view text);

class Console {
public:
    // silent: this is one of several processes, another of which speaks.
    explicit Console(const OutputOptions& output, bool silent = false) : output_(output), silent_(silent) {}
    ~Console();
    Console(const Console&) = delete;
    Console& operator=(const Console&) = delete;

    bool verbose() const { return output_.verbose; }

    // A line of the result. With --json stdout belongs to the one document: the line goes to stderr, and with --quiet
    // nowhere.
    template <class... Args>
    void say(fmt::format_string<Args...> text, Args&&... args) {
        line(fmt::format(text, std::forward<Args>(args)...));
    }
    void line(std::string_view text);
    // A line beside the result, such as a log line or what to do next; left out with --quiet.
    template <class... Args>
    void note(fmt::format_string<Args...> text, Args&&... args) {
        if (!output_.quiet) line(fmt::format(text, std::forward<Args>(args)...));
    }
    // A table of the result, as wide as the stream allows. Names the columns that it leaves out; --verbose leaves out
    // none.
    void table(const Table& table, int indent = 0);
    // A line to stderr.
    template <class... Args>
    void warn(fmt::format_string<Args...> text, Args&&... args) {
        warning(fmt::format(text, std::forward<Args>(args)...));
    }
    // Replaces the progress line; nothing happens unless stderr is a terminal, nor with --quiet. A program that reads
    // stderr sets MOE_PLAN_PROGRESS=lines: then each is a line of its own behind "progress: ", five a second at most. A
    // listener gets all.
    void progress(std::string_view text);

private:
    int stream() const; // descriptor that lines go to
    void clear();
    void warning(std::string_view text);
    OutputOptions output_;
    Listener* listener_ = listener(); // of the thread that made the console
    bool silent_;
    bool shown_ = false;                                // whether a progress line stands on the terminal
    std::chrono::steady_clock::time_point next_line_{}; // of progress as lines
};

} // namespace moe::tools
