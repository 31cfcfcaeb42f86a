// Files that are read piece by piece, and never mapped: one that is cut short meanwhile is a message, not a signal.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace moe::engine {

// A file open for reading. Throws Error (bad_input) "cannot read PATH: reason".
class SourceFile {
public:
    explicit SourceFile(const std::string& path);
    ~SourceFile();
    SourceFile(const SourceFile&) = delete;
    SourceFile& operator=(const SourceFile&) = delete;

    const std::string& path() const { return path_; }
    std::size_t size() const { return size_; } // bytes, when it was opened
    // Fills `out` with the bytes from `offset` on. For several threads at once. Throws Error (bad_input) where the file
    // has ended before them by now.
    void read(std::size_t offset, std::span<char> out) const;
    // Appends the next bytes, at most `most`, to `out`; false at the end of the file.
    bool next(std::string& out, std::size_t most);

private:
    std::string path_;
    std::size_t size_ = 0;
    int descriptor_ = -1;
};

} // namespace moe::engine
