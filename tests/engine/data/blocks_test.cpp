// Blocks of a text have the ids of the text in one piece, wherever they end.
#include "engine/base/source_file.hpp"
#include "engine/data/blocks.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tests/engine/data/made_tokenizer.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <random>
#include <string>
#include <vector>

using namespace moe;

namespace {

using Json = nlohmann::json;
using Ids = std::vector<std::int32_t>;

// Blocks so small that every kind of end comes up.
constexpr data::BlockSizes small{300, 256, 64, 16384};

Json split_by(const std::vector<std::string>& patterns) {
    Json steps = Json::array();
    for (const std::string& pattern : patterns)
        steps.push_back({{"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", pattern}}}});
    steps.push_back({{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}});
    return {{"type", "Sequence"}, {"pretokenizers", steps}};
}

// Words of several scripts, numbers, marks, runs of white space and added tokens.
std::string draw_text(unsigned seed, std::size_t parts) {
    const std::vector<std::string> words = {"hello",
                                            "he",
                                            "lo w",
                                            "1234567",
                                            "\xd0\xbc\xd0\xb8\xd1\x80",
                                            "...",
                                            "\xe6\x97\xa5\xe6\x9c\xac",
                                            "e\xcc\x81"
                                            "a\xcc\x88",
                                            "'ll",
                                            "<|end|>",
                                            "<|e",
                                            "\xf0\x9f\x98\x80",
                                            "\xe1\x84\x80\xe1\x85\xa1"};
    const std::vector<std::string> spaces = {" ", " ", " ", "  ", "\n", "\n\n  ", "", "\t", "\r\n", "          "};
    std::mt19937 draw(seed);
    std::string text;
    for (std::size_t i = 0; i < parts; ++i) text += words[draw() % words.size()] + spaces[draw() % spaces.size()];
    return text;
}

Ids in_blocks(const data::Tokenizer& encoder, const std::string& path, std::size_t threads, data::BlockSizes sizes) {
    engine::SourceFile file(path);
    Ids ids;
    data::BlockEncoder(encoder, threads, sizes).encode(file, "", [&](const Ids& some) {
        ids.insert(ids.end(), some.begin(), some.end());
    });
    return ids;
}

Ids in_one_piece(const data::Tokenizer& encoder, const std::string& text) {
    Ids ids;
    data::Tokenizer::Known known;
    CHECK(encoder.encode(text, text.size(), {"text", 0}, known, ids));
    return ids;
}

std::string refusal_in_blocks(const Folder& folder, const Json& tokenizer, const std::string& text) {
    write_file(folder / "tokenizer.json", tokenizer.dump());
    write_file(folder / "text", text);
    try {
        in_blocks(data::Tokenizer(folder / "tokenizer.json"), folder / "text", 2, small);
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "";
}

} // namespace

TEST_CASE("blocks: the ids of any text are those of it in one piece, for one step of pieces and for several") {
    if (no_icu()) return;
    const Folder folder;
    const std::string rest = R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
    Json gpt2 = made_by_hand(), one = made_by_hand(), three = made_by_hand(), behind = made_by_hand();
    one["pre_tokenizer"] = split_by({R"((?i:'s|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)" + rest});
    one["normalizer"] = {{"type", "NFC"}};
    three["pre_tokenizer"] = split_by({R"(\p{N}{1,3})", "[\u4e00-\u9fa5]+",
                                       R"([!"#\[\\\]^_~][A-Za-z]+|)"
                                       R"([^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|)" +
                                           rest});
    behind["pre_tokenizer"] = split_by({R"((?<=l)l|\p{L}|[^\p{L}]+)"}); // what looks behind is not cut at all
    for (const Json& json : {gpt2, one, three, behind}) {
        write_file(folder / "tokenizer.json", json.dump());
        const data::Tokenizer encoder(folder / "tokenizer.json");
        const bool whole = json == behind;
        Ids ids;
        data::Tokenizer::Known known;
        const std::string begin = draw_text(7, 100);
        CHECK(encoder.encode(begin, encoder.likely_cut(begin, {"text", 0}), {"text", 0}, known, ids) == !whole);
        for (unsigned seed = 0; seed < (whole ? 1 : 12); ++seed) {
            CAPTURE(seed);
            const std::string text = draw_text(seed, whole ? 300 : 2000);
            write_file(folder / "text", text);
            const Ids expected = in_one_piece(encoder, text);
            CHECK(in_blocks(encoder, folder / "text", 1 + seed % 3, small) == expected);
        }
    }
}

TEST_CASE("blocks: a piece longer than a block is kept together, and one without end is refused") {
    if (no_icu()) return;
    const Folder folder;
    const Json tokenizer = made_by_hand();
    write_file(folder / "tokenizer.json", tokenizer.dump());
    const data::Tokenizer encoder(folder / "tokenizer.json");
    std::string text = "lo ";
    for (const std::size_t letters : {299u, 300u, 301u, 2500u}) {
        for (std::size_t i = 0; i < letters; ++i) text += "hel"[i % 3];
        text += " " + std::string(letters, '\n') + "w";
    }
    write_file(folder / "text", text);
    CHECK(in_blocks(encoder, folder / "text", 2, small) == in_one_piece(encoder, text));
    const std::string endless = refusal_in_blocks(folder, tokenizer, "lo " + std::string(60000, 'l'));
    CHECK(endless.find("text: byte 0: no place to cut the text") != std::string::npos);
}

TEST_CASE("blocks: a byte that is no UTF-8 is named by its place in the file") {
    if (no_icu()) return;
    const Folder folder;
    std::string text = draw_text(1, 1000);
    const std::size_t at = text.rfind(' ');
    text[at] = '\xff';
    CHECK(refusal_in_blocks(folder, made_by_hand(), text) ==
          folder / "text" + ": byte " + std::to_string(at) + " is not UTF-8: convert the file");
}

// Each of these takes time that is exponential, or the square, in the length of the text.
TEST_CASE("blocks: patterns that go back and forth are given up, by name") {
    if (no_icu()) return;
    const Folder folder;
    for (const std::string pattern : {"(l+)+h", "(l|ll)+h", "(l*)*h"}) {
        CAPTURE(pattern);
        Json tokenizer = made_by_hand();
        tokenizer["pre_tokenizer"] = split_by({pattern});
        const std::string why = refusal_in_blocks(folder, tokenizer, std::string(5000, 'l'));
        CHECK(why.find("tokenizer.json: pattern " + pattern + " takes steps without end") != std::string::npos);
    }
}
