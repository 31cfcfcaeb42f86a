// Maps a file with mmap and lets go of it again.
#include "engine/base/mapped_file.hpp"

#include "planner/base/error.hpp"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace moe::engine {

MappedFile::MappedFile(const std::string& path) : path_(path) {
    const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) refuse("cannot read {}: {}", path, std::strerror(errno));
    struct stat status {};
    const bool regular = ::fstat(file, &status) == 0 && S_ISREG(status.st_mode);
    if (!regular) {
        ::close(file);
        refuse("cannot read {}: not a regular file", path);
    }
    size_ = static_cast<std::size_t>(status.st_size);
    if (size_ > 0) {
        void* map = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
        const int error = errno;
        ::close(file);
        if (map == MAP_FAILED) refuse("cannot map {}: {}", path, std::strerror(error));
        data_ = static_cast<const char*>(map);
    } else {
        ::close(file);
    }
}

MappedFile::~MappedFile() {
    if (data_ != nullptr) ::munmap(const_cast<char*>(data_), size_);
}

} // namespace moe::engine
