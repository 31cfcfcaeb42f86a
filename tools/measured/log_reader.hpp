// Reads a training log of another engine: recognises the engine by its lines, and takes the last run apart into steps.
#pragma once

#include "tools/measured/file_pieces.hpp"
#include "tools/measured/log_format.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

// Bytes of a log that are read, after decompression.
inline constexpr std::uint64_t most_log_bytes = std::uint64_t{4} << 30;

struct TrainingLog {
    std::string engine, format;
    std::size_t runs = 1;         // number of runs that stand one after another in the log; the last whole one is given
    bool cut = false;             // whether the last line has no line feed and was left out: its numbers may be cut
    std::vector<LogValues> steps; // lines of that run, in order; seldom every step
    LogValues facts;              // what the log says of the whole run: batch, GPUs, ..
    bool from_elapsed = false;    // seconds of steps are differences of times since the job began
    std::optional<double> allocated_gib, reserved_gib; // peaks in GiB over ranks and steps
};

// Of several runs the last one counts that has at least half as many lines as the longest. Lines of several ranks may
// be mixed: log_source() keeps them apart, and a line that another rank repeats counts once. Throws Error (bad_input)
// naming `place` where no format recognises the log, or one whose logs say nothing of a plan's steps.
TrainingLog read_log(const NextPiece& next, const std::vector<LogFormat>& formats, const std::string& place);
TrainingLog read_log_file(const std::string& path);

// What the front of a line says of the rank that printed it, as "[rank3]:" or "3: "; "" where it says nothing.
std::string log_source(std::string_view line);

// Gives steps that tell no time but how long the job has run by then (LogField::elapsed, average_seconds,
// average_steps_per_second) the seconds of a step since an earlier line. Returns whether there were such.
bool add_differences(std::vector<LogValues>& steps);

// Calls line(text) for each line, colours removed, cut after 64 KiB; a carriage return ends a line as well. Returns
// whether the last line had an end.
bool for_each_line(const NextPiece& next, const std::function<void(std::string_view)>& line);

} // namespace moe::tools
