// Fuzz target: a tokenizer.json, and a text by it, whole and cut.
#include "engine/data/text/bpe.hpp"
#include "tests/fuzz/input_file.hpp"
#include "tests/fuzz/refused.hpp"

#include <cstdint>
#include <string>
#include <vector>

using namespace moe;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    std::string why;
    if (!data::can_split(why)) return 0;
    const std::string path = moe::test::input_file({reinterpret_cast<const char*>(data), size});
    const std::string text =
        "hello 12345 he'll\r\n\n  e\xcc\x81 \xe6\x97\xa5\xe6\x9c\xac<|end|> lo w aaaaaaaaaaaaaaaaaaaaaaaaaaaa!";
    moe::test::accept_or_refuse([&] {
        const data::BytePairEncoder encoder(path);
        data::BytePairEncoder::Known known;
        std::vector<std::int32_t> whole, parts;
        if (!encoder.encode(text, text.size(), {"text", 0}, known, whole)) std::abort();
        const std::size_t cut = encoder.likely_cut(text, {"text", 0});
        if (!encoder.encode(text, cut, {"text", 0}, known, parts)) return;
        if (!encoder.encode(text.substr(cut), text.size() - cut, {"text", cut}, known, parts)) std::abort();
        for (const std::int32_t id : whole)
            if (id < 0 || id >= encoder.vocabulary()) std::abort();
        if (parts != whole) std::abort();
    });
    return 0;
}
