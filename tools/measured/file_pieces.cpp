// Reads files through zlib, which passes through what is not compressed.
#include "tools/measured/file_pieces.hpp"

#include "planner/base/error.hpp"

#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <vector>

namespace moe::tools {

namespace {
constexpr std::size_t piece_bytes = 1 << 16;
}

struct FilePieces::File {
    gzFile handle = nullptr;
    std::vector<char> piece = std::vector<char>(piece_bytes);
    ~File() {
        if (handle != nullptr) gzclose(handle);
    }
};

FilePieces::FilePieces(const std::string& path, std::uint64_t limit)
    : file_(std::make_unique<File>()), path_(path), limit_(limit) {
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) refuse("cannot read {}: it is a directory", path);
    errno = 0;
    file_->handle = gzopen(path.c_str(), "rb");
    if (file_->handle == nullptr) refuse("cannot read {}: {}", path, std::strerror(errno));
    gzbuffer(file_->handle, piece_bytes);
}

FilePieces::~FilePieces() = default;

std::string_view FilePieces::next() {
    const int got = gzread(file_->handle, file_->piece.data(), static_cast<unsigned>(piece_bytes));
    int code = Z_OK;
    const char* words = gzerror(file_->handle, &code);
    if (got < 0 && code == Z_ERRNO) refuse("cannot read {}: {}", path_, std::strerror(errno));
    if (got < 0 || (got == 0 && code != Z_OK && code != Z_STREAM_END)) {
        const std::string_view why(words); // "PATH: reason"
        refuse("{}: damaged or cut short after {} bytes of content: {}", path_, read_,
               why.starts_with(path_ + ": ") ? why.substr(path_.size() + 2) : why);
    }
    read_ += static_cast<std::uint64_t>(got);
    if (read_ > limit_) refuse("{}: more than {} bytes of content: give a shorter part of it", path_, limit_);
    return {file_->piece.data(), static_cast<std::size_t>(got)};
}

NextPiece pieces_of(std::string_view text, std::size_t size) {
    return [text, size]() mutable {
        const std::string_view piece = text.substr(0, size);
        text.remove_prefix(piece.size());
        return piece;
    };
}

} // namespace moe::tools
