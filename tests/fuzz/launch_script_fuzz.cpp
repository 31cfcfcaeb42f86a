// Fuzz target: bash scripts, lists of arguments and logs of other engines.
#include "tests/fuzz/refused.hpp"
#include "tools/import/readers/readers.hpp"

#include <cstdint>

using namespace moe::tools;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    moe::test::accept_or_refuse([&] {
        const std::string text(reinterpret_cast<const char*>(data), size);
        BashValues values("input");
        const SettingsFile file =
            has_argument_dump(text) ? read_argument_dump(text, "input") : read_launch_script(text, "input", values);
        if (file.settings.size() > max_settings) std::abort();
        for (const Setting& setting : file.settings)
            if (setting.name.empty()) std::abort();
    });
    return 0;
}
