// A tokenizer.json of a few merges, made by hand.
#pragma once

#include "engine/data/text/split.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <string>

inline std::string utf8(int code) {
    if (code < 128) return std::string(1, static_cast<char>(code));
    return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

// Ids 0-255 are the characters of GPT-2's alphabet in the order of the bytes they stand for, so that a byte's id is the
// byte; merges follow in order.
inline nlohmann::json made_by_hand() {
    using Json = nlohmann::json;
    Json vocab = Json::object();
    int shifted = 0;
    for (int byte = 0; byte < 256; ++byte) {
        const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        vocab[utf8(printable ? byte : 256 + shifted++)] = byte;
    }
    vocab["he"] = 256, vocab["ll"] = 257, vocab["hell"] = 258, vocab["lo"] = 259, vocab[utf8(0x120) + "w"] = 260;
    vocab["hello"] = 261; // no merge leads there
    return {{"added_tokens", {{{"id", 262}, {"content", "<|end|>"}, {"special", true}}}},
            {"normalizer", nullptr},
            {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
            {"model",
             {{"type", "BPE"},
              {"vocab", vocab},
              {"merges", {"h e", "l l", Json::array({"he", "ll"}), "l o", utf8(0x120) + " w"}}}}};
}

inline bool no_icu() {
    std::string why;
    if (moe::data::can_split(why)) return false;
    MESSAGE("skipped: ", why);
    return true;
}
