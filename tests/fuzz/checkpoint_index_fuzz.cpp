// Fuzz target: the index of a checkpoint, with the checksum that its content has, so that fields are reached.
#include "engine/base/crc32c.hpp"
#include "engine/weights/checkpoint_index.hpp"
#include "planner/base/json.hpp"
#include "tests/fuzz/input_file.hpp"
#include "tests/fuzz/json_mutator.hpp"
#include "tests/fuzz/refused.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <cstdint>
#include <string>

using namespace moe;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string text(reinterpret_cast<const char*>(data), size);
    moe::test::accept_or_refuse([&] { weights::read_index(moe::test::input_file(text)); });
    moe::test::accept_or_refuse([&] {
        const std::string content = json_text(parse_json<nlohmann::ordered_json>(text, "input"));
        const std::string path =
            moe::test::input_file(fmt::format(R"({{"crc32c":{},"checkpoint":{}}})", engine::crc32c(content), content));
        constexpr std::int64_t short_tensor = 1 << 16; // a reader has counted a longer one's elements in its files
        for (const auto& [name, tensor] : weights::read_index(path).tensors)
            if (tensor.rows * tensor.cols <= short_tensor) weights::check_partition(path, name, tensor);
    });
    return 0;
}
