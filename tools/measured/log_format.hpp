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
    average_seconds,           // seconds of a step, averaged since the job began
    average_steps_per_second,  // its inverse
    elapsed,                   // seconds since the job began; a duration: "1:02:03", "2h 3m 4s"
    samples_per_second,        // sequences per second of the whole job
    tokens_per_second,         // tokens per second of the whole job
    tokens_per_second_per_gpu, // tokens per second of one GPU
    tflops,                    // model TFLOP/s of one GPU, as the engine counts them
    mfu,                       // of the peak that the engine takes for the GPU, per cent
    loss,
    skipped, // steps, of those that the line is of, whose optimizer was left out
    allocated_gib,
    reserved_gib,
    reserved_percent, // of the GPU's memory
    capacity_gib,     // memory of a GPU
    // The job's own figures, held to the plan's.
    batch,       // sequences of a step, over the whole job
    tokens,      // tokens of a step, over the whole job
    seq,         // tokens of a sequence
    micro_batch, // sequences of a micro-batch
    gpus,
    tensor_parallel,
    context_parallel,
    pipeline_parallel,
    expert_parallel,
    layers,
    hidden,
};
inline constexpr std::size_t log_fields = 27;
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
    std::vector<std::string> before;     // one of these stands right behind the number; empty: anything may
    std::vector<std::string> not_before; // none of these does
    double scale = 1.0;                  // factor to the unit of the field
    bool letters = false;                // K, M, G, B, T right behind the number are thousands, millions, ..
};

// Lines of one kind: all texts of `has`, one of `has_one` where there are some, and none of `lacks` stand in them.
struct LogLine {
    std::vector<std::string> has, has_one, lacks;
    std::vector<LogNumber> numbers; // of several for a field the first that the line has counts
    // Where something wrapped the log: a line that opens a record goes on up to the line with the first text of
    // `until`, or where none has it, with another one.
    std::vector<std::string> from, until;

    bool matches(std::string_view line) const;
    // Whether all texts of `from` stand in the line, and behind that of the iteration its number.
    bool opens(std::string_view line) const;
    // Fields that the line lacks stay empty. peak: of several numbers behind a text the largest, since ranks that print
    // at once share lines.
    LogValues read(std::string_view line, bool peak = false) const;
};

struct LogFormat {
    std::string name;                // name of the file
    std::string engine;              // name of the engine as people call it
    std::string twin;                // format that is preferred where the lines fit both equally well; "" = none
    std::string refused;             // why such a log says nothing of the steps of a plan; "" = it does
    std::vector<std::string> start;  // texts of a line with which a run begins
    std::vector<LogLine> iterations; // lines of steps: the first tells of a step; others complete steps in their order
    std::vector<LogLine> memory;     // lines of memory peaks, now and then
    std::vector<LogLine> facts;      // lines of what holds for the whole run
};

// A format in JSON (docs/reference/measurements.md); `place` is named where it is refused.
LogFormat parse_log_format(const std::string& text, const std::string& place);
// All of profiles/logs, by name. Throws Error (bad_input) that names the file and the field.
std::vector<LogFormat> load_log_formats();

// Where the number right behind the text stands, and its value: "4,376", "-1.5e-3". Between them there may be blanks,
// quotes, and dots that fill a column. Nothing where the text has no such place. Letters, digits and _ before the text
// make it another word.
struct FoundNumber {
    double value = 0.0;
    std::size_t end = 0; // place behind the number
};
std::optional<FoundNumber> number_after(std::string_view line, std::string_view text, std::size_t from = 0);
// The same of one of the number's texts, with what it says of letters and of the text behind, in its field's unit.
std::optional<FoundNumber> number_of(const LogNumber& number, std::string_view line, std::string_view text,
                                     std::size_t from = 0);

} // namespace moe::tools
