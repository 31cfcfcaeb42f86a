// Fuzz target: the metadata of a distributed checkpoint, and the archive of a tensor.
#include "engine/weights/torch_archive.hpp"
#include "engine/weights/torch_dist.hpp"
#include "tests/fuzz/input_file.hpp"
#include "tests/fuzz/refused.hpp"
#include "tests/support/folder.hpp"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string_view>
#include <vector>

using namespace moe;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string path = test::input_file({reinterpret_cast<const char*>(data), size});
    if (std::string_view(reinterpret_cast<const char*>(data), size).starts_with("PK")) {
        test::accept_or_refuse([&] {
            const engine::SourceFile file(path);
            const weights::StoredTensor tensor = weights::torch_tensor(file, 0, size, "input");
            std::vector<float> some(static_cast<std::size_t>(std::min<std::int64_t>(tensor.elements, 64)));
            weights::read_floats(tensor, "input", tensor.elements - static_cast<std::int64_t>(some.size()), some);
        });
        return 0;
    }
    static const Folder folder;
    std::filesystem::remove(folder / ".metadata");
    std::filesystem::create_symlink(path, folder / ".metadata");
    test::accept_or_refuse([&] {
        weights::TorchDist checkpoint(folder / "");
        for (const auto& [name, tensor] : checkpoint.tensors()) checkpoint.open(name);
    });
    return 0;
}
