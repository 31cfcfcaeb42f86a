// Who takes what a verb prints in place of the standard streams: a program that calls verbs in its own process.
#pragma once

#include <string_view>

namespace moe::tools {

class Listener {
public:
    virtual ~Listener() = default;
    // What the command writes to stdout: with --json the one document, whole.
    virtual void printed(std::string_view text) = 0;
    // A line that the command writes to stderr, a warning for instance, without its line feed.
    virtual void noted(std::string_view line) = 0;
    // The progress line. Any thread of the verb may call it, one at a time; what it throws ends the verb.
    virtual void progress(std::string_view line) = 0;
};

// The listener of this thread, nullptr where the standard streams serve.
Listener* listener();

// While it lives, verbs that this thread calls speak to the listener.
class Listening {
public:
    explicit Listening(Listener& listener);
    ~Listening();
    Listening(const Listening&) = delete;
    Listening& operator=(const Listening&) = delete;

private:
    Listener* before_;
};

} // namespace moe::tools
