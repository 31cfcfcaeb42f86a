// Cuts texts where no piece reaches over, and encodes what is between.
#include "engine/data/text/pieces.hpp"

#include "engine/data/text/utf8.hpp"
#include "planner/base/error.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace moe::data {

namespace {

std::uint64_t pair_of(char32_t left, char32_t right) { return std::uint64_t{left} << 32 | std::uint64_t{right}; }

void check_utf8(std::string_view text, const Place& place) {
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t length = character(text.substr(at, 4));
        if (length == 0) refuse("{}: byte {} is not UTF-8: convert the file", place.file, place.byte + at);
        at += length;
    }
}

// The character at `at`, whose bytes it is moved behind.
char32_t take_character(std::string_view text, std::size_t& at) {
    const std::size_t length = std::max<std::size_t>(character(text.substr(at, 4)), 1);
    const char32_t code = code_point(text.substr(at), length);
    at += length;
    return code;
}

} // namespace

PieceEncoder::PieceEncoder(PieceModel model) : model_(std::move(model)) {
    std::vector<std::pair<std::string, std::int32_t>> searched;
    for (std::size_t i = 0; i < model_.pieces.size(); ++i) {
        const PieceModel::Piece& piece = model_.pieces[i];
        if (model_.unigram)
            searched.emplace_back(piece.text, static_cast<std::int32_t>(i));
        else if (piece.kept)
            searched.emplace_back(piece.text, piece.id);
        std::size_t at = 0;
        char32_t before = 0;
        for (std::size_t n = 0; at < piece.text.size(); ++n) {
            const char32_t now = take_character(piece.text, at);
            if (n > 0) {
                adjacent_.insert(pair_of(before, now));
                if (before < 128 && now < 128) adjacent_ascii_[before][now] = true;
            } else if (at == piece.text.size()) {
                characters_.insert(now);
                if (!piece.kept) symbols_.emplace(piece.text, piece.id);
            }
            before = now;
        }
    }
    for (std::size_t i = 0; i < model_.extra_characters.size(); ++i)
        symbols_.emplace(model_.extra_characters[i],
                         static_cast<std::int32_t>(model_.vocabulary + static_cast<std::int64_t>(i)));
    trie_ = PieceTrie(std::move(searched));
}

// Unknown characters in a row become one id.
bool PieceEncoder::comes_apart(char32_t left, char32_t right) const {
    if (left < 128 && right < 128 ? adjacent_ascii_[left][right] : adjacent_.contains(pair_of(left, right)))
        return false;
    return model_.byte_id || is_known(left) || is_known(right);
}

bool PieceEncoder::encode(std::string_view text, std::size_t end, const Place& place, KnownPieces& known,
                          std::vector<std::int32_t>& ids) const {
    check_utf8(text, place);
    const std::size_t before = ids.size();
    const auto stretch = [&](std::size_t from, std::size_t to, std::size_t cut) {
        const bool first = from == 0 && place.byte == 0;
        return encode_stretch({std::string(text.substr(from, to - from)), cut - from, from > 0 || first, first}, known,
                              ids);
    };
    std::size_t done = 0, at = 0;
    while (const AddedTokens::Token* token = model_.added.next(text, done, end, at)) {
        stretch(done, at, at);
        ids.push_back(token->id);
        done = at + token->text.size();
    }
    if (end == text.size()) {
        stretch(done, end, end);
        return true;
    }
    // Neither a token nor what is between two of them may end at the cut: what follows would not know that it begins.
    const std::size_t stop = model_.added.next(text, end, text.size(), at) != nullptr ? at : text.size();
    if (done < end && end < stop && stretch(done, stop, end)) return true;
    ids.resize(before);
    return false;
}

bool PieceEncoder::encode_stretch(Stretch stretch, KnownPieces& known, std::vector<std::int32_t>& ids) const {
    const bool cut_off = stretch.cut < stretch.text.size();
    for (const NormalStep& step : model_.steps)
        if (!step(stretch)) return false;
    if (cut_off && (stretch.cut == 0 || stretch.cut >= stretch.text.size())) return false;
    const std::string_view text = stretch.text;
    const auto take = [&](std::string_view word) {
        known.append(
            word, [this](std::string_view one, std::vector<std::int32_t>& out) { encode_word(one, out); }, ids);
    };
    const std::size_t already = ids.size();
    std::size_t begin = 0;
    char32_t left = 0;
    for (std::size_t at = 0; at < stretch.cut;) {
        if (text[at] == piece_break) {
            if (begin < at) take(text.substr(begin, at - begin));
            begin = ++at;
            continue;
        }
        const std::size_t here = at;
        const char32_t now = take_character(text, at);
        if (begin < here && comes_apart(left, now)) {
            take(text.substr(begin, here - begin));
            begin = here;
        }
        left = now;
    }
    if (cut_off && begin < stretch.cut && text[stretch.cut] != piece_break) {
        std::size_t at = stretch.cut;
        if (!comes_apart(left, take_character(text, at))) {
            ids.resize(already);
            return false;
        }
    }
    if (begin < stretch.cut) take(text.substr(begin, stretch.cut - begin));
    return true;
}

void PieceEncoder::encode_word(std::string_view word, std::vector<std::int32_t>& ids) const {
    if (model_.unigram)
        append_likeliest(word, ids);
    else
        append_merged(word, ids);
}

// first: where the word's ids begin.
void PieceEncoder::append_unknown(std::string_view character, std::size_t first, std::vector<std::int32_t>& ids) const {
    if (model_.byte_id) {
        for (const char byte : character) ids.push_back((*model_.byte_id)[static_cast<unsigned char>(byte)]);
        return;
    }
    if (model_.fuse_unknown && ids.size() > first && ids.back() == *model_.unknown) return;
    ids.push_back(*model_.unknown);
}

// Viterbi's search: the best sequence of pieces up to each character, of equal ones the one whose last piece is
// longest.
void PieceEncoder::append_likeliest(std::string_view word, std::vector<std::int32_t>& ids) const {
    struct Best {
        double score = -std::numeric_limits<double>::infinity();
        std::size_t from = SIZE_MAX;
        std::int32_t piece = -1; // -1: an unknown character
    };
    std::vector<Best> best(word.size() + 1);
    best[0] = {0, 0, -1};
    for (std::size_t at = 0; at < word.size();) {
        const double so_far = best[at].score;
        const std::size_t length = std::max<std::size_t>(character(word.substr(at, 4)), 1);
        const auto offer = [&](std::size_t bytes, double score, std::int32_t piece) {
            Best& there = best[at + bytes];
            if (there.from == SIZE_MAX || score > there.score) there = {score, at, piece};
        };
        bool single = false;
        trie_.prefixes(word.substr(at), [&](std::size_t bytes, std::int32_t piece) {
            single = single || bytes == length;
            offer(bytes, so_far + model_.pieces[static_cast<std::size_t>(piece)].score, piece);
        });
        if (!single) offer(length, so_far + model_.unknown_score, -1);
        at += length;
    }
    std::vector<std::size_t> ends;
    for (std::size_t at = word.size(); at > 0; at = best[at].from) ends.push_back(at);
    const std::size_t first = ids.size();
    for (std::size_t i = ends.size(); i-- > 0;) {
        const Best& one = best[ends[i]];
        if (one.piece >= 0)
            ids.push_back(model_.pieces[static_cast<std::size_t>(one.piece)].id);
        else
            append_unknown(word.substr(one.from, ends[i] - one.from), first, ids);
    }
}

void PieceEncoder::append_merged(std::string_view word, std::vector<std::int32_t>& ids) const {
    std::vector<std::int32_t> symbols, merged;
    for (std::size_t at = 0; at < word.size();) {
        const std::string_view rest = word.substr(at);
        if (const std::size_t kept = trie_.longest(rest)) {
            trie_.prefixes(rest, [&](std::size_t bytes, std::int32_t id) {
                if (bytes == kept) symbols.push_back(id);
            });
            at += kept;
            continue;
        }
        const std::string_view one = rest.substr(0, std::max<std::size_t>(character(rest.substr(0, 4)), 1));
        if (const auto symbol = symbols_.find(one); symbol != symbols_.end())
            symbols.push_back(symbol->second);
        else
            append_unknown(one, 0, symbols);
        at += one.size();
    }
    model_.merges.append_merged(symbols, merged);
    const std::size_t first = ids.size();
    for (const std::int32_t id : merged) {
        if (id < model_.vocabulary && (id != model_.unknown || model_.byte_id)) {
            ids.push_back(id);
        } else if (id < model_.vocabulary) {
            append_unknown({}, first, ids);
        } else {
            append_unknown(model_.extra_characters[static_cast<std::size_t>(id - model_.vocabulary)], first, ids);
        }
    }
}

// As far as one can say before the text is normalized: between characters that no piece joins, behind no blank.
std::size_t PieceEncoder::likely_cut(std::string_view text, const Place& place) const {
    check_utf8(text, place);
    std::size_t at = 0, cut = text.size();
    std::size_t blank_end = 0;
    const char32_t blank = model_.blank.empty() ? U' ' : take_character(model_.blank, blank_end);
    char32_t left = 0;
    while (at <= text.size() / 2 && at < text.size()) {
        const std::size_t here = at;
        char32_t now = take_character(text, at);
        if (white_space(now)) now = blank;
        if (here > 0 && left != blank && comes_apart(left, now)) cut = here;
        left = now;
    }
    return cut;
}

std::string PieceEncoder::bytes(std::span<const std::int32_t> ids) const {
    std::unordered_map<std::int32_t, std::string_view> known;
    for (const PieceModel::Piece& piece : model_.pieces) known.emplace(piece.id, piece.text);
    std::string text;
    for (const std::int32_t id : ids) {
        if (const auto other = model_.texts.find(id); other != model_.texts.end()) {
            text += other->second;
        } else if (const auto piece = known.find(id); piece != known.end()) {
            std::string_view rest = piece->second;
            while (!rest.empty()) {
                const bool blank = !model_.blank.empty() && rest.starts_with(model_.blank);
                text += blank ? ' ' : rest.front();
                rest.remove_prefix(blank ? model_.blank.size() : 1);
            }
        }
    }
    return text;
}

} // namespace moe::data
