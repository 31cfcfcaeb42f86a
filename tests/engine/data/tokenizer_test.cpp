// A tokenizer.json made by hand: pieces, merges, added tokens, and refusals by field.
#include "engine/data/data.hpp"
#include "engine/data/text/tokenizer.hpp"
#include "engine/data/tokenize.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tests/engine/data/made_tokenizer.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <filesystem>

using namespace moe;

namespace {

using Json = nlohmann::json;

std::string refusal(const Folder& folder, const Json& json) {
    write_file(folder / "tokenizer.json", json.dump());
    try {
        data::Tokenizer encoder(folder / "tokenizer.json");
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "";
}

} // namespace

TEST_CASE("tokenizer: pairs merge by rank from the left, pieces keep them apart, added tokens are one id") {
    if (no_icu()) return;
    const Folder folder;
    Json json = made_by_hand();
    write_file(folder / "tokenizer.json", json.dump());
    data::Tokenizer encoder(folder / "tokenizer.json");
    CHECK(encoder.vocabulary() == 263);
    const auto encode = [&encoder](const std::string& text) {
        std::vector<std::int32_t> ids;
        data::Tokenizer::Known known;
        CHECK(encoder.encode(text, text.size(), {"text", 0}, known, ids));
        return ids;
    };
    CHECK(encode("hello") == std::vector<std::int32_t>{258, 'o'});
    CHECK(encode("llll") == std::vector<std::int32_t>{257, 257});
    CHECK(encode("lllo") == std::vector<std::int32_t>{257, 259});
    CHECK(encode("he w he  w") == std::vector<std::int32_t>{256, 260, ' ', 256, ' ', 260});
    CHECK(encode("h<|end|>e<|end|") == std::vector<std::int32_t>{'h', 262, 'e', '<', '|', 'e', 'n', 'd', '|'});
    CHECK(encode("\xc3\xa9") == std::vector<std::int32_t>{0xc3, 0xa9});
    CHECK(encode("").empty());
    json["model"]["ignore_merges"] = true;
    write_file(folder / "tokenizer.json", json.dump());
    data::Tokenizer whole(folder / "tokenizer.json");
    std::vector<std::int32_t> ids;
    data::Tokenizer::Known known;
    CHECK(whole.encode("hello hello", 11, {"text", 0}, known, ids));
    CHECK(ids == std::vector<std::int32_t>{261, ' ', 258, 'o'});
}

TEST_CASE("tokenizer: a dataset of its ids, in 32 bits where 16 do not hold them") {
    if (no_icu()) return;
    const Folder folder;
    Json json = made_by_hand();
    write_file(folder / "text", "hello<|end|>");
    for (const int id : {262, 65535, 65536}) {
        json["added_tokens"][0]["id"] = id;
        write_file(folder / "tokenizer.json", json.dump());
        const data::TokenizeResult result =
            data::tokenize_words({folder / "text", folder / "text"}, folder / "tokenizer.json", folder / "out");
        CHECK(result.documents == 2);
        CHECK(result.tokens == 6);
        CHECK(std::filesystem::file_size(folder / "out.bin") == (id > 65535 ? 24u : 12u));
        std::vector<std::int32_t> ids(6);
        data::IndexedDataset(folder / "out").read(0, ids, id + 1);
        CHECK(ids == std::vector<std::int32_t>{258, 'o', id, 258, 'o', id});
    }
}

TEST_CASE("tokenizer: what is not read is refused by its field") {
    if (no_icu()) return;
    const Folder folder;
    const auto changed = [](const char* pointer, const Json& value) {
        Json json = made_by_hand();
        json[Json::json_pointer(pointer)] = value;
        return json;
    };
    CHECK(refusal(folder, made_by_hand()).empty());
    CHECK(refusal(folder, changed("/model/type", "WordPiece")).find("model.type = WordPiece") != std::string::npos);
    CHECK(refusal(folder, changed("/model/type", "Unigram")).find("model.vocab must be a list") != std::string::npos);
    CHECK(refusal(folder, changed("/model/byte_fallback", true)).find("byte_fallback") != std::string::npos);
    CHECK(refusal(folder, changed("/model/dropout", 0.1)).find("model.dropout") != std::string::npos);
    CHECK(refusal(folder, changed("/normalizer", {{"type", "Lowercase"}})).find("normalizer.type = Lowercase") !=
          std::string::npos);
    CHECK(refusal(folder, changed("/pre_tokenizer/type", "Metaspace")).find("nor an unknown token") !=
          std::string::npos);
    CHECK(refusal(folder, changed("/pre_tokenizer/add_prefix_space", true)).find("add_prefix_space") !=
          std::string::npos);
    CHECK(refusal(folder, changed("/model/merges/0", "h q")).find("entry 0") != std::string::npos);
    CHECK(refusal(folder, changed("/added_tokens/0/lstrip", true)).find("lstrip = true") != std::string::npos);
    const Json open_group = {{"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", "(a"}}}};
    const Json bytes = made_by_hand()["pre_tokenizer"];
    CHECK(refusal(folder, changed("/pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {open_group, bytes}}}))
              .find("pattern (a is not understood") != std::string::npos);
    CHECK(refusal(folder, changed("/added_tokens/0/id", -1)).find("added_tokens: <|end|> has the id -1") !=
          std::string::npos);
    CHECK(
        refusal(folder, changed("/added_tokens/0/id", std::uint64_t{1} << 63)).find("has the id 9223372036854775808") !=
        std::string::npos);
    CHECK(refusal(folder, changed("/model/vocab/hello", 1 << 24)).find("model.vocab: hello has the id 16777216") !=
          std::string::npos);
    CHECK(refusal(folder, changed("/model/vocab/hello", 1.5)).find("model.vocab: hello has the id 1.5") !=
          std::string::npos);
    Json missing = made_by_hand();
    missing["model"]["vocab"].erase("h");
    CHECK(refusal(folder, missing).find("byte 104") != std::string::npos);
    write_file(folder / "tokenizer.json", made_by_hand().dump());
    data::Tokenizer encoder(folder / "tokenizer.json");
    std::vector<std::int32_t> ids;
    data::Tokenizer::Known known;
    CHECK_THROWS_WITH_AS(encoder.encode("good \xff", 6, {"text.txt", 100}, known, ids),
                         "text.txt: byte 105 is not UTF-8: convert the file", Error);
}

TEST_CASE("documents end with the tokenizer's end-of-document token where that is asked for") {
    if (no_icu()) return;
    const Folder folder;
    Json json = made_by_hand();
    write_file(folder / "tokenizer.json", json.dump());
    write_file(folder / "text", std::string("hello"));
    const auto tokenize = [&] {
        return data::tokenize_words({folder / "text", folder / "text"}, folder / "tokenizer.json", folder / "out",
                                    true);
    };
    CHECK_THROWS_WITH_AS(tokenize(), doctest::Contains("tokenizer_config.json"), Error);
    write_file(folder / "tokenizer_config.json", std::string(R"({"eos_token": {"content": "<|end|>"}})"));
    CHECK(tokenize().documents == 2);
    const data::IndexedDataset dataset(folder / "out");
    std::vector<std::int32_t> ids(static_cast<std::size_t>(dataset.tokens()));
    dataset.read(0, ids, 263);
    CHECK(ids.back() == 262);
    CHECK(ids[ids.size() / 2 - 1] == 262);
    write_file(folder / "tokenizer_config.json", std::string(R"({"eos_token": "<|other|>"})"));
    CHECK_THROWS_WITH_AS(tokenize(), doctest::Contains("eos_token"), Error);
    std::filesystem::remove(folder / "tokenizer_config.json");
    json["added_tokens"][0]["content"] = "<|endoftext|>";
    write_file(folder / "tokenizer.json", json.dump());
    CHECK(tokenize().tokens == dataset.tokens());
}
