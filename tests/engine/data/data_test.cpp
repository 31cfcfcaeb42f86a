// Megatron datasets: what the tokenizer writes is read back, other element types too, and every broken file is refused
// by name.
#include "engine/data/data.hpp"
#include "engine/data/tokenize.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tests/engine/data/write_dataset.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <numeric>
#include <set>

using namespace moe;

namespace {

std::string refusal(const std::string& prefix) {
    try {
        const data::IndexedDataset dataset(prefix);
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

} // namespace

TEST_CASE("the byte tokenizer writes what the reader reads") {
    const Folder folder;
    std::string first = "The quick brown fox.\n", second;
    for (int i = 0; i < 256; ++i) second.push_back(static_cast<char>(i));
    write_file(folder / "a.txt", first);
    write_file(folder / "b.txt", second);
    const data::TokenizeResult result = data::tokenize_bytes({folder / "a.txt", folder / "b.txt"}, folder / "text");
    CHECK(result.documents == 2);
    CHECK(result.tokens == static_cast<std::int64_t>(first.size() + 256));
    const data::IndexedDataset dataset(folder / "text");
    CHECK(dataset.tokens() == result.tokens);
    CHECK(dataset.documents() == 2);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(result.tokens));
    dataset.read(0, ids, 256);
    for (std::size_t i = 0; i < first.size(); ++i) CHECK(ids[i] == first[i]);
    for (int i = 0; i < 256; ++i) CHECK(ids[first.size() + static_cast<std::size_t>(i)] == i);
    // Header, one length, offset and document entry per document and the last one: 34 + 12 * 2 + 8 * 3 bytes.
    CHECK(std::filesystem::file_size(folder / "text.idx") == 82);
    CHECK(std::filesystem::file_size(folder / "text.bin") == 2 * static_cast<std::uintmax_t>(result.tokens));
}

TEST_CASE("every integer element type is read, back to back or with gaps") {
    const Folder folder;
    const auto check = [&](auto zero, std::uint8_t type, int gap) {
        using T = decltype(zero);
        write_dataset<T>(folder / "t", type, {{5, 6, 7}, {}, {8}, {9, 10, 11, 12}}, gap);
        const data::IndexedDataset dataset(folder / "t");
        REQUIRE(dataset.tokens() == 8);
        std::vector<std::int32_t> all(8), middle(4);
        dataset.read(0, all, 100);
        dataset.read(2, middle, 100);
        CHECK(all == std::vector<std::int32_t>{5, 6, 7, 8, 9, 10, 11, 12});
        CHECK(middle == std::vector<std::int32_t>{7, 8, 9, 10});
    };
    for (const int gap : {0, 3}) {
        check(std::uint8_t{}, 1, gap);
        check(std::int8_t{}, 2, gap);
        check(std::int16_t{}, 3, gap);
        check(std::int32_t{}, 4, gap);
        check(std::int64_t{}, 5, gap);
        check(std::uint16_t{}, 8, gap);
    }
}

TEST_CASE("broken datasets are refused with the file and the numbers") {
    const Folder folder;
    const std::string prefix = folder / "d";
    CHECK(contains(refusal(prefix), "d.idx: No such file"));
    write_dataset<std::uint16_t>(prefix, 8, {{1, 2, 3}, {4, 5}});
    CHECK(refusal(prefix).empty());
    const std::string index = read_file(prefix + ".idx"), tokens = read_file(prefix + ".bin");
    // Cut anywhere, the index is refused.
    for (std::size_t bytes = 0; bytes < index.size(); ++bytes) {
        write_file(prefix + ".idx", index.substr(0, bytes));
        CHECK(contains(refusal(prefix), "d.idx"));
    }
    const auto changed = [&](std::size_t at, auto value) {
        std::string copy = index;
        std::memcpy(copy.data() + at, &value, sizeof value);
        write_file(prefix + ".idx", copy);
        return refusal(prefix);
    };
    CHECK(contains(changed(0, 'X'), "does not begin with MMIDIDX"));
    CHECK(contains(changed(9, std::uint64_t{2}), "version 2"));
    CHECK(contains(changed(17, std::uint8_t{7}), "element type 7"));
    CHECK(contains(changed(18, std::uint64_t{1} << 62), "cut off"));
    CHECK(contains(changed(26, ~std::uint64_t{0}), "cut off"));
    CHECK(contains(changed(18, std::uint64_t{0}), "empty"));
    CHECK(contains(changed(34, std::int32_t{-1}), "sequence 0"));
    CHECK(contains(changed(34, std::int32_t{400}), "sequence 0"));
    CHECK(contains(changed(42, std::int64_t{-8}), "sequence 0"));
    CHECK(contains(changed(50, std::int64_t{1} << 60), "sequence 1"));
    CHECK(contains(changed(74, std::int64_t{7}), "end at sequence 7"));
    write_file(prefix + ".idx", index);
    write_file(prefix + ".bin", tokens + "x");
    CHECK(contains(refusal(prefix), "d.idx: its sequences end at byte 10, but "));
    CHECK(contains(refusal(prefix), "d.bin has 11; it is of another .bin"));
    write_file(prefix + ".bin", tokens.substr(0, 9));
    CHECK(contains(refusal(prefix), "d.bin has 9"));
    std::filesystem::remove(prefix + ".bin");
    std::filesystem::create_directory(prefix + ".bin");
    CHECK(contains(refusal(prefix), "d.bin: Is a directory"));
}

// Were it mapped, a signal would end the run.
TEST_CASE("a dataset that is cut off while it is open is refused where it ends") {
    const Folder folder;
    write_dataset<std::uint16_t>(folder / "t", 8, {{1, 2, 3, 4, 5, 6}});
    const data::IndexedDataset dataset(folder / "t");
    std::filesystem::resize_file(folder / "t.bin", 6);
    std::vector<std::int32_t> ids(6);
    dataset.read(0, std::span(ids).first(3), 100);
    CHECK_THROWS_WITH_AS(dataset.read(0, ids, 100),
                         doctest::Contains("t.bin: ends at byte 6, it had 12 when it was opened"), Error);
}

TEST_CASE("compressed text is refused by the name of its format, and text that begins alike is not") {
    const Folder folder;
    const auto refused = [&](const std::string& text) {
        write_file(folder / "text", text);
        try {
            data::tokenize_bytes({folder / "text"}, folder / "out");
        } catch (const Error& error) {
            CHECK(error.fault() == Fault::bad_input);
            CHECK_FALSE(std::filesystem::exists(folder / "out.bin"));
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(contains(refused("\x1f\x8b\x08 and so on"), "is compressed by gzip"));
    CHECK(contains(refused("\x28\xb5\x2f\xfd and so on"), "is compressed by zstd"));
    CHECK(contains(refused(std::string("\xfd\x37zXZ\0 and so on", 16)), "is compressed by xz"));
    CHECK(contains(refused("BZh91AY&SY and so on"), "is compressed by bzip2"));
    CHECK(contains(refused("PK\x03\x04 and so on"), "is compressed by zip"));
    CHECK(refused("BZh is how bzip2 begins").empty());
    CHECK(refused("PK").empty());
}

TEST_CASE("token ids outside the vocabulary are refused where they stand") {
    const Folder folder;
    write_dataset<std::int32_t>(folder / "v", 4, {{1, 2, 300, -1}});
    const data::IndexedDataset dataset(folder / "v");
    std::vector<std::int32_t> out(4);
    CHECK_THROWS_WITH_AS(dataset.read(0, out, 256), doctest::Contains("token 300 at position 2"), Error);
    CHECK_THROWS_WITH_AS(dataset.read(0, out, 301), doctest::Contains("token -1 at position 3"), Error);
    CHECK_THROWS_AS(dataset.read(1, out, 301), Error);
}

TEST_CASE("samples follow the documents, overlap by their label, and start again at the end") {
    const Folder folder;
    std::vector<std::uint16_t> tokens(101);
    std::iota(tokens.begin(), tokens.end(), std::uint16_t{0});
    write_dataset<std::uint16_t>(folder / "s", 8, {tokens});
    data::SampleData data({{folder / "s", 1.0}}, 10, 4, 200, false, 1);
    std::vector<std::int32_t> sample(11);
    for (const int k : {0, 3, 9, 10, 27}) {
        data.read(k, sample);
        for (int i = 0; i < 11; ++i) CHECK(sample[static_cast<std::size_t>(i)] == k % 10 * 10 + i);
    }
    CHECK_THROWS_WITH_AS(data::SampleData({{folder / "s", 1.0}}, 10, 11, 200, false, 1),
                         doctest::Contains("101 tokens, and one global batch needs"), Error);
    CHECK_THROWS_AS(data::SampleData({{folder / "s", 0.0}}, 10, 1, 200, false, 1), Error);
    CHECK_THROWS_AS(data::SampleData({}, 10, 1, 200, false, 1), Error);
}

TEST_CASE("samples know where their documents begin") {
    const Folder folder;
    std::vector<std::vector<std::uint16_t>> documents{{0, 1, 2}, {3}, {}, {4, 5, 6, 7, 8, 9, 10}, {11, 12}};
    for (std::uint16_t token = 13; token < 41; ++token) documents.back().push_back(token);
    write_dataset<std::uint16_t>(folder / "s", 8, documents);
    data::SampleData data({{folder / "s", 1.0}}, 10, 2, 200, false, 1);
    std::vector<std::int32_t> starts(11);
    data.read_documents(0, starts);
    CHECK(starts == std::vector<std::int32_t>{0, 0, 0, 3, 4, 4, 4, 4, 4, 4, 4});
    data.read_documents(1, starts);
    CHECK(starts == std::vector<std::int32_t>{0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
    data.read_documents(2, starts);
    CHECK(starts == std::vector<std::int32_t>(11, 0));
    CHECK(data.document_lengths() == std::map<std::int64_t, double>{{1, 1.0}, {3, 1.0}, {7, 1.0}, {30, 1.0}});
    // A longer sample of blocks in another order: each block that does not follow the one before is a document's start.
    data::SampleData old({{folder / "s", 1.0}}, 5, 2, 200, true, 3), longer({{folder / "s", 1.0}}, 10, 2, 200, true, 3);
    longer.start(1, old.position(1), true);
    std::vector<std::int32_t> sample(11);
    longer.read(1, sample);
    longer.read_documents(1, starts);
    CHECK(starts[5] == (sample[5] == sample[4] + 1 ? starts[4] : 5));
    // Indexes whose documents are not in order are refused by name, once they are asked for.
    std::string index = read_file(folder / "s.idx");
    const std::int64_t late = 5;
    std::memcpy(index.data() + 34 + 12 * documents.size() + 8, &late, sizeof late);
    write_file(folder / "t.idx", index);
    write_file(folder / "t.bin", read_file(folder / "s.bin"));
    data::SampleData broken({{folder / "t", 1.0}}, 10, 2, 200, false, 1);
    CHECK_THROWS_WITH_AS(broken.read_documents(0, starts), doctest::Contains("document 2 begins at sequence 2"), Error);
}

TEST_CASE("shuffling takes every sample once per pass, in another order each pass") {
    const Folder folder;
    std::vector<std::uint16_t> tokens(1001);
    std::iota(tokens.begin(), tokens.end(), std::uint16_t{0});
    write_dataset<std::uint16_t>(folder / "s", 8, {tokens});
    data::SampleData data({{folder / "s", 1.0}}, 10, 4, 2000, true, 42);
    std::vector<std::int32_t> sample(11);
    std::vector<std::vector<int>> passes(2);
    for (int k = 0; k < 200; ++k) {
        data.read(k, sample);
        CHECK(sample[0] % 10 == 0);
        passes[static_cast<std::size_t>(k / 100)].push_back(sample[0] / 10);
    }
    for (const auto& pass : passes) CHECK(std::set<int>(pass.begin(), pass.end()).size() == 100);
    CHECK(passes[0] != passes[1]);
    CHECK_FALSE(std::is_sorted(passes[0].begin(), passes[0].end()));
    for (const std::int64_t size : {1, 2, 5, 16, 17, 1000}) {
        std::set<std::int64_t> seen;
        for (std::int64_t i = 0; i < size; ++i) seen.insert(data::permuted(i, size, 99));
        CHECK(static_cast<std::int64_t>(seen.size()) == size);
        CHECK(*seen.rbegin() == size - 1);
    }
}

TEST_CASE("a blend draws by weight, and its entropy is that of the tokens") {
    const Folder folder;
    write_dataset<std::uint16_t>(folder / "a", 8, {std::vector<std::uint16_t>(500, 1)});
    write_dataset<std::uint16_t>(folder / "b", 8, {std::vector<std::uint16_t>(500, 2)});
    data::SampleData data({{folder / "a", 3.0}, {folder / "b", 1.0}}, 8, 2, 4, false, 1);
    std::vector<std::int32_t> sample(9);
    int of_a = 0;
    for (int k = 0; k < 400; ++k) {
        data.read(k, sample);
        of_a += sample[0] == 1 ? 1 : 0;
    }
    CHECK(of_a == 300);
    CHECK(data.unigram_entropy() == nearly(-0.75 * std::log(0.75) - 0.25 * std::log(0.25)));
}

TEST_CASE("the tokenizer refuses what it cannot read and leaves nothing behind when it cannot write") {
    const Folder folder;
    write_file(folder / "empty.txt", std::string());
    write_file(folder / "text.txt", std::string("abc"));
    CHECK_THROWS_WITH_AS(data::tokenize_bytes({folder / "text.txt", folder / "empty.txt"}, folder / "out"),
                         doctest::Contains("empty.txt"), Error);
    CHECK_THROWS_AS(data::tokenize_bytes({folder / "missing.txt"}, folder / "out"), Error);
    CHECK_THROWS_AS(data::tokenize_bytes({}, folder / "out"), Error);
    CHECK_THROWS_AS(data::tokenize_bytes({folder / "text.txt"}, folder / "no/such/folder/out"), Error);
    std::filesystem::create_directory(folder / "out.idx");
    CHECK_THROWS_AS(data::tokenize_bytes({folder / "text.txt"}, folder / "out"), Error);
    CHECK_FALSE(std::filesystem::exists(folder / "out.bin"));
    CHECK_FALSE(std::filesystem::exists(folder / "out.bin.partial"));
}
