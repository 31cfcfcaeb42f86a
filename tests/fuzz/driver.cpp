// Calls a fuzz target with changed seeds where libFuzzer is not at hand: the same inputs for the same MOE_PLAN_SEED.
#include "tests/support/draws.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
// Only targets of structured inputs have one.
extern "C" [[gnu::weak]] std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                                             std::size_t most_bytes, unsigned seed);

namespace {

using Bytes = std::vector<std::uint8_t>;
constexpr std::size_t most_bytes = 1 << 18;

class Changes {
public:
    Changes(const std::vector<Bytes>& seeds, std::uint64_t seed) : seeds_(seeds), random_(seed) {}

    Bytes next() {
        Bytes input = seeds_[below(seeds_.size())];
        if (LLVMFuzzerCustomMutator != nullptr) {
            const std::size_t size = input.size();
            input.resize(most_bytes);
            input.resize(LLVMFuzzerCustomMutator(input.data(), size, most_bytes, static_cast<unsigned>(random_())));
        } else {
            mutate(input);
        }
        return input;
    }

    void mutate(Bytes& input) {
        for (std::size_t changes = 1 + below(8); changes > 0; --changes) change(input);
        input.resize(std::min(input.size(), most_bytes));
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

Changes* changes_under_way = nullptr; // for LLVMFuzzerMutate, which is called from within them

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

// Kept before the call, since a broken reader may end this process; removed behind the last one. The file stays open:
// a file system may write a truncated one to the disk whenever it is closed.
void keep(int file, const Bytes& input) {
    if (file < 0 || ::pwrite(file, input.data(), input.size(), 0) != static_cast<ssize_t>(input.size()) ||
        ::ftruncate(file, static_cast<off_t>(input.size())) != 0)
        std::fprintf(stderr, "crash-input: cannot be written\n"), std::exit(2);
}

} // namespace

// What libFuzzer offers to mutators of a target.
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most) {
    Bytes input(data, data + size);
    changes_under_way->mutate(input);
    const std::size_t kept = std::min(input.size(), most);
    std::copy_n(input.begin(), kept, data);
    return kept;
}

int main(int count, char** words) {
    if (count < 2) return std::fprintf(stderr, "usage: %s FOLDER_OF_SEEDS..\n", words[0]), 2;
    const std::vector<Bytes> seeds = read_seeds({words + 1, words + count});
    if (seeds.empty()) return std::fprintf(stderr, "%s: no seeds\n", words[1]), 2;
    for (const Bytes& seed : seeds) LLVMFuzzerTestOneInput(seed.data(), seed.size());
    LLVMFuzzerTestOneInput(nullptr, 0);
    const std::uint64_t seed = environment("MOE_PLAN_SEED", 1), inputs = environment("MOE_PLAN_INPUTS", draws(4000));
    const int kept = ::open("crash-input", O_RDWR | O_CREAT, 0644);
    Changes changes(seeds, seed);
    changes_under_way = &changes;
    for (std::uint64_t i = 0; i < inputs; ++i) {
        const Bytes input = changes.next();
        keep(kept, input);
        LLVMFuzzerTestOneInput(input.data(), input.size());
    }
    std::filesystem::remove("crash-input");
    std::printf("%zu seeds, %llu changed ones of MOE_PLAN_SEED=%llu\n", seeds.size(),
                static_cast<unsigned long long>(inputs), static_cast<unsigned long long>(seed));
    return 0;
}
