// A file in pieces, plain or compressed by gzip, with a bound on what comes out of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

namespace moe::tools {

// The next piece of something that is read front to back; empty at the end. A piece lives until the next call.
using NextPiece = std::function<std::string_view()>;

class FilePieces {
public:
    // Throws Error (bad_input) "cannot read PATH: reason". limit: bytes after decompression.
    FilePieces(const std::string& path, std::uint64_t limit);
    ~FilePieces();
    FilePieces(const FilePieces&) = delete;
    FilePieces& operator=(const FilePieces&) = delete;

    // At most 64 KiB. Throws Error (bad_input) where the compression is damaged or cut short, and beyond the limit.
    std::string_view next();

private:
    struct File;
    std::unique_ptr<File> file_;
    std::string path_;
    std::uint64_t limit_, read_ = 0;
};

// Pieces of text that lies in memory, all of them of `size` bytes but the last.
NextPiece pieces_of(std::string_view text, std::size_t size = 1 << 16);

} // namespace moe::tools
