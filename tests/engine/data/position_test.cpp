// Going on in the data: by tokens of each dataset, whatever the samples' length and the blend were before.
#include "engine/data/data.hpp"
#include "tests/engine/data/write_dataset.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>

using namespace moe;

namespace {

// A dataset of `count` tokens from `first` up.
std::string counting(const Folder& folder, const std::string& name, int count, std::int32_t first) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
    std::iota(tokens.begin(), tokens.end(), first);
    write_dataset<std::int32_t>(folder / name, 4, {tokens});
    return folder / name;
}

data::SampleData open(const std::vector<data::BlendEntry>& blend, std::int64_t seq, bool shuffle,
                      std::uint64_t seed = 1) {
    return data::SampleData(blend, seq, 2, 100000, shuffle, seed);
}

std::vector<std::int32_t> inputs(data::SampleData& data, std::int64_t first, std::int64_t count) {
    std::vector<std::int32_t> all, sample(static_cast<std::size_t>(data.seq()) + 1);
    for (std::int64_t s = first; s < first + count; ++s) {
        data.read(s, sample);
        all.insert(all.end(), sample.begin(), sample.end() - 1);
    }
    return all;
}

} // namespace

TEST_CASE("a run that goes on draws what the whole run draws") {
    const Folder folder;
    const std::vector<data::BlendEntry> blend{{counting(folder, "a", 101, 0), 3.0},
                                              {counting(folder, "b", 57, 1000), 1.0}};
    for (const bool shuffle : {false, true}) {
        data::SampleData whole = open(blend, 4, shuffle), before = open(blend, 4, shuffle);
        const std::vector<std::int32_t> expected = inputs(whole, 0, 200);
        for (const std::int64_t cut : {1, 7, 24, 25, 26, 50, 133}) {
            CAPTURE(cut);
            data::SampleData after = open(blend, 4, shuffle);
            after.start(cut, before.position(cut), true);
            std::vector<std::int32_t> rest = inputs(after, cut, 200 - cut);
            CHECK(std::equal(rest.begin(), rest.end(), expected.begin() + cut * 4, expected.end()));
            // What is saved later is what the whole run would save.
            CHECK(after.position(190).datasets[0].consumed == whole.position(190).datasets[0].consumed);
            CHECK(after.position(190).datasets[1].drawn == whole.position(190).datasets[1].drawn);
        }
    }
}

TEST_CASE("another length of samples takes every token of a pass once") {
    const Folder folder;
    const std::vector<data::BlendEntry> blend{{counting(folder, "a", 97, 0), 1.0}}; // 96 inputs
    for (const bool shuffle : {false, true})
        for (const std::int64_t length : {2, 4, 12, 24}) {
            CAPTURE(shuffle);
            CAPTURE(length);
            data::SampleData before = open(blend, 8, shuffle), after = open(blend, length, shuffle);
            std::vector<std::int32_t> seen = inputs(before, 0, 3); // 24 tokens
            after.start(3, before.position(3), true);
            const std::vector<std::int32_t> rest = inputs(after, 3, 72 / length);
            seen.insert(seen.end(), rest.begin(), rest.end());
            std::sort(seen.begin(), seen.end());
            for (int i = 0; i < 96; ++i) CHECK(seen[static_cast<std::size_t>(i)] == i);
            CHECK(after.position(3 + 72 / length).datasets[0].pass == 1);
        }
}

TEST_CASE("labels are the next tokens, also where blocks of another length end") {
    const Folder folder;
    const std::vector<data::BlendEntry> blend{{counting(folder, "a", 97, 0), 1.0}};
    data::SampleData before = open(blend, 8, true), after = open(blend, 12, true);
    after.start(3, before.position(3), true);
    std::vector<std::int32_t> sample(13);
    for (std::int64_t s = 3; s < 9; ++s) {
        after.read(s, sample);
        for (std::size_t i = 0; i + 1 < sample.size(); ++i)
            if (sample[i] % 8 != 7 || i + 2 == sample.size()) CHECK(sample[i + 1] == sample[i] + 1);
    }
}

TEST_CASE("another blend: datasets that stay go on, new ones begin") {
    const Folder folder;
    const std::string a = counting(folder, "a", 401, 0), b = counting(folder, "b", 401, 1000),
                      c = counting(folder, "c", 401, 2000);
    data::SampleData before = open({{a, 1.0}, {b, 1.0}}, 4, false);
    inputs(before, 0, 20);
    data::SampleData after = open({{c, 1.0}, {b, 1.0}}, 4, false);
    after.start(20, before.position(20), true);
    std::map<int, std::vector<std::int32_t>> seen;
    for (const std::int32_t token : inputs(after, 20, 20)) seen[token / 1000].push_back(token);
    REQUIRE(seen[1].size() == 40);
    CHECK(seen[1].front() == 1040); // ten samples of b were taken
    CHECK(seen[1].back() == 1079);
    REQUIRE(seen[2].size() == 40);
    CHECK(seen[2].front() == 2000);
    // A dataset that has moved is the same one.
    const std::string moved = counting(folder, "moved", 401, 0);
    data::SampleData same = open({{moved, 1.0}, {b, 1.0}}, 4, false), whole = open({{a, 1.0}, {b, 1.0}}, 4, false);
    same.start(20, before.position(20), true);
    CHECK(inputs(same, 20, 9) == inputs(whole, 20, 9));
}

TEST_CASE("under another order a pass that has begun is left") {
    const Folder folder;
    const std::vector<data::BlendEntry> blend{{counting(folder, "a", 97, 0), 1.0}};
    data::SampleData before = open(blend, 8, false), after = open(blend, 8, true);
    after.start(3, before.position(3), false);
    CHECK(after.position(3).datasets[0].pass == 1);
    std::vector<std::int32_t> seen = inputs(after, 3, 12);
    std::sort(seen.begin(), seen.end());
    for (int i = 0; i < 96; ++i) CHECK(seen[static_cast<std::size_t>(i)] == i);
}
