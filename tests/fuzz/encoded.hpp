// What every tokenizer that is accepted must do: a text whole and cut has the same ids, all of its vocabulary.
#pragma once

#include "engine/data/text/tokenizer.hpp"

#include <cstdlib>
#include <string>
#include <vector>

namespace moe::test {

inline void encode_whole_and_cut(const data::Tokenizer& encoder) {
    const std::string text = "hello 12345 he'll\r\n\n  e\xcc\x81 \xe6\x97\xa5\xe6\x9c\xac<|end|> lo w "
                             "aaaaaaaaaaaaaaaaaaaaaaaaaaaa! \xe2\x96\x81 \xef\xbc\xa1\xef\xac\x81<sep> x  ";
    data::Tokenizer::Known known;
    std::vector<std::int32_t> whole, parts;
    if (!encoder.encode(text, text.size(), {"text", 0}, known, whole)) std::abort();
    for (const std::int32_t id : whole)
        if (id < 0 || id >= encoder.vocabulary()) std::abort();
    encoder.bytes(whole);
    const std::size_t cut = encoder.likely_cut(text, {"text", 0});
    if (!encoder.encode(text, cut, {"text", 0}, known, parts)) return;
    if (!encoder.encode(text.substr(cut), text.size() - cut, {"text", cut}, known, parts)) std::abort();
    if (parts != whole) std::abort();
}

} // namespace moe::test
