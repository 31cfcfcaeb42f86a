// Fuzz target: traces of PyTorch's profiler, their steps, and the sums of a comparison.
#include "tests/fuzz/refused.hpp"
#include "tools/measured/chrome_trace.hpp"
#include "tools/report/profile_comparison.hpp"

#include <cstdint>

using namespace moe::tools;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const KernelTable table = load_kernel_table("pytorch");
    moe::test::accept_or_refuse([&] {
        const std::string_view text(reinterpret_cast<const char*>(data), size);
        const DeviceProfile profile = read_chrome_trace(pieces_of(text, 1000), "input");
        moe::program::Timeline predicted;
        compare_profile(predicted, 0, profile, steps_of(profile, 0, "input"), table);
    });
    return 0;
}
