// Fuzz target: published runs as CSV, and the token counts of a run.
#include "simulator/published/runs.hpp"
#include "simulator/routing/routing.hpp"
#include "tests/fuzz/input_file.hpp"
#include "tests/fuzz/refused.hpp"

#include <cstdint>
#include <string>

using namespace moe;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string text(reinterpret_cast<const char*>(data), size);
    moe::test::accept_or_refuse([&] { published::runs_from_csv(text, "input"); });
    const std::string path = moe::test::input_file(text);
    moe::test::accept_or_refuse([&] { routing::load_histogram(path); });
    return 0;
}
