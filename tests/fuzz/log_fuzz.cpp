// Fuzz target: training logs of other engines.
#include "tests/fuzz/refused.hpp"
#include "tools/measured/log_reader.hpp"
#include "tools/measured/settled.hpp"

#include <cstdint>

using namespace moe::tools;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const std::vector<LogFormat> formats = load_log_formats();
    moe::test::accept_or_refuse([&] {
        const std::string_view text(reinterpret_cast<const char*>(data), size);
        const TrainingLog log = read_log(pieces_of(text, 1000), formats, "input");
        std::vector<double> seconds;
        for (const LogValues& step : log.steps)
            if (const auto& value = value_of(step, LogField::seconds); value && *value > 0.0) seconds.push_back(*value);
        if (!seconds.empty() && settle(seconds).used.empty()) std::abort();
    });
    return 0;
}
