// Holds the lines of a record that has begun until it ends, or until it is clear that it was not wrapped.
#include "tools/measured/wrapped.hpp"

#include <algorithm>
#include <utility>

namespace moe::tools {

namespace {

constexpr std::size_t most_pieces = 12, most_record_bytes = 4096;

bool contains(std::string_view line, std::string_view text) { return line.find(text) != std::string_view::npos; }
std::size_t count_of(std::string_view line, const std::vector<std::string>& texts) {
    return static_cast<std::size_t>(
        std::count_if(texts.begin(), texts.end(), [&](const std::string& text) { return contains(line, text); }));
}

} // namespace

Unwrapper::Unwrapper(const std::vector<LogFormat>& formats, Take take) : take_(std::move(take)) {
    for (const LogFormat& format : formats)
        for (const auto* lines : {&format.iterations, &format.memory})
            for (const LogLine& kind : *lines)
                if (!kind.from.empty()) kinds_.push_back(&kind);
}

const LogLine* Unwrapper::opened_by(std::string_view line) const {
    const auto found =
        std::find_if(kinds_.begin(), kinds_.end(), [&](const LogLine* kind) { return kind->opens(line); });
    return found == kinds_.end() ? nullptr : *found;
}

void Unwrapper::close() {
    if (open_ == nullptr) return;
    const std::vector<std::string> lines = std::exchange(held_, {});
    const bool whole = std::exchange(open_, nullptr)->matches(lines.front());
    const std::size_t joined = whole ? 0 : std::exchange(pieces_, 0);
    if (joined > 0)
        take_({std::string_view(glued_).substr(0, glued_size_), std::string_view(spaced_).substr(0, spaced_size_)});
    for (std::size_t i = joined; i < lines.size(); ++i) take_({lines[i], lines[i]});
}

void Unwrapper::line(std::string_view line) {
    if (open_ != nullptr && open_->opens(line)) close();
    if (open_ == nullptr) {
        const LogLine* opened = opened_by(line);
        if (opened == nullptr || contains(line, opened->until.front()) || line.size() > most_record_bytes)
            return take_({line, line});
        open_ = opened;
        held_.emplace_back(line);
        glued_ = spaced_ = line;
        pieces_ = 0;
        return;
    }
    const std::size_t before = count_of(spaced_, open_->until);
    held_.emplace_back(line);
    glued_ += line;
    (spaced_ += ' ') += line;
    if (contains(glued_, open_->until.front()) || contains(spaced_, open_->until.front())) {
        open_ = nullptr;
        held_.clear();
        take_({glued_, spaced_});
    } else if (held_.size() == most_pieces || glued_.size() > most_record_bytes)
        close();
    else if (count_of(spaced_, open_->until) > before) {
        pieces_ = held_.size();
        glued_size_ = glued_.size();
        spaced_size_ = spaced_.size();
    }
}

void Unwrapper::finish() { close(); }

} // namespace moe::tools
