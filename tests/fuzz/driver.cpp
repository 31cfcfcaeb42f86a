// Calls a fuzz target with changed seeds where libFuzzer is not at hand: the same inputs for the same MOE_PLAN_SEED.
#include "tests/support/draws.hpp"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

using Bytes = std::vector<std::uint8_t>;
constexpr std::size_t most_bytes = 1 << 18;

class Changes {
public:
    Changes(const std::vector<Bytes>& seeds, std::uint64_t seed) : seeds_(seeds), random_(seed) {}

    Bytes next() {
        Bytes input = seeds_[below(seeds_.size())];
        for (std::size_t changes = 1 + below(8); changes > 0; --changes) change(input);
        input.resize(std::min(input.size(), most_bytes));
        return input;
    }

private:
    std::size_t below(std::size_t limit) { return limit == 0 ? 0 : random_() % limit; }
    void change(Bytes& input) {
        const std::size_t at = below(input.size() + 1),
                          length = below(std::min<std::size_t>(64, input.size() - at) + 1);
        const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
        const auto end = place + static_cast<std::ptrdiff_t>(length);
        switch (below(7)) {
        case 0:
            if (at < input.size()) input[at] ^= static_cast<std::uint8_t>(1U << below(8));
            break;
        case 1:
            if (at < input.size()) input[at] = static_cast<std::uint8_t>(random_());
            break;
        case 2:
            input.resize(at);
            break;
        case 3:
            input.erase(place, end);
            break;
        case 4: { // a part twice
            const Bytes part(place, end);
            input.insert(place, part.begin(), part.end());
            break;
        }
        case 5: { // a part of another seed
            const Bytes& other = seeds_[below(seeds_.size())];
            const std::size_t from = below(other.size()),
                              count = below(std::min<std::size_t>(4096, other.size() - from) + 1);
            const auto first = other.begin() + static_cast<std::ptrdiff_t>(from);
            input.insert(place, first, first + static_cast<std::ptrdiff_t>(count));
            break;
        }
        default: { // what numbers and texts have at their edges
            static const std::string words[] = {"-1",   "1e308", "99999999999999999999", "0", "\"", "\\", "[", "{",
                                                "null", "\x1b["};
            const std::string& word = words[below(std::size(words))];
            input.insert(place, word.begin(), word.end());
        }
        }
    }

    const std::vector<Bytes>& seeds_;
    std::mt19937_64 random_;
};

std::vector<Bytes> read_seeds(const std::vector<std::string>& folders) {
    std::vector<std::filesystem::path> paths;
    for (const std::string& folder : folders)
        for (const auto& entry : std::filesystem::directory_iterator(folder))
            if (entry.is_regular_file()) paths.push_back(entry.path());
    std::sort(paths.begin(), paths.end());
    std::vector<Bytes> seeds;
    for (const auto& path : paths) {
        std::ifstream file(path, std::ios::binary);
        seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    return seeds;
}

} // namespace

int main(int count, char** words) {
    if (count < 2) return std::fprintf(stderr, "usage: %s FOLDER_OF_SEEDS..\n", words[0]), 2;
    const std::vector<Bytes> seeds = read_seeds({words + 1, words + count});
    if (seeds.empty()) return std::fprintf(stderr, "%s: no seeds\n", words[1]), 2;
    for (const Bytes& seed : seeds) LLVMFuzzerTestOneInput(seed.data(), seed.size());
    LLVMFuzzerTestOneInput(nullptr, 0);
    const std::uint64_t seed = environment("MOE_PLAN_SEED", 1), inputs = environment("MOE_PLAN_INPUTS", draws(4000));
    Changes changes(seeds, seed);
    for (std::uint64_t i = 0; i < inputs; ++i) {
        const Bytes input = changes.next();
        // Kept before the call, since a broken reader may end this process; removed behind the last one.
        std::ofstream("crash-input", std::ios::binary)
            .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::filesystem::remove("crash-input");
    std::printf("%zu seeds, %llu changed ones of MOE_PLAN_SEED=%llu\n", seeds.size(),
                static_cast<unsigned long long>(inputs), static_cast<unsigned long long>(seed));
    return 0;
}
