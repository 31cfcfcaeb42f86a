// Reads by POSIX calls, whose errors have reasons.
#include "engine/base/source_file.hpp"

#include "planner/base/error.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace moe::engine {

namespace {

[[noreturn]] void refuse_reading(const std::string& path, int error) {
    refuse("cannot read {}: {}", path, std::generic_category().message(error));
}

} // namespace

SourceFile::SourceFile(const std::string& path) : path_(path), descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor_ < 0) refuse_reading(path, errno);
    struct stat status {};
    const int error = ::fstat(descriptor_, &status) != 0 ? errno : S_ISDIR(status.st_mode) ? EISDIR : 0;
    if (error != 0) {
        ::close(descriptor_);
        refuse_reading(path, error);
    }
    size_ = static_cast<std::size_t>(status.st_size);
}

SourceFile::~SourceFile() { ::close(descriptor_); }

void SourceFile::read(std::size_t offset, std::span<char> out) const {
    while (!out.empty()) {
        const ssize_t got = ::pread(descriptor_, out.data(), out.size(), static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) refuse_reading(path_, errno);
        if (got == 0)
            refuse("{}: ends at byte {}, it had {} when it was opened: it was cut off meanwhile", path_, offset, size_);
        offset += static_cast<std::size_t>(got);
        out = out.subspan(static_cast<std::size_t>(got));
    }
}

bool SourceFile::next(std::string& out, std::size_t most) {
    constexpr std::size_t at_once = std::size_t{1} << 18;
    const std::size_t before = out.size();
    while (out.size() - before < most) {
        const std::size_t have = out.size(), wanted = std::min(at_once, most - (have - before));
        out.resize(have + wanted);
        const ssize_t got = ::read(descriptor_, out.data() + have, wanted);
        out.resize(have + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) refuse_reading(path_, errno);
        if (got == 0) break;
    }
    return out.size() > before;
}

} // namespace moe::engine
