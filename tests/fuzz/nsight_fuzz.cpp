// Fuzz target: SQLite exports of Nsight Systems, through a file as the reader wants it.
#include "tests/fuzz/refused.hpp"
#include "tests/support/folder.hpp"
#include "tools/measured/nsight.hpp"

#include <cstdint>
#include <fstream>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const Folder folder;
    const std::string path = folder / "input.sqlite";
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(data), static_cast<std::streamsize>(size));
    moe::test::accept_or_refuse([&] {
        const moe::tools::DeviceProfile profile = moe::tools::read_nsight_file(path);
        moe::tools::steps_of(profile, profile.windows.empty() ? 1 : 0, "input");
    });
    return 0;
}
