// Writes and reads timelines as Chrome trace JSON, streaming in both directions so that a million rows stay cheap.
#include "planner/program/timeline.hpp"

#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/schema.hpp"
#include "planner/program/program.hpp"
#include "planner/program/trace_stream.hpp"

#include <nlohmann/json.hpp>

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <unordered_map>

namespace moe::program {
namespace {

using Append = std::function<void(std::string_view)>;
constexpr std::size_t chunk_bytes = 1 << 16;

void append_escaped(std::string& out, const std::string& text) {
    for (const char c : text) {
        switch (c) {
        case '"':
            out += "\\\"";
            break;
        case '\\':
            out += "\\\\";
            break;
        case '\n':
            out += "\\n";
            break;
        case '\r':
            out += "\\r";
            break;
        case '\t':
            out += "\\t";
            break;
        default:
            if (static_cast<unsigned char>(c) < 0x20)
                fmt::format_to(std::back_inserter(out), "\\u{:04x}", static_cast<unsigned>(c));
            else
                out += c;
        }
    }
}

// Tenths of a nanosecond as microseconds. Both ends of a row are rounded before the duration is taken, so that rows
// which touch in seconds can never overlap in the file.
std::int64_t ticks(double seconds) { return std::llround(seconds * 1e10); }
void append_microseconds(std::string& out, std::int64_t tick) {
    fmt::format_to(std::back_inserter(out), "{}.{:04}", tick / 10000, tick % 10000);
}

std::string metadata(const Timeline& t) {
    std::string out = fmt::format(
        R"({{"schema":"{}","displayTimeUnit":"ms","metadata":{{"format":"moe-plan timeline","version":1,"predicted":{},)"
        R"("step_seconds":{},"tflops_per_gpu":{},"memory_gib":{},"ranks":[{}],"pipeline_rank":[{}],"represents":[{}],)"
        R"("plan":")",
        schema::trace, t.predicted, t.step_seconds, t.tflops_per_gpu, t.memory_gib, fmt::join(t.ranks, ","),
        fmt::join(t.pipeline_rank, ","), fmt::join(t.represents, ","));
    append_escaped(out, t.plan_json);
    out += "\"},\n\"traceEvents\":[";
    return out;
}

// Names of processes (ranks) and threads (streams), as viewers show them.
std::string names(const Timeline& t) {
    std::string out;
    for (std::size_t i = 0; i < t.ranks.size(); ++i) {
        fmt::format_to(std::back_inserter(out),
                       "{}\n{{\"ph\":\"M\",\"pid\":{},\"name\":\"process_name\","
                       "\"args\":{{\"name\":\"rank {} (stage {}, {})\"}}}}",
                       i == 0 ? "" : ",", t.ranks[i], t.ranks[i], t.pipeline_rank[i], counted(t.represents[i], "rank"));
        for (int s = 0; s < stream_count; ++s)
            fmt::format_to(
                std::back_inserter(out),
                ",\n{{\"ph\":\"M\",\"pid\":{},\"tid\":{},\"name\":\"thread_name\",\"args\":{{\"name\":\"{}\"}}}}",
                t.ranks[i], s, to_string(static_cast<Stream>(s)));
    }
    return out;
}

void append_row(std::string& out, const TimelineRow& row) {
    const std::int64_t start = ticks(row.start), end = std::max(start, ticks(row.end));
    fmt::format_to(std::back_inserter(out),
                   ",\n{{\"ph\":\"X\",\"pid\":{},\"tid\":{},\"name\":\"{}\",\"cat\":\"{}\",\"ts\":", row.rank,
                   static_cast<int>(row.stream), to_string(row.kind), to_string(row.module));
    append_microseconds(out, start);
    out += ",\"dur\":";
    append_microseconds(out, end - start);
    fmt::format_to(
        std::back_inserter(out),
        ",\"args\":{{\"slot\":{},\"op\":{},\"of\":\"{}\",\"chunk\":{},\"micro_batch\":{},\"phase\":\"{}\",\"layer\":{},"
        "\"busy\":",
        row.slot, row.op, plan::to_string(row.slot_kind), row.chunk, row.micro_batch, to_string(row.phase), row.layer);
    append_microseconds(out, std::max<std::int64_t>(0, ticks(row.busy)));
    out += "}}";
}

void check_rows(const Timeline& t) {
    if (t.ranks.size() != t.pipeline_rank.size() || t.ranks.size() != t.represents.size())
        fail("timeline: {} ranks, {} pipeline ranks, {} classes: the three lists must agree", t.ranks.size(),
             t.pipeline_rank.size(), t.represents.size());
    if (t.ranks.empty() && !t.rows.empty()) fail("timeline: {} rows but no ranks", t.rows.size());
    for (const TimelineRow& row : t.rows)
        if (!(row.start >= 0.0 && row.end >= row.start && std::isfinite(row.end)))
            fail("timeline: rank {} slot {} op {} runs from {} s to {} s", row.rank, row.slot, row.op, row.start,
                 row.end);
}

} // namespace

const Op* op_of(const Program& program, const TimelineRow& row) {
    const auto slot = static_cast<std::size_t>(row.slot), op = static_cast<std::size_t>(row.op);
    if (slot >= program.slots.size()) return nullptr;
    const std::vector<Op>& ops = program.templates[static_cast<std::size_t>(program.slots[slot].index)].ops;
    return op < ops.size() && ops[op].kind == row.kind ? &ops[op] : nullptr;
}

void append_trace(const Timeline& timeline, const Append& append) {
    check_rows(timeline);
    append(metadata(timeline));
    append(names(timeline));
    std::string buffer;
    buffer.reserve(chunk_bytes + 1024);
    for (const TimelineRow& row : timeline.rows) {
        append_row(buffer, row);
        if (buffer.size() < chunk_bytes) continue;
        append(buffer);
        buffer.clear();
    }
    append(buffer);
    append("\n]}\n");
}

void write_trace(const Timeline& timeline, const std::string& path) {
    check_rows(timeline);
    write_file(path, [&timeline](const Append& append) { append_trace(timeline, append); });
}

namespace {

using Json = nlohmann::json;

// Inverse of to_string() for an enumeration whose last enumerator is known.
template <class E>
class Words {
public:
    Words(E last, const char* what) : what_(what) {
        for (int i = 0; i <= static_cast<int>(last); ++i) values_[to_string(static_cast<E>(i))] = static_cast<E>(i);
    }
    E operator()(const std::string& path, const std::string& word) const {
        const auto it = values_.find(word);
        if (it == values_.end()) refuse("{}: not a trace of this program: unknown {} \"{}\"", path, what_, word);
        return it->second;
    }

private:
    const char* what_;
    std::unordered_map<std::string, E> values_;
};

struct Event {
    std::string ph, name, cat, phase, of;
    double pid = -1, tid = -1, ts = -1, dur = -1, slot = -1, op = -1, chunk = -1, micro_batch = 0, layer = -1, busy = 0;
};

// Takes the parser's callbacks and keeps one event at a time; only finished rows are stored.
class Handler : public nlohmann::json_sax<Json> {
public:
    Handler(const std::string& path, Timeline& out) : path_(path), out_(out) {}

    bool null() override { return true; }
    bool boolean(bool value) override {
        if (in_metadata() && keys_.back() == "predicted") out_.predicted = value, seen_predicted_ = true;
        return true;
    }
    bool number_integer(number_integer_t value) override { return number(static_cast<double>(value)); }
    bool number_unsigned(number_unsigned_t value) override { return number(static_cast<double>(value)); }
    bool number_float(number_float_t value, const string_t&) override { return number(value); }
    bool binary(binary_t&) override { return false; }
    bool string(string_t& value) override {
        if (in_metadata()) {
            if (keys_.back() == "format") format_ = value;
            if (keys_.back() == "plan") out_.plan_json = value;
        } else if (in_event()) {
            if (keys_.back() == "ph") event_.ph = value;
            if (keys_.back() == "name") event_.name = value;
            if (keys_.back() == "cat") event_.cat = value;
        } else if (in_args()) {
            if (keys_.back() == "phase") event_.phase = value;
            if (keys_.back() == "of") event_.of = value;
        }
        return true;
    }
    bool start_object(std::size_t) override { return open(); }
    bool start_array(std::size_t) override { return open(); }
    bool key(string_t& value) override {
        keys_.back() = value;
        return true;
    }
    bool end_object() override {
        if (keys_.size() == 3 && keys_[0] == "traceEvents") finish();
        keys_.pop_back();
        return true;
    }
    bool end_array() override {
        if (keys_.size() == 2 && keys_[0] == "traceEvents") seen_events_ = true;
        keys_.pop_back();
        return true;
    }
    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
        refuse("{}: not valid JSON near byte {}: the file is damaged or cut short", path_, position);
    }

    void check() const {
        if (format_ != "moe-plan timeline" || !seen_events_ || !seen_predicted_)
            refuse("{}: not a trace of this program: write one with replay or execute --trace", path_);
        const std::size_t ranks = out_.ranks.size();
        if (ranks == 0 || out_.pipeline_rank.size() != ranks || out_.represents.size() != ranks)
            refuse("{}: metadata lists {} ranks, {} pipeline ranks, {} classes", path_, ranks,
                   out_.pipeline_rank.size(), out_.represents.size());
    }

private:
    // keys_ holds one entry per open object or array: the member key that is being read inside of it.
    bool open() {
        if (keys_.size() > 16) refuse("{}: nested too deeply for a trace", path_);
        if (keys_.size() == 2 && keys_[0] == "traceEvents") event_ = Event{};
        keys_.emplace_back();
        return true;
    }
    bool in_metadata() const { return keys_.size() == 2 && keys_[0] == "metadata"; }
    bool in_event() const { return keys_.size() == 3 && keys_[0] == "traceEvents"; }
    bool in_args() const { return keys_.size() == 4 && keys_[0] == "traceEvents" && keys_[2] == "args"; }

    bool number(double value) {
        if (in_metadata()) {
            if (keys_.back() == "step_seconds") out_.step_seconds = value;
            if (keys_.back() == "tflops_per_gpu") out_.tflops_per_gpu = value;
            if (keys_.back() == "memory_gib") out_.memory_gib = value;
        } else if (keys_.size() == 3 && keys_[0] == "metadata") {
            if (keys_[1] == "ranks") out_.ranks.push_back(integer(value, "ranks", 0));
            if (keys_[1] == "pipeline_rank") out_.pipeline_rank.push_back(integer(value, "pipeline_rank", 0));
            if (keys_[1] == "represents") out_.represents.push_back(integer(value, "represents", 1));
        } else if (in_event()) {
            set_if("pid", event_.pid, value) || set_if("tid", event_.tid, value) || set_if("ts", event_.ts, value) ||
                set_if("dur", event_.dur, value);
        } else if (in_args()) {
            set_if("slot", event_.slot, value) || set_if("op", event_.op, value) ||
                set_if("chunk", event_.chunk, value) || set_if("micro_batch", event_.micro_batch, value) ||
                set_if("layer", event_.layer, value) || set_if("busy", event_.busy, value);
        }
        return true;
    }
    bool set_if(const char* key, double& field, double value) {
        if (keys_.back() != key) return false;
        field = value;
        return true;
    }
    int integer(double value, const char* what, int low, int high = std::numeric_limits<int>::max()) const {
        if (!(value >= low && value <= high && value == std::floor(value)))
            refuse("{}: {} is {}, expected a whole number from {} to {}", path_, what, value, low, high);
        return static_cast<int>(value);
    }
    void finish() {
        if (event_.ph == "M") return;
        if (event_.ph != "X") refuse("{}: not a trace of this program: event of type \"{}\"", path_, event_.ph);
        if (!(event_.ts >= 0 && event_.dur >= 0 && event_.busy >= 0))
            refuse("{}: event {}: ts {}, dur {}, busy {}: none may be negative", path_, out_.rows.size(), event_.ts,
                   event_.dur, event_.busy);
        TimelineRow row;
        row.rank = integer(event_.pid, "pid", 0);
        row.stream = static_cast<Stream>(integer(event_.tid, "tid", 0, stream_count - 1));
        row.slot = integer(event_.slot, "slot", 0);
        row.op = integer(event_.op, "op", 0);
        row.chunk = static_cast<std::int16_t>(integer(event_.chunk, "chunk", -1, 32767));
        row.layer = static_cast<std::int16_t>(integer(event_.layer, "layer", -1, 32767));
        row.micro_batch = integer(event_.micro_batch, "micro_batch", 0);
        row.kind = kinds_(path_, event_.name);
        row.module = modules_(path_, event_.cat);
        row.phase = phases_(path_, event_.phase);
        row.slot_kind = slots_(path_, event_.of);
        row.start = event_.ts * 1e-6;
        row.end = (event_.ts + event_.dur) * 1e-6;
        row.busy = event_.busy * 1e-6;
        out_.rows.push_back(row);
    }

    const std::string& path_;
    Timeline& out_;
    std::vector<std::string> keys_;
    Event event_;
    std::string format_;
    bool seen_events_ = false, seen_predicted_ = false;
    Words<OpKind> kinds_{OpKind::copy_from_host, "op kind"};
    Words<Module> modules_{Module::optimizer, "module"};
    Words<Phase> phases_{Phase::step, "phase"};
    Words<plan::SlotKind> slots_{plan::SlotKind::finish, "slot kind"};
};

} // namespace

Timeline read_trace(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file || file.peek() == std::ifstream::traits_type::eof())
        refuse("cannot read {}: no such file, or it is empty", path);
    return read_trace(file, path);
}

Timeline read_trace(std::istream& text, const std::string& place) {
    Timeline timeline;
    Handler handler(place, timeline);
    Json::sax_parse(text, &handler);
    if (text.bad()) refuse("cannot read {}: the disk reports an error", place);
    handler.check();
    return timeline;
}

} // namespace moe::program
