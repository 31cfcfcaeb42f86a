// Text to a Megatron .bin/.idx pair.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe::data {

struct TokenizeResult {
    std::int64_t documents = 0, tokens = 0;
};

// Byte vocabulary: ids 0-255, no end-of-document token, 16-bit elements, one document per file in the order given.
// Writes PREFIX.bin, then PREFIX.idx. Throws Error (bad_input) for a file that cannot be read or is empty, (failure)
// when writing fails; nothing half-written is left.
TokenizeResult tokenize_bytes(const std::vector<std::string>& files, const std::string& prefix);
// Tokenizes with the vocabulary of a Hugging Face tokenizer.json (BytePairEncoder says which), in 16-bit elements where
// they hold all ids, else 32-bit ones. Special tokens are not added; those that stand in the text become one id.
// append_eod: every document ends with the end-of-document token. It is the eos_token of the tokenizer_config.json
// beside the tokenizer; without that file the one token among the added ones that models use for it. Throws Error
// (bad_input) where there is none, or several.
TokenizeResult tokenize_words(const std::vector<std::string>& files, const std::string& tokenizer,
                              const std::string& prefix, bool append_eod = false);

} // namespace moe::data
