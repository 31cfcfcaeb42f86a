// Text to a Megatron .bin/.idx pair.
#pragma once

#include "engine/data/dataset_writer.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::data {

// Byte vocabulary: ids 0-255, no end-of-document token, 16-bit elements, one document per file in the order given.
// Writes PREFIX.bin, then PREFIX.idx. Texts go through in blocks: memory does not grow with their length. Throws Error
// (bad_input) for a file that cannot be read, is empty or is compressed, (failure) when writing fails; nothing
// half-written is left.
TokenizeResult tokenize_bytes(const std::vector<std::string>& files, const std::string& prefix);
// Tokenizes with the vocabulary of a Hugging Face tokenizer.json (Tokenizer says which), in 16-bit elements where
// they hold all ids, else 32-bit ones. Special tokens are not added; those that stand in the text become one id. Blocks
// of a text go to `threads` threads (0: one for each core); the ids are those of the text in one piece. Throws Error
// (bad_input) as well where a text has no place to cut it within 4 MiB. append_eod: every document ends with the
// end-of-document token. It is the eos_token of the tokenizer_config.json beside the tokenizer; without that file the
// one token among the added ones that models use for it. Throws Error (bad_input) where there is none, or several.
TokenizeResult tokenize_words(const std::vector<std::string>& files, const std::string& tokenizer,
                              const std::string& prefix, bool append_eod = false, int threads = 0);

// Conversations with a loss mask over the answers: files of JSON lines {"messages": [{"role": .., "content": ..}, ..]}
// (and what else the template asks for, such as "tools") through the chat template of the tokenizer_config.json or
// chat_template.jinja beside the tokenizer. What the template writes from its generation prompt on for each message of
// the assistant is an answer; white space behind the special token that ends it is not. Prompts and answers are
// tokenized apart, as when the model answers. A conversation is one document; where the template writes earlier
// messages otherwise once more follow, it is one for each answer. Throws Error (bad_input) naming file, line and field.
TokenizeResult tokenize_chat(const std::vector<std::string>& files, const std::string& tokenizer,
                             const std::string& prefix);

} // namespace moe::data
