// Collects what every format finds in a log, and decides in the end whose log it is.
#include "tools/measured/log_reader.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <map>

namespace moe::tools {

namespace {

constexpr std::size_t most_lines = 20'000'000, most_sources = 4096;

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
    std::size_t score() const { return score_; }
    bool tells_steps() const { return steps_ > 0; }

    void take(const std::string& source, std::string_view line) {
        for (const std::string& text : format_->start)
            if (line.find(text) != std::string_view::npos) begin(source);
        for (const LogLine& kind : format_->facts)
            if (kind.matches(line)) {
                begin(source);
                complete(current(source).facts, kind.read(line));
                ++score_;
            }
        for (const LogLine& kind : format_->memory)
            if (kind.matches(line)) {
                raise_memory(current(source).peaks, kind.read(line, true));
                ++score_;
            }
        for (std::size_t kind = 0; kind < format_->iterations.size(); ++kind)
            if (format_->iterations[kind].matches(line)) {
                add(source, kind, format_->iterations[kind].read(line));
                ++score_;
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

    void add(const std::string& name, std::size_t kind, const LogValues& values) {
        Source& source = source_of(name);
        std::vector<LogValues>& steps = source.runs.back().lines.front();
        const auto number = value_of(values, LogField::iteration);
        if (kind == 0 && number && !steps.empty()) {
            const auto last = value_of(steps.back(), LogField::iteration);
            if (number == last) { // The line is another rank's.
                raise_memory(steps.back(), values);
                return complete(steps.back(), values);
            }
            // Lines that complete steps may stand before them: only steps make another run.
            if (last && *number < *last) source.runs.push_back(fresh());
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
    std::size_t score_ = 0, steps_ = 0;
};

// "[rank3]:", "[default3]:", "[1,3]<stdout>:" or "3: " at the front of a line: what launchers put before a rank's
// lines.
std::string source_of(std::string_view line) {
    std::size_t at = line.find_first_not_of(' ');
    if (at == std::string_view::npos) return "";
    const std::size_t begin = at;
    const auto digits = [&] {
        const std::size_t first = at;
        while (at < line.size() && line[at] >= '0' && line[at] <= '9') ++at;
        return at > first && at - first <= 7;
    };
    const auto text = [&](std::string_view wanted) {
        const bool there = line.substr(at).starts_with(wanted);
        if (there) at += wanted.size();
        return there;
    };
    const auto whole = [&] { return std::string(line.substr(begin, at - begin)); };
    if (line[at] != '[') return digits() && text(": ") ? whole() : "";
    for (const std::string_view opening : {"[rank", "[default"}) {
        at = begin;
        if (text(opening) && digits() && text("]:")) return whole();
    }
    at = begin;
    return text("[") && digits() && text(",") && digits() && text("]<std") ? whole() : "";
}

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
    std::string held;
    const bool ended = for_each_line(next, [&](std::string_view line) {
        if (++lines > most_lines) refuse("{}: more than {} lines: give the part of one run", place, most_lines);
        const std::string source = source_of(line);
        for (Collector& collector : collectors) collector.take(source, line);
    });
    const Collector* best = best_of(collectors);
    if (best == nullptr) {
        std::vector<std::string> engines;
        for (const LogFormat& format : formats)
            if (engines.empty() || engines.back() != format.engine) engines.push_back(format.engine);
        refuse("{}: no line of the {} tells of a training step in a known way (profiles/logs: {})", place, lines,
               fmt::join(engines, ", "));
    }
    TrainingLog log = best->result();
    log.cut = !ended;
    return log;
}

TrainingLog read_log_file(const std::string& path) {
    FilePieces file(path, most_log_bytes);
    return read_log([&file] { return file.next(); }, load_log_formats(), path);
}

} // namespace moe::tools
