// Text by a vocabulary of bytes or a tokenizer.json, written in Megatron's indexed dataset format (its table is in
// data.hpp).
#include "engine/data/tokenize.hpp"

#include "engine/data/text/bpe.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>

namespace moe::data {

namespace {

template <class T>
void append(std::string& out, T value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out.append(bytes, sizeof value);
}

std::string index_of(const std::vector<std::int64_t>& lengths, bool wide) {
    constexpr std::uint8_t i32_elements = 4, u16_elements = 8;
    std::string out("MMIDIDX\0\0", 9);
    append<std::uint64_t>(out, 1);
    append(out, wide ? i32_elements : u16_elements);
    append<std::uint64_t>(out, lengths.size());
    append<std::uint64_t>(out, lengths.size() + 1);
    for (const std::int64_t length : lengths) append(out, static_cast<std::int32_t>(length));
    std::int64_t offset = 0;
    for (const std::int64_t length : lengths) {
        append(out, offset);
        offset += (wide ? 4 : 2) * length;
    }
    for (std::size_t document = 0; document <= lengths.size(); ++document)
        append(out, static_cast<std::int64_t>(document));
    return out;
}

// The ids of one document.
using Encode = std::function<void(const std::string& text, const std::string& file, std::vector<std::int32_t>& ids)>;

TokenizeResult tokenize(const std::vector<std::string>& files, const std::string& prefix, bool wide,
                        const Encode& encode) {
    if (files.empty()) refuse("no text files to tokenize");
    TokenizeResult result;
    std::vector<std::int64_t> lengths;
    const auto write_tokens = [&](const std::function<void(std::string_view)>& write) {
        std::string tokens;
        std::vector<std::int32_t> ids;
        for (const std::string& file : files) {
            const std::string text = read_file(file);
            if (text.empty()) refuse("{}: the file is empty; leave it out", file);
            if (text.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
                refuse("{}: {} bytes are more than one document can hold ({}); split the file", file, text.size(),
                       std::numeric_limits<std::int32_t>::max());
            tokens.clear();
            ids.clear();
            encode(text, file, ids);
            tokens.reserve((wide ? 4 : 2) * ids.size());
            for (const std::int32_t id : ids) {
                if (wide)
                    append(tokens, id);
                else
                    append(tokens, static_cast<std::uint16_t>(id));
            }
            write(tokens);
            lengths.push_back(static_cast<std::int64_t>(ids.size()));
            result.tokens += lengths.back();
        }
    };
    write_file(prefix + ".bin", write_tokens);
    try {
        write_file(prefix + ".idx", index_of(lengths, wide));
    } catch (...) {
        // A .bin without its index, or with an older one, would be a trap.
        std::remove((prefix + ".bin").c_str());
        throw;
    }
    result.documents = static_cast<std::int64_t>(lengths.size());
    return result;
}

} // namespace

TokenizeResult tokenize_bytes(const std::vector<std::string>& files, const std::string& prefix) {
    return tokenize(files, prefix, false,
                    [](const std::string& text, const std::string&, std::vector<std::int32_t>& ids) {
                        for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
                    });
}

namespace {

// What published models end documents with: GPT-2, GPT-OSS and Qwen; Llama 3; DeepSeek; Mixtral and Llama 2.
constexpr const char* known_ends[] = {"<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
                                      "</s>"};

std::int32_t end_of_document(const BytePairEncoder& encoder, const std::string& tokenizer) {
    const std::filesystem::path config = std::filesystem::path(tokenizer).parent_path() / "tokenizer_config.json";
    if (std::filesystem::is_regular_file(config)) {
        const auto json = load_json<nlohmann::json>(config.string());
        auto token = json.is_object() ? json.value("eos_token", nlohmann::json()) : nlohmann::json();
        if (token.is_object()) token = token.value("content", nlohmann::json());
        if (!token.is_string()) refuse("{}: eos_token: must be the text of the end-of-document token", config.string());
        const std::string text = token.get<std::string>();
        if (const auto id = encoder.added_token(text)) return *id;
        refuse("{}: eos_token {} is no added token of {}", config.string(), shown(text), tokenizer);
    }
    std::vector<std::string> texts;
    std::int32_t id = 0;
    for (const char* text : known_ends)
        if (const auto one = encoder.added_token(text)) {
            texts.emplace_back(text);
            id = *one;
        }
    if (texts.size() == 1) return id;
    refuse("{}: {} can end a document: put the model's tokenizer_config.json beside it, which says its eos_token",
           tokenizer, texts.empty() ? "no added token that is known" : fmt::format("{}", fmt::join(texts, " and ")));
}

} // namespace

TokenizeResult tokenize_words(const std::vector<std::string>& files, const std::string& tokenizer,
                              const std::string& prefix, bool append_eod) {
    BytePairEncoder encoder(tokenizer);
    const bool wide = encoder.vocabulary() > std::numeric_limits<std::uint16_t>::max() + 1;
    std::optional<std::int32_t> end;
    if (append_eod) end = end_of_document(encoder, tokenizer);
    return tokenize(files, prefix, wide,
                    [&](const std::string& text, const std::string& file, std::vector<std::int32_t>& ids) {
                        encoder.encode(text, file, ids);
                        if (end) ids.push_back(*end);
                    });
}

} // namespace moe::data
