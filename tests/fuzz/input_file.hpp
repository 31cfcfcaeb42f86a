// An input as a file in memory, for readers that take a path.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace moe::test {

// Valid until the next call.
inline std::string input_file(std::string_view bytes) {
    static const int file = ::memfd_create("input", MFD_CLOEXEC);
    if (file < 0 || ::ftruncate(file, 0) != 0 ||
        ::pwrite(file, bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
        std::abort();
    return "/proc/self/fd/" + std::to_string(file);
}

} // namespace moe::test
