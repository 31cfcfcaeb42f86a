// A tokenizer.json made by hand: pieces, merges, added tokens, and refusals by field.
#include "engine/data/data.hpp"
#include "engine/data/text/bpe.hpp"
#include "engine/data/tokenize.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <filesystem>

using namespace moe;

namespace {

using Json = nlohmann::json;

std::string utf8(int code) {
    if (code < 128) return std::string(1, static_cast<char>(code));
    return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

// Ids 0-255 are the characters of GPT-2's alphabet in the order of the bytes they stand for, so that a byte's id is the
// byte; merges follow in order.
Json made_by_hand() {
    Json vocab = Json::object();
    int shifted = 0;
    for (int byte = 0; byte < 256; ++byte) {
        const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
        vocab[utf8(printable ? byte : 256 + shifted++)] = byte;
    }
    vocab["he"] = 256, vocab["ll"] = 257, vocab["hell"] = 258, vocab["lo"] = 259, vocab[utf8(0x120) + "w"] = 260;
    vocab["hello"] = 261; // no merge leads there
    return {{"added_tokens", {{{"id", 262}, {"content", "<|end|>"}, {"special", true}}}},
            {"normalizer", nullptr},
            {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
            {"model",
             {{"type", "BPE"},
              {"vocab", vocab},
              {"merges", {"h e", "l l", Json::array({"he", "ll"}), "l o", utf8(0x120) + " w"}}}}};
}

std::string refusal(const Folder& folder, const Json& json) {
    write_file(folder / "tokenizer.json", json.dump());
    try {
        data::BytePairEncoder encoder(folder / "tokenizer.json");
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "";
}

bool no_icu() {
    std::string why;
    if (data::can_split(why)) return false;
    MESSAGE("skipped: ", why);
    return true;
}

} // namespace

TEST_CASE("tokenizer: pairs merge by rank from the left, pieces keep them apart, added tokens are one id") {
    if (no_icu()) return;
    const Folder folder;
    Json json = made_by_hand();
    write_file(folder / "tokenizer.json", json.dump());
    data::BytePairEncoder encoder(folder / "tokenizer.json");
    CHECK(encoder.vocabulary() == 263);
    const auto encode = [&encoder](const std::string& text) {
        std::vector<std::int32_t> ids;
        encoder.encode(text, "text", ids);
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
    data::BytePairEncoder whole(folder / "tokenizer.json");
    std::vector<std::int32_t> ids;
    whole.encode("hello hello", "text", ids);
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
    CHECK(refusal(folder, changed("/model/type", "Unigram")).find("model.type = Unigram") != std::string::npos);
    CHECK(refusal(folder, changed("/model/byte_fallback", true)).find("byte_fallback") != std::string::npos);
    CHECK(refusal(folder, changed("/model/dropout", 0.1)).find("model.dropout") != std::string::npos);
    CHECK(refusal(folder, changed("/normalizer", {{"type", "Lowercase"}})).find("normalizer.type = Lowercase") !=
          std::string::npos);
    CHECK(refusal(folder, changed("/pre_tokenizer/type", "Metaspace")).find("Metaspace") != std::string::npos);
    CHECK(refusal(folder, changed("/pre_tokenizer/add_prefix_space", true)).find("add_prefix_space") !=
          std::string::npos);
    CHECK(refusal(folder, changed("/model/merges/0", "h q")).find("entry 0") != std::string::npos);
    CHECK(refusal(folder, changed("/added_tokens/0/lstrip", true)).find("lstrip = true") != std::string::npos);
    CHECK(refusal(folder, changed("/pre_tokenizer",
                                  {{"type", "Split"}, {"behavior", "Isolated"}, {"pattern", {{"Regex", "(a"}}}}))
              .find("pre_tokenizer") != std::string::npos);
    Json missing = made_by_hand();
    missing["model"]["vocab"].erase("h");
    CHECK(refusal(folder, missing).find("byte 104") != std::string::npos);
    write_file(folder / "tokenizer.json", made_by_hand().dump());
    data::BytePairEncoder encoder(folder / "tokenizer.json");
    std::vector<std::int32_t> ids;
    try {
        encoder.encode("good \xff", "text.txt", ids);
        FAIL("bytes that are no UTF-8 were taken");
    } catch (const Error& error) {
        CHECK(std::string(error.what()).find("text.txt: byte 5 ") == 0);
    }
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
