// The verb tokenize: text files to a Megatron .bin/.idx pair.
#include "engine/data/tokenize.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "tools/print/console.hpp"
#include "tools/print/table.hpp"
#include "tools/report/documents.hpp"
#include "tools/verbs/verbs.hpp"

#include <filesystem>

namespace moe::tools {

void tokenize_verb(const TokenizeOptions& options) {
    if (options.out.empty() || options.out.back() == '/')
        refuse("--out '{}': must be the prefix of two files, for example runs/text", options.out);
    if (options.vocab != "bytes" && !std::filesystem::is_regular_file(options.vocab))
        refuse("--vocab {}: must be bytes or the path of a tokenizer.json or tokenizer.model", options.vocab);
    if (options.append_eod && options.vocab == "bytes")
        refuse("--append-eod: a vocabulary of bytes has no end-of-document token: give --vocab TOKENIZER");
    if (options.chat && options.vocab == "bytes")
        refuse("--chat: a vocabulary of bytes has no chat template: give --vocab TOKENIZER");
    if (options.chat && options.append_eod) refuse("--append-eod: with --chat the template ends every answer");
    const data::TokenizeResult result =
        options.vocab == "bytes" ? data::tokenize_bytes(options.texts, options.out)
        : options.chat           ? data::tokenize_chat(options.texts, options.vocab, options.out)
                                 : data::tokenize_words(options.texts, options.vocab, options.out, options.append_eod);
    if (options.json) return print(tokenize_document(result.documents, result.tokens, options.out));
    Console console(options);
    console.say("{} of {} in {}.bin and {}.idx", counted(result.tokens, "token"), counted(result.documents, "document"),
                options.out, options.out);
}

} // namespace moe::tools
