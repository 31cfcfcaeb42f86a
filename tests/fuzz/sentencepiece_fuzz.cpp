// Fuzz target: a SentencePiece model, and a text by it, whole and cut.
#include "tests/fuzz/encoded.hpp"
#include "tests/fuzz/input_file.hpp"
#include "tests/fuzz/refused.hpp"

#include <cstdint>

using namespace moe;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string path = test::input_file({reinterpret_cast<const char*>(data), size});
    test::accept_or_refuse([&] { test::encode_whole_and_cut(data::Tokenizer(path)); });
    return 0;
}
