// Tokenizers of pieces by the ids of the packages they come from, in one piece and in blocks; damaged models are
// refused.
#include "engine/base/source_file.hpp"
#include "engine/data/blocks.hpp"
#include "engine/data/data.hpp"
#include "engine/data/text/vocabulary.hpp"
#include "engine/data/tokenize.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tests/engine/data/made_tokenizer.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <random>

using namespace moe;

namespace {

using Json = nlohmann::json;
using Ids = std::vector<std::int32_t>;

std::string made(const std::string& name) {
    return (std::filesystem::path(profiles_folder()).parent_path() / "tests/engine/data/tokenizers/made" / name)
        .string();
}

Ids ids_of(const data::Tokenizer& tokenizer, const std::string& text) {
    Ids ids;
    data::Tokenizer::Known known;
    CHECK(tokenizer.encode(text, text.size(), {"text", 0}, known, ids));
    return ids;
}

std::string refusal(const std::string& path) {
    try {
        data::Tokenizer tokenizer(path);
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "";
}

// A message's field of bytes.
std::string field(int number, const std::string& bytes) {
    std::string size;
    for (std::size_t left = bytes.size(); size.empty() || left > 0; left >>= 7)
        size += static_cast<char>((left & 0x7F) | (left > 0x7F ? 0x80 : 0));
    return static_cast<char>(number << 3 | 2) + size + bytes;
}
std::string piece(const std::string& text, int type) {
    return field(1, field(1, text) + '\x15' + std::string("\0\0\x80\xbf", 4) + '\x18' + static_cast<char>(type));
}
std::string trainer(int kind) { return field(2, std::string("\x18") + static_cast<char>(kind)); }

} // namespace

// What made them stands in tests/engine/data/tokenizers/pieces.py.
TEST_CASE("pieces: models of SentencePiece and of tokenizers have the ids that the packages give") {
    if (no_icu()) return;
    const Json files = Json::parse(read_file(made("ids.json")));
    CHECK(files.size() == 11);
    for (const auto& [name, cases] : files.items()) {
        CAPTURE(name);
        const data::Tokenizer tokenizer(made(name));
        int compared = 0;
        for (const Json& one : cases) {
            CAPTURE(one[0]);
            CHECK(ids_of(tokenizer, one[0].get<std::string>()) == one[1].get<Ids>());
            ++compared;
        }
        CHECK(compared > 40);
    }
}

TEST_CASE("pieces: the ids of any text in blocks are those of it in one piece") {
    if (no_icu()) return;
    const Folder folder;
    const std::vector<std::string> words = {
        "abc",           "a\xc3\xa9",    "12",    "\xe6\x97\xa5\xe6\x9c\xac\xe8\xaa\x9e",
        "e\xcc\x81",     "<|end|>",      "<sep>", "\xd0\xb6\xd0\xb8",
        "\xef\xac\x81x", "\xef\xbc\xa1", "-_",    "\xf0\x9f\x98\x80",
        "\xe2\x96\x81",  "<|en"};
    const std::vector<std::string> spaces = {" ", " ", " ", "  ", "\n", "\n\n", "", "", "\t", "\r\n", "     "};
    const Json files = Json::parse(read_file(made("ids.json")));
    for (const auto& [name, cases] : files.items()) {
        CAPTURE(name);
        const data::Tokenizer tokenizer(made(name));
        int cuts = 0;
        for (unsigned seed = 0; seed < 6; ++seed) {
            CAPTURE(seed);
            std::mt19937 draw(seed);
            std::string text;
            for (int i = 0; i < 2000; ++i) text += words[draw() % words.size()] + spaces[draw() % spaces.size()];
            write_file(folder / "text", text);
            engine::SourceFile file(folder / "text");
            Ids ids;
            data::BlockEncoder(tokenizer, 1 + seed % 3, {300, 256, 64, 16384}).encode(file, "", [&](const Ids& some) {
                ids.insert(ids.end(), some.begin(), some.end());
                ++cuts;
            });
            CHECK(ids == ids_of(tokenizer, text));
        }
        CHECK(cuts > 50);
    }
}

TEST_CASE("pieces: ids become their text again, and documents end with the model's own token") {
    const Folder folder;
    const std::string path = made("spm-bpe.model"), text = "abc 12  \xe6\x97\xa5\n<|end|> \xf0\x9f\x98\x80";
    const data::Vocabulary vocabulary(path);
    CHECK(vocabulary.text(vocabulary.ids(text, "text")) == " abc 12  \xe6\x97\xa5\n<|end|>  \xf0\x9f\x98\x80");
    std::filesystem::copy_file(path, folder / "tokenizer.model");
    write_file(folder / "text", text);
    write_file(folder / "tokenizer_config.json", std::string(R"({"eos_token": "</s>"})"));
    data::tokenize_words({folder / "text"}, folder / "tokenizer.model", folder / "out", true);
    const data::IndexedDataset dataset(folder / "out");
    Ids ids(static_cast<std::size_t>(dataset.tokens()));
    dataset.read(0, ids, vocabulary.size());
    Ids expected = vocabulary.ids(text, "text");
    expected.push_back(*data::Tokenizer(path).added_token("</s>"));
    CHECK(ids == expected);
    // Tokens of transformers beside the model.
    write_file(folder / "added_tokens.json", std::string(R"({"<pad>": 900})"));
    const data::Tokenizer more(folder / "tokenizer.model");
    CHECK(more.vocabulary() == 901);
    CHECK(ids_of(more, "<pad><pad>") == Ids{900, 900});
    write_file(folder / "added_tokens.json", std::string(R"({"</s>": 900})"));
    CHECK(refusal(folder / "tokenizer.model").find("</s> has the id 900") != std::string::npos);
}

TEST_CASE("pieces: conversations by a SentencePiece model and the template beside it") {
    const Folder folder;
    std::filesystem::copy_file(made("spm-bpe.model"), folder / "tokenizer.model");
    write_file(folder / "chat_template.jinja", std::string("{% for m in messages %}{{ m.role + ':' + m.content + "
                                                           "'</s>' }}{% endfor %}{% if add_generation_prompt %}"
                                                           "{{ 'assistant:' }}{% endif %}"));
    write_file(folder / "chat.jsonl", std::string(R"({"messages": [{"role": "user", "content": "ab"},)"
                                                  R"({"role": "assistant", "content": "c"}]})"
                                                  "\n"));
    CHECK(data::tokenize_chat({folder / "chat.jsonl"}, folder / "tokenizer.model", folder / "out").documents == 1);
    const data::Tokenizer tokenizer(made("spm-bpe.model"));
    Ids expected;
    for (const char* part : {"user:ab</s>assistant:", "c</s>"})
        for (const std::int32_t id : ids_of(tokenizer, part)) expected.push_back(id);
    const data::IndexedDataset dataset(folder / "out");
    Ids ids(static_cast<std::size_t>(dataset.tokens()));
    dataset.read(0, ids, tokenizer.vocabulary());
    CHECK(ids == expected);
}

TEST_CASE("pieces: a damaged SentencePiece model is refused in one line") {
    const Folder folder;
    const auto refused = [&folder](const std::string& bytes) {
        write_file(folder / "tokenizer.model", bytes);
        const std::string line = refusal(folder / "tokenizer.model");
        CHECK(line.find('\n') == std::string::npos);
        return line;
    };
    const std::string unknown = piece("<unk>", 2), letters = piece("a", 1) + piece("b", 1) + piece("ab", 1);
    CHECK(refused(unknown + letters + trainer(2)).empty());
    CHECK(ids_of(data::Tokenizer(folder / "tokenizer.model"), "abba").size() == 4);
    CHECK(refused("").find("no unknown piece") != std::string::npos);
    CHECK(refused("text").find("is no SentencePiece model") != std::string::npos);
    CHECK(refused(letters + trainer(2)).find("no unknown piece") != std::string::npos);
    CHECK(refused(unknown + letters + trainer(3)).find("model_type = 3") != std::string::npos);
    CHECK(refused(unknown + letters + piece("a", 1)).find("piece 4: a: occurs twice") != std::string::npos);
    CHECK(refused(unknown + piece("<x>", 2)).find("a second unknown piece") != std::string::npos);
    CHECK(refused(unknown + piece("x", 5)).find("unused pieces are not read") != std::string::npos);
    CHECK(refused(unknown + piece("<0xG1>", 6)).find("a byte is written") != std::string::npos);
    CHECK(refused(unknown + piece("\xff", 1)).find("is not UTF-8") != std::string::npos);
    CHECK(refused(unknown + piece(std::string(2000, 'x'), 1)).find("has 2000 bytes") != std::string::npos);
    CHECK(refused(unknown + piece("", 1)).find("has 0 bytes") != std::string::npos);
    CHECK(refused(unknown + letters + field(3, field(2, "\x09"))).find("precompiled_charsmap") != std::string::npos);
    const std::string whole = read_file(made("spm-unigram.model"));
    int odd = 0;
    for (std::size_t size = 0; size < whole.size(); size += 7) // Whole pieces in front, but no field is cut in two.
        odd += refused(whole.substr(0, size)).empty() ? 0 : 1;
    CHECK(odd > 900);
}

TEST_CASE("pieces: fields of a tokenizer.json that are not read are refused by their names") {
    if (no_icu()) return;
    const Folder folder;
    const auto changed = [&folder](const char* name, const char* pointer, const Json& value) {
        Json json = Json::parse(read_file(made(name)));
        json[Json::json_pointer(pointer)] = value;
        write_file(folder / "tokenizer.json", json.dump());
        return refusal(folder / "tokenizer.json");
    };
    const auto holds = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
    CHECK(holds(changed("llama2.json", "/normalizer", {{"type", "NFKC"}}), "normalizer.type = NFKC"));
    CHECK(holds(changed("llama2.json", "/normalizer/normalizers/1/pattern", {{"Regex", "a+"}}), "Replace of"));
    CHECK(holds(changed("llama2.json", "/normalizer/normalizers/0/prepend", std::string(65, 'x')), "has 65 bytes"));
    CHECK(holds(changed("llama2.json", "/pre_tokenizer", {{"type", "Whitespace"}}), "pre_tokenizer.type = Whitespace"));
    CHECK(holds(changed("llama2.json", "/decoder", {{"type", "WordPiece"}}), "decoder.type = WordPiece"));
    CHECK(holds(changed("llama2.json", "/model/ignore_merges", true), "ignore_merges"));
    CHECK(holds(changed("llama2.json", "/model/unk_token", "<none>"), "unk_token"));
    CHECK(holds(changed("llama2.json", "/model/merges/0", "<0x41> <0x42>"), "joins what is not in the vocabulary"));
    CHECK(holds(changed("mixtral.json", "/pre_tokenizer/prepend_scheme", "last"), "prepend_scheme = last"));
    CHECK(holds(changed("gemma.json", "/pre_tokenizer/behavior", "Isolated"), "behavior = Isolated"));
    CHECK(holds(changed("albert.json", "/model/unk_id", 100000), "unk_id = 100000"));
    CHECK(holds(changed("albert.json", "/model/unk_id", nullptr), "unk_id is missing"));
    CHECK(holds(changed("albert.json", "/model/vocab/3/1", "x"), "entry 3"));
    CHECK(holds(changed("albert.json", "/normalizer/normalizers/0/precompiled_charsmap", "!"), "is not base64"));
    CHECK(holds(changed("xlm-r.json", "/normalizer/precompiled_charsmap", "AAAA"), "too short"));
    CHECK(holds(changed("xlm-r.json", "/pre_tokenizer/pretokenizers/1/prepend_scheme", "first"), "WhitespaceSplit"));
    Json missing = Json::parse(read_file(made("llama2.json")));
    missing["model"]["vocab"].erase("<0x0A>");
    write_file(folder / "tokenizer.json", missing.dump());
    CHECK(holds(refusal(folder / "tokenizer.json"), "<0x0A> is not in the vocabulary"));
}
