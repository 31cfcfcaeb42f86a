// Text by a vocabulary of bytes or a tokenizer.json, written in Megatron's indexed dataset format (its table is in
// data.hpp).
#include "engine/data/tokenize.hpp"

#include "engine/base/source_file.hpp"
#include "engine/data/blocks.hpp"
#include "engine/data/dataset_writer.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/base/parallel.hpp"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

namespace moe::data {

namespace {

// Compressed text would be tokenized as what it looks like.
void refuse_compressed(std::string_view text, const std::string& file) {
    constexpr struct {
        std::string_view begins;
        const char *name, *command;
    } formats[] = {{"\x1f\x8b", "gzip", "gzip -dc"},
                   {"\x28\xb5\x2f\xfd", "zstd", "zstd -dc"},
                   {std::string_view("\xfd\x37zXZ\0", 6), "xz", "xz -dc"},
                   {"\x04\x22\x4d\x18", "lz4", "lz4 -dc"},
                   {"PK\x03\x04", "zip", "unzip -p"}};
    for (const auto& format : formats)
        if (text.starts_with(format.begins))
            refuse("{}: is compressed by {}: tokenize what \"{}\" makes of it", file, format.name, format.command);
    // "BZh", the level, and the first digits of pi or, without a block, of its root.
    if (text.size() >= 10 && text.starts_with("BZh") &&
        (text.substr(4, 6) == "1AY&SY" || text.substr(4, 6) == "\x17\x72\x45\x38\x50\x90"))
        refuse("{}: is compressed by bzip2: tokenize what \"bzip2 -dc\" makes of it", file);
}

// Hands over the ids of one document; `text` is what has been read of it.
using Take = std::function<void(const std::vector<std::int32_t>& ids)>;
using Encode = std::function<void(engine::SourceFile& file, std::string text, const Take& take)>;

TokenizeResult tokenize(const std::vector<std::string>& files, const std::string& prefix, bool wide,
                        const Encode& encode) {
    if (files.empty()) refuse("no text files to tokenize");
    return write_dataset(prefix, wide, false, [&](DatasetWriter& writer) {
        for (const std::string& path : files) {
            engine::SourceFile file(path);
            std::string text;
            if (!file.next(text, 1 << 16)) refuse("{}: the file is empty; leave it out", path);
            refuse_compressed(text, path);
            encode(file, std::move(text), [&](const std::vector<std::int32_t>& ids) { writer.add(ids, path); });
            writer.end_document();
        }
    });
}

} // namespace

TokenizeResult tokenize_bytes(const std::vector<std::string>& files, const std::string& prefix) {
    constexpr std::size_t at_once = 1 << 20;
    return tokenize(files, prefix, false, [](engine::SourceFile& file, std::string text, const Take& take) {
        std::vector<std::int32_t> ids;
        do {
            ids.clear();
            for (const char c : text) ids.push_back(static_cast<unsigned char>(c));
            take(ids);
            text.clear();
        } while (file.next(text, at_once));
    });
}

namespace {

// What published models end documents with: GPT-2, GPT-OSS and Qwen; Llama 3; DeepSeek; Mixtral and Llama 2.
constexpr const char* known_ends[] = {"<|endoftext|>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
                                      "</s>"};

std::int32_t end_of_document(const Tokenizer& encoder, const std::string& tokenizer) {
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
                              const std::string& prefix, bool append_eod, int threads) {
    const Tokenizer encoder(tokenizer);
    const bool wide = encoder.vocabulary() > std::numeric_limits<std::uint16_t>::max() + 1;
    std::optional<std::int32_t> end;
    if (append_eod) end = end_of_document(encoder, tokenizer);
    BlockEncoder blocks(encoder, thread_count(threads));
    return tokenize(files, prefix, wide, [&](engine::SourceFile& file, std::string text, const Take& take) {
        blocks.encode(file, std::move(text), take);
        if (end) take({*end});
    });
}

} // namespace moe::data
