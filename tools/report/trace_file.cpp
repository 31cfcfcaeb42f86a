// Writes timelines in the format of their name, and reads JSON back.
#include "tools/report/trace_file.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/program/trace_stream.hpp"
#include "tools/measured/file_pieces.hpp"

#include <zlib.h>

#include <array>
#include <functional>
#include <sstream>
#include <string_view>

namespace moe::tools {

namespace {

constexpr std::uint64_t most_bytes = std::uint64_t{8} << 30; // of text: some forty million rows

bool is_gzip(const std::string& path) { return path.ends_with(".json.gz"); }

// What is written to it leaves compressed.
class Gzip {
public:
    using Append = std::function<void(std::string_view)>;

    explicit Gzip(const Append& append) : append_(append) {
        constexpr int window_of_gzip = 15 + 16; // zlib.h: 16 more than the window's bits asks for a gzip header
        if (deflateInit2(&stream_, Z_DEFAULT_COMPRESSION, Z_DEFLATED, window_of_gzip, 8, Z_DEFAULT_STRATEGY) != Z_OK)
            fail("zlib: not enough memory");
    }
    Gzip(const Gzip&) = delete;
    Gzip& operator=(const Gzip&) = delete;
    ~Gzip() { deflateEnd(&stream_); }

    void write(std::string_view text) {
        stream_.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data())); // NOLINT: zlib only reads it
        stream_.avail_in = static_cast<uInt>(text.size());
        push(Z_NO_FLUSH);
    }
    void finish() { push(Z_FINISH); }

private:
    void push(int flush) {
        do {
            stream_.next_out = reinterpret_cast<Bytef*>(piece_.data());
            stream_.avail_out = static_cast<uInt>(piece_.size());
            deflate(&stream_, flush);
            append_(std::string_view(piece_.data(), piece_.size() - stream_.avail_out));
        } while (stream_.avail_out == 0);
    }

    const Append& append_;
    z_stream stream_{};
    std::array<char, 1 << 16> piece_{};
};

} // namespace

void write_timeline(const program::Timeline& timeline, const TracedPlans& plans, const std::string& path) {
    if (is_perfetto(path)) return write_file(path, perfetto_trace(timeline, plans));
    if (!is_gzip(path)) return program::write_trace(timeline, path);
    write_file(path, [&timeline](const Gzip::Append& append) {
        Gzip gzip(append);
        program::append_trace(timeline, [&gzip](std::string_view text) { gzip.write(text); });
        gzip.finish();
    });
}

program::Timeline read_timeline(const std::string& path) {
    if (!is_gzip(path)) return program::read_trace(path);
    FilePieces pieces(path, most_bytes);
    std::string text;
    for (std::string_view piece = pieces.next(); !piece.empty(); piece = pieces.next()) text += piece;
    std::istringstream stream(std::move(text));
    return program::read_trace(stream, path);
}

} // namespace moe::tools
