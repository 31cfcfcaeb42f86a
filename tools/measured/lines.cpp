// Cuts text into lines without colours, whatever pieces it comes in.
#include "planner/base/digit.hpp"
#include "tools/measured/log_reader.hpp"

#include <algorithm>

namespace moe::tools {

namespace {

constexpr std::size_t most_line_bytes = 1 << 16;
constexpr char escape = '\x1b';

// Length of "[32m" or "[1;36m" at this place, 0 where there is none: what is left of a colour whose ESC was lost. Its
// first number is one of those that set or end a colour or a face.
std::size_t bare_colour(std::string_view text) {
    std::size_t at = 1;
    int code = 0;
    for (; at < text.size() && at < 4 && is_digit(text[at]); ++at) code = 10 * code + (text[at] - '0');
    const bool face = at > 1 && (code <= 9 || (code >= 21 && code <= 49) || (code >= 90 && code <= 107));
    while (face && at < text.size() && at < 20 && (is_digit(text[at]) || text[at] == ';')) ++at;
    return face && at < text.size() && text[at] == 'm' ? at + 1 : 0;
}

// Length of what stands for ESC at this place in logs that other programs have quoted: ^[ or its number.
std::size_t written_escape(std::string_view text) {
    for (const std::string_view written : {"^[", "\\x1b", "\\x1B", "\\033", "\\u001b", "\\u001B"})
        if (text.starts_with(written)) return written.size();
    return 0;
}

// A copy without the control sequences of terminals: ESC [ .. letter, and a lone ESC with the character behind it;
// and without colours whose ESC was lost or is written out.
void remove_colours(std::string& line) {
    const std::string_view text = line;
    std::size_t kept = 0;
    for (std::size_t at = 0; at < line.size(); ++at) {
        if (line[at] == escape) {
            if (++at >= line.size() || line[at] != '[') continue;
            while (at + 1 < line.size() && (line[at + 1] < '@' || line[at + 1] > '~')) ++at;
            ++at;
            continue;
        }
        const std::size_t before = line[at] == '^' || line[at] == '\\' ? written_escape(text.substr(at)) : 0;
        const std::size_t colour =
            at + before < line.size() && line[at + before] == '[' ? bare_colour(text.substr(at + before)) : 0;
        if (colour > 0)
            at += before + colour - 1;
        else
            line[kept++] = line[at];
    }
    line.resize(kept);
}

} // namespace

bool for_each_line(const NextPiece& next, const std::function<void(std::string_view)>& line) {
    std::string current;
    const auto finish = [&] {
        if (current.find_first_of("\x1b[") != std::string::npos) remove_colours(current);
        if (!current.empty()) line(current);
        current.clear();
    };
    bool ended = true;
    for (std::string_view piece = next(); !piece.empty(); piece = next()) {
        while (!piece.empty()) {
            const std::size_t end = piece.find_first_of("\n\r");
            const std::string_view part = piece.substr(0, end);
            current.append(part.substr(0, most_line_bytes - std::min(most_line_bytes, current.size())));
            ended = end != std::string_view::npos;
            piece.remove_prefix(ended ? end + 1 : piece.size());
            if (ended) finish();
        }
    }
    return ended;
}

} // namespace moe::tools
