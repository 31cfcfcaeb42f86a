// Event files of TensorBoard: scalars by tag and step.
//
// A file is a row of records: length (8 bytes), its masked CRC-32C, the bytes, their masked CRC-32C, all little-endian
// (tensorflow/core/lib/io/record_writer.cc). The bytes are an Event (tensorflow/core/util/event.proto).
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moe::tools {

using Scalars = std::vector<std::pair<std::string, double>>; // values by tag

// One record around these bytes.
std::string event_record(std::string_view bytes);

class EventFile {
public:
    // A new file in the folder, named by time and process. Events of other files from step `first` on no longer count.
    // Throws Error (failure).
    EventFile(const std::string& folder, double wall_seconds, std::int64_t first);
    // Written and flushed before it returns. Throws Error (failure).
    void add(double wall_seconds, std::int64_t step, const Scalars& scalars);
    const std::string& path() const { return path_; }

private:
    void write(const std::string& event);

    struct Close {
        void operator()(std::FILE* file) const { std::fclose(file); }
    };
    std::string path_;
    std::unique_ptr<std::FILE, Close> file_;
};

} // namespace moe::tools
