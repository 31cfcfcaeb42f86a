// safetensors files: values of every float type, shards, and every broken file refused by name.
#include "engine/weights/safetensors.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <numeric>

using namespace moe;

namespace {

// A file from its parts, as the format's table has them.
std::string file_of(const std::string& header, const std::string& data) {
    const std::uint64_t length = header.size();
    std::string bytes(sizeof length, '\0');
    std::memcpy(bytes.data(), &length, sizeof length);
    return bytes + header + data;
}

template <class T>
std::string bytes_of_values(const std::vector<T>& values) {
    std::string bytes(values.size() * sizeof(T), '\0');
    std::memcpy(bytes.data(), values.data(), bytes.size());
    return bytes;
}

std::vector<float> read(const weights::Safetensors& file, const std::string& name) {
    const weights::StoredTensor& tensor = file.tensors().at(name);
    std::vector<float> values(static_cast<std::size_t>(tensor.elements));
    weights::read_floats(tensor, name, 0, values);
    return values;
}

std::string refusal(const std::string& bytes) {
    const Folder folder;
    write_file(folder / "x.safetensors", bytes);
    return message([&] { const weights::Safetensors file(folder / "x.safetensors"); });
}

const std::vector<std::uint32_t> odd_floats = {0x00000000u, 0x80000000u, 0x3f800000u, 0x00000001u, 0x7f800000u,
                                               0xff800000u, 0x7fc00001u, 0x42f6e979u, 0x00800000u, 0xff7fffffu};

} // namespace

TEST_CASE("FP32 values come back bit for bit, negative zero, subnormals and NaN included") {
    const Folder folder;
    std::vector<float> values;
    for (const std::uint32_t bits : odd_floats) values.push_back(std::bit_cast<float>(bits));
    weights::write_safetensors(folder / "x.safetensors", {{"b", {2, 5}}, {"a", {3}}, {"none", {0, 7}}},
                               program::Dtype::f32, [&](const weights::TensorToWrite& tensor) {
                                   if (tensor.name == "b") return values;
                                   return tensor.name == "a" ? std::vector<float>{1, 2, 3} : std::vector<float>{};
                               });
    const weights::Safetensors file(folder / "x.safetensors");
    CHECK(file.tensors().size() == 3);
    CHECK(file.tensors().at("b").shape == std::vector<std::int64_t>{2, 5});
    CHECK(file.tensors().at("none").elements == 0);
    CHECK(read(file, "a") == std::vector<float>{1, 2, 3});
    const std::vector<float> back = read(file, "b");
    for (std::size_t i = 0; i < values.size(); ++i) CHECK(std::bit_cast<std::uint32_t>(back[i]) == odd_floats[i]);
    std::vector<float> slice(2);
    weights::read_floats(file.tensors().at("a"), "a", 1, slice);
    CHECK(slice == std::vector<float>{2, 3});
    CHECK_THROWS_AS(weights::read_floats(file.tensors().at("a"), "a", 2, slice), Error);
    CHECK_THROWS_AS(weights::read_floats(file.tensors().at("a"), "a", -1, slice), Error);
}

TEST_CASE("every BF16 and F16 pattern is read as the number it stands for, at odd addresses") {
    std::vector<std::uint16_t> patterns(65536);
    std::iota(patterns.begin(), patterns.end(), std::uint16_t{0});
    // One byte in front makes every element misaligned.
    const std::string header = R"({"pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "BF16", "shape": [65536], "data_offsets": [1, 131073]},
        "h": {"dtype": "F16", "shape": [256, 256], "data_offsets": [131073, 262145]}})";
    const Folder folder;
    write_file(folder / "x.safetensors", file_of(header, "x" + bytes_of_values(patterns) + bytes_of_values(patterns)));
    const weights::Safetensors file(folder / "x.safetensors");
    const std::vector<float> b = read(file, "b"), h = read(file, "h");
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const float wide = std::bit_cast<float>(bits << 16);
        // IEEE 754 binary16: sign, 5 bits of exponent with bias 15, 10 of fraction.
        const int exponent = static_cast<int>((bits >> 10) & 31), fraction = static_cast<int>(bits & 1023);
        double half = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
        if (exponent == 31) half = fraction == 0 ? std::numeric_limits<double>::infinity() : std::nan("");
        if (bits >> 15) half = -half;
        const bool same = std::isnan(wide) ? std::isnan(b[bits]) : b[bits] == wide;
        const bool same_half = std::isnan(half) ? std::isnan(h[bits]) : static_cast<double>(h[bits]) == half;
        if (!same || !same_half || std::signbit(h[bits]) != (bits >> 15 == 1)) {
            CAPTURE(bits);
            REQUIRE(same);
            REQUIRE(same_half);
            REQUIRE(std::signbit(h[bits]) == (bits >> 15 == 1));
        }
    }
    std::vector<float> one(1);
    CHECK(mentions(message([&] { weights::read_floats(file.tensors().at("pad"), "pad", 0, one); }),
                   "pad is stored as U8"));
}

TEST_CASE("BF16 is rounded to nearest even when written") {
    const Folder folder;
    std::vector<float> values = {1.0f, 1.00390625f, 1.01171875f, -3.3895314e38f, 1e-40f};
    weights::write_safetensors(folder / "x.safetensors", {{"w", {5}}}, program::Dtype::bf16,
                               [&](const weights::TensorToWrite&) { return values; });
    const std::vector<float> back = read(weights::Safetensors(folder / "x.safetensors"), "w");
    CHECK(back[0] == 1.0f);
    CHECK(back[1] == 1.0f);      // half way between 1 and 1.0078125
    CHECK(back[2] == 1.015625f); // half way between 1.0078125 and 1.015625
    CHECK(back[3] == -3.3895314e38f);
    CHECK(back[4] == 0x1p-133f); // the smallest of them, nearest to 1e-40
}

TEST_CASE("broken files are refused with the numbers that disagree") {
    const std::string good = R"({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})";
    CHECK(refusal(file_of(good, "12345678")) == "no error");
    CHECK(mentions(refusal("abc"), "3 bytes are too few"));
    CHECK(mentions(refusal(file_of(good, "12345678").substr(0, 40)), "it is cut off"));
    CHECK(mentions(refusal(file_of(good, "1234567")), "bytes 0 to 8, but the file holds 7 bytes of data"));
    CHECK(mentions(refusal(file_of(good, "123456789")), "end at byte 8 of 9"));
    CHECK(mentions(refusal(std::string(8, '\xff') + "junk"), "at most 100000000 are allowed"));
    CHECK(mentions(refusal(file_of("{\"w\": ", "")), "not valid JSON"));
    CHECK(mentions(refusal(file_of("[1, 2]", "")), "not an object"));
    CHECK(mentions(refusal(file_of(std::string(5000, '['), "")), "not valid JSON"));
    CHECK(mentions(refusal(file_of(std::string(5000, '[') + std::string(5000, ']'), "")), "not valid JSON"));
    const auto entry = [](const std::string& fields, const std::string& data = "12345678") {
        return refusal(file_of("{\"w\": {" + fields + "}}", data));
    };
    CHECK(mentions(entry(R"("dtype": "F32", "shape": [3], "data_offsets": [0, 8])"), "shape [3] of F32"));
    CHECK(mentions(entry(R"("dtype": "F32", "shape": [-2], "data_offsets": [0, 8])"), "not negative"));
    CHECK(mentions(entry(R"("dtype": "F32", "shape": [1.5], "data_offsets": [0, 8])"), "whole numbers"));
    CHECK(mentions(entry(R"("dtype": "F32", "shape": [4294967296, 4294967296, 2], "data_offsets": [0, 8])"), "shape"));
    CHECK(mentions(entry(R"("dtype": "F32", "shape": [2], "data_offsets": [8, 0])"), "bytes 8 to 0"));
    CHECK(mentions(entry(R"("dtype": "F32", "shape": [2], "data_offsets": [0, 18446744073709551615])"), "whole"));
    CHECK(mentions(entry(R"("dtype": "Q7", "shape": [2], "data_offsets": [0, 8])"), "dtype Q7 is not known"));
    CHECK(mentions(entry(R"("shape": [2], "data_offsets": [0, 8])"), "dtype is missing"));
    CHECK(mentions(entry(R"("dtype": "F32", "data_offsets": [0, 8])"), "shape is missing"));
    CHECK(mentions(entry(R"("dtype": "F32", "shape": [2], "data_offsets": [0])"), "two numbers"));
    const auto two = [](const std::string& second) {
        return refusal(
            file_of(R"({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, )" + second + "}", "12345678"));
    };
    CHECK(mentions(two(R"("b": {"dtype": "U8", "shape": [5], "data_offsets": [3, 8]})"), "b begins at byte 3"));
    CHECK(mentions(two(R"("b": {"dtype": "U8", "shape": [3], "data_offsets": [5, 8]})"), "b begins at byte 5"));
    CHECK(
        mentions(two(R"("a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]})"), "the field \"a\" stands twice"));
    CHECK(two(R"("__metadata__": {"format": "pt"}, "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]})") ==
          "no error");
}

TEST_CASE("a file cut anywhere is refused, never read past its end") {
    const Folder folder;
    weights::write_safetensors(
        folder / "x.safetensors", {{"a", {3, 2}}, {"b", {5}}}, program::Dtype::f32,
        [](const weights::TensorToWrite& t) { return std::vector<float>(t.name == "a" ? 6 : 5, 1.5f); });
    const std::string whole = read_file(folder / "x.safetensors");
    for (std::size_t length = 0; length < whole.size(); ++length) {
        CAPTURE(length);
        CHECK(refusal(whole.substr(0, length)) != "no error");
    }
}

TEST_CASE("weights are split into shards with an index and found again") {
    const Folder folder;
    const std::vector<weights::TensorToWrite> tensors = {{"a", {4}}, {"b", {2, 3}}, {"c", {10}}, {"d", {1}}};
    const auto values = [](const weights::TensorToWrite& t) {
        const std::size_t n = t.name == "a" ? 4 : t.name == "b" ? 6 : t.name == "c" ? 10 : 1;
        return std::vector<float>(n, static_cast<float>(t.name[0]));
    };
    weights::write_weights(folder / "hf", tensors, program::Dtype::f32, 40, values);
    // 16 + 24 bytes fill the first shard, c alone the second, d the third.
    CHECK(std::filesystem::exists(folder / "hf/model-00003-of-00003.safetensors"));
    const weights::StoredWeights weights(folder / "hf");
    CHECK(weights.names() == std::vector<std::string>{"a", "b", "c", "d"});
    for (const weights::TensorToWrite& tensor : tensors) {
        const weights::StoredTensor* stored = weights.find(tensor.name);
        REQUIRE(stored != nullptr);
        CHECK(stored->shape == tensor.shape);
        std::vector<float> back(static_cast<std::size_t>(stored->elements));
        weights::read_floats(*stored, tensor.name, 0, back);
        CHECK(back == values(tensor));
    }
    CHECK(weights.find("e") == nullptr);
    CHECK(mentions(message([&] { weights::write_weights(folder / "hf", tensors, program::Dtype::f32, 40, values); }),
                   "holds weights already"));

    const std::string index = folder / "hf/model.safetensors.index.json";
    const auto with_index = [&](const std::string& text) {
        write_file(index, text);
        return message([&] { const weights::StoredWeights broken(folder / "hf"); });
    };
    CHECK(mentions(with_index(R"({"weight_map": {"a": "model-00002-of-00003.safetensors"}})"), "does not hold it"));
    CHECK(mentions(with_index(R"({"weight_map": {"a": "model-00009-of-00003.safetensors"}})"), "cannot read"));
    CHECK(mentions(with_index(R"({"weight_map": {"a": "../model.safetensors"}})"), "file of the same folder"));
    CHECK(mentions(with_index(R"({"weight_map": {"a": 3}})"), "must name a file"));
    CHECK(mentions(with_index(R"({"metadata": {}})"), "weight_map is missing"));
    CHECK(mentions(with_index("{"), "not valid JSON"));
    std::filesystem::create_directories(folder / "empty");
    CHECK(mentions(message([&] { const weights::StoredWeights none(folder / "empty"); }),
                   "holds neither model.safetensors"));
}
