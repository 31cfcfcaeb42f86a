// Characters of JSON text that comes in pieces, as an input iterator, with a bound on the length of its strings.
#pragma once

#include "planner/base/error.hpp"
#include "tools/measured/file_pieces.hpp"

#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>

namespace moe::tools {

// A parser holds one string or number at a time in memory, so that their length is what needs a bound.
inline constexpr std::size_t most_json_string = 1 << 20, most_json_number = 1 << 10;

class PieceReader {
public:
    PieceReader(const NextPiece& next, const std::string& place) : next_(next), place_(place), piece_(next()) {}
    bool ended() const { return piece_.empty(); }
    char now() const { return piece_.front(); }
    void advance() {
        watch(piece_.front());
        piece_.remove_prefix(1);
        if (piece_.empty()) piece_ = next_();
    }

private:
    void watch(char c) {
        if (!inside_) {
            inside_ = c == '"';
            length_ = c >= '0' && c <= '9' ? length_ + 1 : 0;
            if (length_ > most_json_number) refuse("{}: a number of over {} digits", place_, most_json_number);
            return;
        }
        if (++length_ > most_json_string) refuse("{}: a text of over {} bytes, which no trace holds", place_, length_);
        inside_ = escaped_ || c != '"';
        escaped_ = !escaped_ && c == '\\';
    }
    const NextPiece& next_;
    const std::string& place_;
    std::string_view piece_;
    std::size_t length_ = 0;
    bool inside_ = false, escaped_ = false;
};

class PieceIterator {
public:
    using iterator_category = std::input_iterator_tag;
    using value_type = char;
    using difference_type = std::ptrdiff_t;
    using pointer = const char*;
    using reference = char;

    PieceIterator() = default; // the end of the pieces
    explicit PieceIterator(PieceReader* reader) : reader_(reader) {}
    char operator*() const { return reader_->now(); }
    PieceIterator& operator++() {
        reader_->advance();
        return *this;
    }
    PieceIterator operator++(int) {
        const PieceIterator before = *this;
        ++*this;
        return before;
    }
    friend bool operator==(const PieceIterator& a, const PieceIterator& b) { return a.ended() == b.ended(); }

private:
    bool ended() const { return reader_ == nullptr || reader_->ended(); }
    PieceReader* reader_ = nullptr;
};

} // namespace moe::tools
