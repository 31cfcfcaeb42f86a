// Byte-level byte-pair encoding over the pieces of a text.
#include "engine/data/text/bpe.hpp"

namespace moe::data {

void BytePairEncoder::encode_piece(std::string_view piece, KnownPieces& known, std::vector<std::int32_t>& ids) const {
    if (ignore_merges_) {
        if (const auto token = whole_.find(piece); token != whole_.end()) {
            ids.push_back(token->second);
            return;
        }
    }
    const auto merge = [this](std::string_view bytes, std::vector<std::int32_t>& out) {
        std::vector<std::int32_t> symbols;
        symbols.reserve(bytes.size());
        for (const char byte : bytes) symbols.push_back(byte_id_[static_cast<unsigned char>(byte)]);
        merges_.append_merged(symbols, out);
    };
    known.append(piece, merge, ids);
}

bool BytePairEncoder::encode(std::string_view text, std::size_t end, const Place& place, KnownPieces& known,
                             std::vector<std::int32_t>& ids) const {
    const std::size_t before = ids.size();
    const auto take = [&](std::string_view piece) { encode_piece(piece, known, ids); };
    std::size_t done = 0, at = 0;
    while (const AddedTokens::Token* token = added_.next(text, done, end, at)) {
        splitter_->pieces(text.substr(done, at - done), at - done, {place.file, place.byte + done}, take);
        ids.push_back(token->id);
        done = at + token->text.size();
    }
    // A token behind `end` parts what is before it from what is behind it, as the end of the text does.
    const std::size_t stop = added_.next(text, end, text.size(), at) != nullptr ? at : text.size();
    if (done <= end &&
        splitter_->pieces(text.substr(done, stop - done), end - done, {place.file, place.byte + done}, take))
        return true;
    ids.resize(before);
    return false;
}

std::string BytePairEncoder::bytes(std::span<const std::int32_t> ids) const {
    std::unordered_map<std::int32_t, std::string_view> token;
    for (const auto& [text, id] : whole_) token.emplace(id, text);
    for (const AddedTokens::Token& added : added_.all()) token[added.id] = added.text;
    std::string text;
    for (const std::int32_t id : ids)
        if (const auto found = token.find(id); found != token.end()) text += found->second;
    return text;
}

} // namespace moe::data
