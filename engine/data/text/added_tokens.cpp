// Tokens that stand for themselves, longest first.
#include "engine/data/text/added_tokens.hpp"

#include <algorithm>
#include <utility>

namespace moe::data {

void AddedTokens::add(Token token) {
    begins_[static_cast<unsigned char>(token.text[0])] = true;
    const auto shorter = std::find_if(tokens_.begin(), tokens_.end(),
                                      [&token](const Token& one) { return one.text.size() < token.text.size(); });
    tokens_.insert(shorter, std::move(token));
}

const AddedTokens::Token* AddedTokens::next(std::string_view text, std::size_t from, std::size_t to,
                                            std::size_t& at) const {
    if (tokens_.empty()) return nullptr;
    for (at = from; at < to; ++at)
        if (begins_[static_cast<unsigned char>(text[at])])
            for (const Token& token : tokens_)
                if (text.substr(at, token.text.size()) == token.text) return &token;
    return nullptr;
}

std::optional<std::int32_t> AddedTokens::id(std::string_view text) const {
    for (const Token& token : tokens_)
        if (token.text == text) return token.id;
    return std::nullopt;
}

} // namespace moe::data
