// Formats of training logs as data: which lines of an engine's log tell of steps, and behind which words their numbers
// stand.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace moe::tools {

// Everything that a line may tell. Figures of time are per step.
enum class LogField : unsigned char {
    iteration,
    seconds,
    tokens_per_second,         // tokens per second of the whole job
    tokens_per_second_per_gpu, // tokens per second of one GPU
    tflops,                    // model TFLOP/s of one GPU, as the engine counts them
    loss,
    batch,  // sequences of a step, over the whole job
    tokens, // tokens of a step, over the whole job
    allocated_gib,
    reserved_gib,
};
inline constexpr std::size_t log_fields = 10;
using LogValues = std::array<std::optional<double>, log_fields>;
inline std::optional<double>& value_of(LogValues& values, LogField field) {
    return values[static_cast<std::size_t>(field)];
}
inline const std::optional<double>& value_of(const LogValues& values, LogField field) {
    return values[static_cast<std::size_t>(field)];
}

struct LogNumber { // number of a line: the first one that stands right behind one of these texts
    LogField field{};
    std::vector<std::string> after;
    double scale = 1.0; // factor to the unit of the field
};

// Lines of one kind: all texts of `has` and none of `lacks` stand in them.
struct LogLine {
    std::vector<std::string> has, lacks;
    std::vector<LogNumber> numbers;

    bool matches(std::string_view line) const;
    // Fields that the line lacks stay empty. peak: of several numbers behind a text the largest, since ranks that print
    // at once share lines.
    LogValues read(std::string_view line, bool peak = false) const;
};

struct LogFormat {
    std::string name;                // name of the file
    std::string engine;              // name of the engine as people call it
    std::string twin;                // format that is preferred where the lines fit both equally well; "" = none
    std::vector<std::string> start;  // texts of a line with which a run begins
    std::vector<LogLine> iterations; // lines of steps: the first tells of a step; others complete steps in their order
    std::vector<LogLine> memory;     // lines of memory peaks, now and then
    std::vector<LogLine> facts;      // lines of what holds for the whole run
};

// A format in JSON (docs/reference/measurements.md); `place` is named where it is refused.
LogFormat parse_log_format(const std::string& text, const std::string& place);
// All of profiles/logs, by name. Throws Error (bad_input) that names the file and the field.
std::vector<LogFormat> load_log_formats();

// Where the number right behind the text stands, blanks between them allowed, and its value: "4,376", "-1.5e-3".
// Nothing where the text has no such place. Letters, digits and _ before the text make it another word.
struct FoundNumber {
    double value = 0.0;
    std::size_t end = 0; // place behind the number
};
std::optional<FoundNumber> number_after(std::string_view line, std::string_view text, std::size_t from = 0);

} // namespace moe::tools
