// Histograms of document lengths: as text and as files, merged into bins, and what a token sees within documents.
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/model/document_lengths.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace moe;

namespace {

// The mean of min(x, u, most) by sums over a grid.
double by_sums(const model::DocumentLengths& lengths, double seq, double most) {
    constexpr int steps = 400;
    double sum = 0.0, tokens = 0.0;
    for (const model::DocumentLengths::Bin& bin : lengths.bins) {
        const double l = static_cast<double>(bin.length), weight = l * bin.documents;
        double keys = 0.0;
        for (int i = 0; i < steps; ++i)
            for (int j = 0; j < steps; ++j) {
                const double x = (i + 0.5) / steps * seq, u = (j + 0.5) / steps * l;
                keys += std::min({x, u, most > 0.0 ? most : seq});
            }
        sum += weight * keys / (steps * steps);
        tokens += weight;
    }
    return sum / tokens;
}

} // namespace

TEST_CASE("document lengths: keys that a token sees are the mean over places and documents") {
    for (const char* text : {"100:1", "5000:2", "30:400+700:20+9000:1", "4096:1"}) {
        const model::DocumentLengths lengths = model::document_lengths_from_string(text);
        for (const int most : {0, 50, 1000})
            CHECK(lengths.keys_seen(4096, most) == nearly(by_sums(lengths, 4096.0, most)).epsilon(2e-3));
    }
    // Documents that are much longer than a sample leave it what it is; by hand: documents of half a sample.
    CHECK(model::document_lengths_from_string("1000000000000:1").keys_seen(4096, 0) == nearly(2048.0).epsilon(1e-6));
    CHECK(model::document_lengths_from_string("2048:7").keys_seen(4096, 0) ==
          nearly(2048.0 / 2 - 2048.0 / 2 / 6).epsilon(1e-9));
}

TEST_CASE("document lengths: FLOPs follow them, those of a window less") {
    const model::Model model = families::load_model("GPT-OSS-20B");
    const model::DocumentLengths lengths = model::document_lengths_from_string("100:9+3000:1");
    const double whole = model::model_flops_per_token(model, 8192),
                 within = model::model_flops_per_token(model, 8192, 1, &lengths);
    double macs = 0.0;
    for (const int kind : model.layers) {
        const model::Attention& a = model.kinds[static_cast<std::size_t>(kind)].attention;
        macs += a.heads * static_cast<double>(a.qk_dim + a.v_dim) *
                (keys_seen(a, 8192) - lengths.keys_seen(8192, a.window));
    }
    CHECK(whole - within == nearly(6.0 * macs).epsilon(1e-9));
    const model::DocumentLengths none;
    CHECK(model::model_flops_per_token(model, 8192, 1, &none) == whole);
}

TEST_CASE("document lengths: text and files, and what is no histogram") {
    const Folder folder;
    const model::DocumentLengths lengths = model::document_lengths_from_string("700:2+30:5+700:1");
    CHECK(model::to_string(lengths) == "30:5+700:3");
    CHECK(lengths.mean() == nearly(2250.0 / 8));
    CHECK(model::to_string(model::document_lengths_from_string("none")) == "none");
    for (const char* text : {"0:1", "a:1", "5:-1", "1.5:2", "5:1+", "7:0"})
        CHECK_THROWS_WITH_AS(model::document_lengths_from_string(text), doctest::Contains("lengths="), Error);
    write_file(folder / "lengths.csv", std::string("length,documents\n30,5\n700,3\n"));
    CHECK(model::to_string(model::read_document_lengths(folder / "lengths.csv")) == "30:5+700:3");
    write_file(folder / "each", std::string("30\n700\r\n30\n"));
    CHECK(model::to_string(model::read_document_lengths(folder / "each")) == "30:2+700:1");
    write_file(folder / "bad", std::string("30,5\nmany\n"));
    CHECK_THROWS_WITH_AS(model::read_document_lengths(folder / "bad"), doctest::Contains("line 2"), Error);
    write_file(folder / "empty", std::string("length,documents\n"));
    CHECK_THROWS_WITH_AS(model::read_document_lengths(folder / "empty"), doctest::Contains("no document lengths"),
                         Error);
    // Many lengths become bins that keep documents and, but for rounding, tokens.
    std::string many;
    for (int length = 1; length <= 1000; ++length) many += fmt::format("{},{}\n", length, 1 + 5000 / length);
    write_file(folder / "many", many);
    const model::DocumentLengths bins = model::read_document_lengths(folder / "many");
    CHECK(bins.bins.size() <= 64);
    double documents = 0.0, tokens = 0.0, kept = 0.0, held = 0.0;
    for (int length = 1; length <= 1000; ++length)
        documents += 1 + 5000 / length, tokens += length * (1 + 5000 / length);
    for (const auto& bin : bins.bins) kept += bin.documents, held += bin.documents * static_cast<double>(bin.length);
    CHECK(kept == nearly(documents));
    CHECK(held == nearly(tokens).epsilon(0.01));
}
