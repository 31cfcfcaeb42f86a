// Fuzz target: a safetensors file, and the values of its tensors.
#include "engine/weights/safetensors.hpp"
#include "tests/fuzz/input_file.hpp"
#include "tests/fuzz/refused.hpp"

#include <cstdint>
#include <vector>

using namespace moe;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string path = moe::test::input_file({reinterpret_cast<const char*>(data), size});
    moe::test::accept_or_refuse([&] {
        const weights::Safetensors file(path);
        for (const auto& [name, tensor] : file.tensors())
            moe::test::accept_or_refuse([&, &name = name, &tensor = tensor] {
                std::vector<float> values(static_cast<std::size_t>(tensor.elements));
                weights::read_floats(tensor, name, 0, values);
            });
    });
    return 0;
}
