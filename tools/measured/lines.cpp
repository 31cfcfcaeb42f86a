// Cuts text into lines without colours, whatever pieces it comes in.
#include "tools/measured/log_reader.hpp"

#include <algorithm>

namespace moe::tools {

namespace {

constexpr std::size_t most_line_bytes = 1 << 16;
constexpr char escape = '\x1b';

// A copy without the control sequences of terminals: ESC [ .. letter, and a lone ESC with the character behind it.
void remove_colours(std::string& line) {
    std::size_t kept = 0;
    for (std::size_t at = 0; at < line.size(); ++at) {
        if (line[at] != escape) {
            line[kept++] = line[at];
            continue;
        }
        if (++at >= line.size() || line[at] != '[') continue;
        while (at + 1 < line.size() && (line[at + 1] < '@' || line[at + 1] > '~')) ++at;
        ++at;
    }
    line.resize(kept);
}

} // namespace

bool for_each_line(const NextPiece& next, const std::function<void(std::string_view)>& line) {
    std::string current;
    const auto finish = [&] {
        if (current.find(escape) != std::string::npos) remove_colours(current);
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
