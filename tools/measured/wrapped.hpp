// Joins records of a log that a terminal or a page has wrapped into several lines.
#pragma once

#include "tools/measured/log_format.hpp"

#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace moe::tools {

// A record of a log. Where it was wrapped two readings of it: pieces set side by side, as a break within a number or a
// word wants it, and with a blank between them. Else both are the line.
struct LogRecord {
    std::string_view glued, spaced;
    bool wrapped() const { return glued.data() != spaced.data(); }
};

// Gives lines on as records. A line that opens a record of a format (LogLine::opens) and lacks its end is held: up to
// the line with the end, or to where it is clear that none comes, since another record opens or too many lines follow.
// Then what a line tells by itself stays a line, and of others the lines up to another text of `until` are the record.
class Unwrapper {
public:
    using Take = std::function<void(const LogRecord&)>;
    Unwrapper(const std::vector<LogFormat>& formats, Take take);

    void line(std::string_view line);
    void finish(); // behind the last line

private:
    const LogLine* opened_by(std::string_view line) const;
    void close(); // without its end

    std::vector<const LogLine*> kinds_; // of the formats, those that may be wrapped
    Take take_;
    const LogLine* open_ = nullptr; // kind of the record that is held
    std::vector<std::string> held_;
    std::string glued_, spaced_;
    std::size_t pieces_ = 0, glued_size_ = 0, spaced_size_ = 0; // up to another text of `until`; 0: there was none
};

} // namespace moe::tools
