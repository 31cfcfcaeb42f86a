// Files by memory map.
#pragma once

#include <cstddef>
#include <string>

namespace moe::engine {

// A file mapped for reading. Throws Error (bad_input) "cannot read PATH: reason".
class MappedFile {
public:
    explicit MappedFile(const std::string& path);
    ~MappedFile();
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    const std::string& path() const { return path_; }
    std::size_t size() const { return size_; }
    const char* at(std::size_t offset) const { return data_ + offset; }

private:
    std::string path_;
    std::size_t size_ = 0;
    const char* data_ = nullptr;
};

} // namespace moe::engine
