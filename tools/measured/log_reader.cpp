// Collects what every format finds in a log, and decides in the end whose log it is.
#include "tools/measured/log_reader.hpp"

#include "planner/base/error.hpp"
#include "tools/measured/wrapped.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

namespace moe::tools {

namespace {

constexpr std::size_t most_lines = 20'000'000, most_sources = 4096;
constexpr std::size_t most_late = 3; // steps among which one is looked for that another rank has printed

struct LoggedRun {
    std::vector<std::vector<LogValues>> lines; // lines by kind of LogFormat::iterations
    LogValues facts, peaks;
    std::size_t length() const { return lines.front().empty() ? longest_side() : lines.front().size(); }
    std::size_t longest_side() const {
        std::size_t longest = 0;
        for (const auto& kind : lines) longest = std::max(longest, kind.size());
        return longest;
    }
};

void raise(std::optional<double>& peak, const std::optional<double>& value) {
    if (value) peak = std::max(peak.value_or(*value), *value);
}
void raise_memory(LogValues& peaks, const LogValues& values) {
    for (const LogField field : {LogField::allocated_gib, LogField::reserved_gib})
        raise(value_of(peaks, field), value_of(values, field));
}
void complete(LogValues& values, const LogValues& more) {
    for (std::size_t i = 0; i < log_fields; ++i)
        if (!values[i]) values[i] = more[i];
}

bool matches(const LogLine& kind, const LogRecord& record) {
    return kind.matches(record.glued) || (record.wrapped() && kind.matches(record.spaced));
}
LogValues read(const LogLine& kind, const LogRecord& record, bool peak = false) {
    LogValues values = kind.read(record.glued, peak);
    if (record.wrapped()) complete(values, kind.read(record.spaced, peak));
    return values;
}

// The lines that one rank printed, or all ranks where nothing tells them apart.
struct Source {
    std::vector<LoggedRun> runs;
    std::size_t length() const {
        std::size_t sum = 0;
        for (const LoggedRun& run : runs) sum += run.lines.front().size();
        return sum;
    }
    std::size_t longest_run() const {
        std::size_t longest = 0;
        for (const LoggedRun& run : runs) longest = std::max(longest, run.length());
        return longest;
    }
};

class Collector {
public:
    explicit Collector(const LogFormat& format) : format_(&format) {}

    const LogFormat& format() const { return *format_; }
    bool tells_steps() const { return steps_ > 0; }
    // Of two formats that of the log has more of: lines, then numbers in them; else it is one that is refused.
    std::array<std::size_t, 3> score() const { return {lines_, format_->refused.empty() ? 0U : 1U, numbers_}; }

    void take(const std::string& source, const LogRecord& record) {
        for (const std::string& text : format_->start)
            if (record.glued.find(text) != std::string_view::npos) begin(source);
        for (const LogLine& kind : format_->facts)
            if (matches(kind, record)) {
                begin(source);
                complete(current(source).facts, counted(read(kind, record)));
            }
        for (const LogLine& kind : format_->memory)
            if (matches(kind, record)) raise_memory(current(source).peaks, counted(read(kind, record, true)));
        for (std::size_t kind = 0; kind < format_->iterations.size(); ++kind)
            if (matches(format_->iterations[kind], record)) {
                add(source, kind, counted(read(format_->iterations[kind], record)));
                ++steps_;
                return;
            }
    }

    TrainingLog result() const {
        const auto& [name, source] = *std::max_element(
            sources_.begin(), sources_.end(), [](const auto& a, const auto& b) { return before(a.second, b.second); });
        const std::size_t longest = source.longest_run();
        std::size_t chosen = source.runs.size() - 1;
        while (2 * source.runs[chosen].length() < longest) --chosen;
        const std::size_t from_end = source.runs.size() - chosen;
        TrainingLog log;
        log.engine = format_->engine;
        log.format = format_->name;
        for (const LoggedRun& run : source.runs) log.runs += run.length() > 0 ? 1 : 0;
        log.runs -= 1; // A log has one run in any case.
        LogValues peaks = source.runs[chosen].peaks;
        log.facts = source.runs[chosen].facts;
        log.steps = steps_of(source.runs[chosen]);
        log.from_elapsed = add_differences(log.steps);
        for (const auto& [other_name, other] : sources_) {
            if (&other == &source || other.runs.size() < from_end) continue;
            const LoggedRun& run = other.runs[other.runs.size() - from_end];
            raise_memory(peaks, run.peaks);
            for (const LogValues& step : run.lines.front()) raise_memory(peaks, step);
            complete(log.facts, run.facts);
            add_sides(log.steps, run);
        }
        for (const LogValues& step : log.steps) raise_memory(peaks, step);
        log.allocated_gib = value_of(peaks, LogField::allocated_gib);
        log.reserved_gib = value_of(peaks, LogField::reserved_gib);
        return log;
    }

private:
    LogValues counted(LogValues values) {
        ++lines_;
        for (const auto& value : values) numbers_ += value ? 1 : 0;
        return values;
    }
    static bool before(const Source& a, const Source& b) {
        return std::pair(a.length(), a.longest_run()) < std::pair(b.length(), b.longest_run());
    }

    LoggedRun fresh() const {
        LoggedRun run;
        run.lines.resize(format_->iterations.size());
        return run;
    }
    Source& source_of(const std::string& name) {
        const std::string& known = sources_.size() < most_sources || sources_.contains(name) ? name : first_;
        if (sources_.empty()) first_ = name;
        Source& source = sources_[known];
        if (source.runs.empty()) source.runs.push_back(fresh());
        return source;
    }
    LoggedRun& current(const std::string& name) { return source_of(name).runs.back(); }
    void begin(const std::string& name) {
        Source& source = source_of(name);
        if (source.runs.back().length() > 0) source.runs.push_back(fresh());
    }

    // The line of this step that another rank has printed: the last one, or one shortly before it of the same loss. A
    // job that was started again has other losses, but for its first step.
    static LogValues* printed_before(std::vector<LogValues>& lines, double number, const std::optional<double>& loss) {
        const std::size_t first = lines.size() - std::min(most_late, lines.size());
        for (std::size_t i = lines.size(); i-- > first;) {
            if (value_of(lines[i], LogField::iteration) != number) continue;
            const bool last = i + 1 == lines.size();
            const bool repeated = i > 0 && loss && loss == value_of(lines[i], LogField::loss);
            return last || repeated ? &lines[i] : nullptr;
        }
        return nullptr;
    }

    void add(const std::string& name, std::size_t kind, const LogValues& values) {
        Source& source = source_of(name);
        std::vector<LogValues>& lines = source.runs.back().lines[kind];
        const auto number = value_of(values, LogField::iteration);
        if (number && !lines.empty()) {
            const auto last = value_of(lines.back(), LogField::iteration);
            if (LogValues* same = printed_before(lines, *number, value_of(values, LogField::loss))) {
                raise_memory(*same, values);
                return complete(*same, values);
            }
            // Lines that complete steps may stand before them: only steps make another run.
            const bool steps = kind == 0 || source.runs.back().lines.front().empty();
            if (steps && last && *number < *last) source.runs.push_back(fresh());
        }
        source.runs.back().lines[kind].push_back(values);
    }

    // Steps with what lines of the other kinds add to them. Without lines of the first kind another one stands for it.
    std::vector<LogValues> steps_of(const LoggedRun& run) const {
        std::vector<LogValues> steps = run.lines.front();
        for (std::size_t kind = 1; steps.empty() && kind < run.lines.size(); ++kind) steps = run.lines[kind];
        add_sides(steps, run);
        double number = 0.0;
        for (LogValues& step : steps) {
            std::optional<double>& iteration = value_of(step, LogField::iteration);
            number = iteration ? *iteration : number + 1.0;
            iteration = number;
        }
        return steps;
    }
    // Lines of another kind belong to the steps in their order. One more of them at the front or the end is tolerated:
    // where a run was cut, one of the two lines of its last step is missing.
    static void add_sides(std::vector<LogValues>& steps, const LoggedRun& run) {
        for (std::size_t kind = 1; kind < run.lines.size(); ++kind) {
            const std::vector<LogValues>& lines = run.lines[kind];
            const std::size_t longer = std::max(lines.size(), steps.size()),
                              shorter = std::min(lines.size(), steps.size());
            if (longer > shorter + 1) continue;
            for (std::size_t i = 0; i < shorter; ++i) complete(steps[i], lines[i]);
        }
    }

    const LogFormat* format_;
    std::map<std::string, Source> sources_;
    std::string first_;
    std::size_t lines_ = 0, numbers_ = 0, steps_ = 0;
};

const Collector* best_of(const std::vector<Collector>& collectors) {
    const Collector* best = nullptr;
    for (const Collector& one : collectors) {
        if (!one.tells_steps()) continue;
        const bool more = best == nullptr || one.score() > best->score() ||
                          (one.score() == best->score() && best->format().twin == one.format().name);
        if (more) best = &one;
    }
    return best;
}

} // namespace

TrainingLog read_log(const NextPiece& next, const std::vector<LogFormat>& formats, const std::string& place) {
    std::vector<Collector> collectors(formats.begin(), formats.end());
    std::size_t lines = 0;
    Unwrapper unwrapper(formats, [&](const LogRecord& record) {
        const std::string source = log_source(record.glued);
        for (Collector& collector : collectors) collector.take(source, record);
    });
    const bool ended = for_each_line(next, [&](std::string_view line) {
        if (++lines > most_lines) refuse("{}: more than {} lines: give the part of one run", place, most_lines);
        unwrapper.line(line);
    });
    unwrapper.finish();
    const Collector* best = best_of(collectors);
    if (best == nullptr) {
        std::set<std::string> engines;
        for (const LogFormat& format : formats)
            if (format.refused.empty()) engines.insert(format.engine);
        refuse("{}: no line of the {} tells of a training step in a known way (profiles/logs: {})", place, lines,
               fmt::join(engines, ", "));
    }
    if (!best->format().refused.empty()) refuse("{}: {}", place, best->format().refused);
    TrainingLog log = best->result();
    log.cut = !ended;
    return log;
}

namespace {

// Refuses files that hold no lines of text, by their first bytes.
void check_text(std::string_view first, const std::string& path) {
    for (const auto& [bytes, what] :
         {std::pair(std::string_view("\x28\xb5\x2f\xfd"), "compressed by zstd: give it as text or as .gz"),
          std::pair(std::string_view("\xfd"
                                     "7zXZ"),
                    "compressed by xz: give it as text or as .gz"),
          std::pair(std::string_view("BZh"), "compressed by bzip2: give it as text or as .gz"),
          std::pair(std::string_view("PK\x03\x04"), "a zip archive: give the log inside"),
          std::pair(std::string_view("SQLite format 3"), "a profile of Nsight Systems: give it with --profile"),
          std::pair(std::string_view("\xff\xfe"), "text in UTF-16: give it in UTF-8")})
        if (first.starts_with(bytes)) refuse("{}: {}", path, what);
    if (first.substr(0, 64).find("brain.Event:") != std::string_view::npos)
        refuse("{}: a file of TensorBoard: give what the job printed", path);
}

} // namespace

TrainingLog read_log_file(const std::string& path) {
    FilePieces file(path, most_log_bytes);
    bool first = true;
    const auto next = [&] {
        const std::string_view piece = file.next();
        if (std::exchange(first, false)) check_text(piece, path);
        return piece;
    };
    return read_log(next, load_log_formats(), path);
}

} // namespace moe::tools
