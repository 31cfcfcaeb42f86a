// Tokens that stand for themselves in a text, such as its ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moe::data {

class AddedTokens {
public:
    struct Token {
        std::string text; // not empty
        std::int32_t id = 0;
    };

    void add(Token token);
    // The first token that begins in text[from, to), the longest there; its place is `at`. Null where there is none.
    const Token* next(std::string_view text, std::size_t from, std::size_t to, std::size_t& at) const;
    std::optional<std::int32_t> id(std::string_view text) const;
    const std::vector<Token>& all() const { return tokens_; }

private:
    std::vector<Token> tokens_; // longest first
    bool begins_[256] = {};     // by the first byte of tokens
};

} // namespace moe::data
