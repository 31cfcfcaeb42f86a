// Takes the callbacks of the JSON parser and keeps one event at a time: the trace itself is never held.
#include "tools/measured/chrome_trace.hpp"

#include "planner/base/error.hpp"
#include "tools/measured/piece_iterator.hpp"

#include <nlohmann/json.hpp>

#include <cmath>

namespace moe::tools {

namespace {

using SortedJson = nlohmann::json;

constexpr int most_depth = 16;
constexpr double microsecond = 1e-6, latest = 1e17; // latest: 3000 years in microseconds
constexpr std::string_view step_name = "ProfilerStep#";

enum class Key : unsigned char { other, ph, cat, name, ts, dur, tid, device, stream, correlation, collective };

Key event_key(std::string_view key) {
    if (key == "ph") return Key::ph;
    if (key == "cat") return Key::cat;
    if (key == "name") return Key::name;
    if (key == "ts") return Key::ts;
    if (key == "dur") return Key::dur;
    if (key == "tid") return Key::tid;
    return Key::other;
}
Key argument_key(std::string_view key) {
    if (key == "device") return Key::device;
    if (key == "stream") return Key::stream;
    if (key == "correlation") return Key::correlation;
    if (key == "Collective name") return Key::collective;
    return Key::other;
}

struct Event {
    std::string ph, cat, name, collective;
    double ts = std::nan(""), dur = std::nan(""); // no number where there is none
    double tid = 0.0, device = 0.0, stream = -1.0, correlation = -1.0;
};

// The kind of work that a category of events stands for. Names of 2020 had capitals.
enum class Sort : unsigned char { nothing, device, call, annotation };
Sort sort_of(const std::string& category) {
    if (category == "kernel" || category == "gpu_memcpy" || category == "gpu_memset" || category == "Kernel" ||
        category == "Memcpy" || category == "Memset")
        return Sort::device;
    if (category == "cuda_runtime" || category == "cuda_driver" || category == "Runtime") return Sort::call;
    return category == "user_annotation" || category == "cpu_op" || category == "Operator" ? Sort::annotation
                                                                                           : Sort::nothing;
}

class Handler : public nlohmann::json_sax<SortedJson> {
public:
    Handler(const std::string& place, DeviceProfile& profile) : place_(place), profile_(profile), names_(profile) {}

    bool null() override { return true; }
    bool boolean(bool) override { return true; }
    bool number_integer(number_integer_t value) override { return number(static_cast<double>(value)); }
    bool number_unsigned(number_unsigned_t value) override { return number(static_cast<double>(value)); }
    bool number_float(number_float_t value, const string_t&) override { return number(value); }
    bool binary(binary_t&) override { return false; }
    bool string(string_t& value) override {
        if (in_event() && key_ == Key::ph) event_.ph.swap(value);
        if (in_event() && key_ == Key::cat) event_.cat.swap(value);
        if (in_event() && key_ == Key::name) event_.name.swap(value);
        if (in_arguments() && argument_ == Key::collective) event_.collective.swap(value);
        if (depth_ == 3 && part_ == "deviceProperties" && member_ == "name" && profile_.gpu.empty())
            profile_.gpu = value.substr(0, 200);
        return true;
    }
    bool start_object(std::size_t) override {
        open();
        if (in_event()) event_ = Event{};
        return true;
    }
    bool start_array(std::size_t) override {
        open();
        const bool bare = depth_ == 1, named = depth_ == 2 && part_ == "traceEvents" && !root_is_array_;
        root_is_array_ = root_is_array_ || bare;
        if (bare || named) events_ = depth_, seen_ = true;
        return true;
    }
    bool key(string_t& value) override {
        if (in_event())
            key_ = event_key(value), in_args_ = value == "args";
        else if (in_arguments())
            argument_ = argument_key(value);
        else if (depth_ == 1)
            part_ = value;
        else if (depth_ <= 3)
            member_ = value;
        return true;
    }
    bool end_object() override {
        if (in_event()) finish();
        --depth_;
        return true;
    }
    bool end_array() override {
        if (depth_ == events_) events_ = 0;
        --depth_;
        return true;
    }
    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception&) override {
        refuse("{}: not valid JSON near byte {}: the file is damaged or cut short", place_, position);
    }

    void check() const {
        if (!seen_) refuse("{}: no traceEvents: not a trace of PyTorch's profiler", place_);
    }

private:
    void open() {
        if (++depth_ > most_depth) refuse("{}: nested more than {} deep, which no trace is", place_, most_depth);
    }
    bool in_event() const { return events_ > 0 && depth_ == events_ + 1; }
    bool in_arguments() const { return events_ > 0 && depth_ == events_ + 2 && in_args_; }

    bool number(double value) {
        if (in_event()) {
            if (key_ == Key::ts) event_.ts = value;
            if (key_ == Key::dur) event_.dur = value;
            if (key_ == Key::tid) event_.tid = value;
        } else if (in_arguments()) {
            if (argument_ == Key::device) event_.device = value;
            if (argument_ == Key::stream) event_.stream = value;
            if (argument_ == Key::correlation) event_.correlation = value;
        } else if (depth_ == 2 && part_ == "distributedInfo") {
            if (member_ == "rank") profile_.rank = whole(value, "rank");
            if (member_ == "world_size") profile_.world_size = whole(value, "world_size");
        } else if (depth_ == 3 && part_ == "deviceProperties" && member_ == "totalGlobalMem" && !profile_.gpu_gib &&
                   value > 0.0)
            profile_.gpu_gib = value / (1 << 30);
        return true;
    }
    int whole(double value, const char* what) const {
        if (!(value >= 0 && value <= 1e9 && value == std::floor(value)))
            refuse("{}: {} is {}, expected a whole number of at least 0", place_, what, value);
        return static_cast<int>(value);
    }
    std::int64_t correlation() const {
        return event_.correlation >= 0 && event_.correlation < 9e15 ? static_cast<std::int64_t>(event_.correlation)
                                                                    : -1;
    }

    void finish() {
        if (event_.ph != "X") return;
        const Sort sort = sort_of(event_.cat);
        if (sort == Sort::nothing) return;
        if (sort == Sort::call) return add_launch();
        if (sort == Sort::annotation) return add_window();
        const bool begins = std::abs(event_.ts) <= latest, lasts = event_.dur >= 0.0 && event_.dur <= latest;
        if (!begins || !lasts)
            refuse("{}: kernel \"{}\": {}: must be a number of microseconds{}", place_, event_.name.substr(0, 60),
                   begins ? "dur" : "ts", begins ? " from 0" : "");
        if (profile_.events.size() >= most_events)
            refuse("{}: more than {} kernels: record fewer steps", place_, most_events);
        DeviceEvent event;
        event.start = event_.ts * microsecond;
        event.end = (event_.ts + event_.dur) * microsecond;
        event.name = names_.name(event_.name, event_.collective, place_);
        event.device = names_.device(fmt::format("{}", whole(event_.device, "device")), place_);
        event.stream = whole(event_.stream >= 0.0 ? event_.stream : std::max(0.0, event_.tid), "stream");
        event.launch = correlation();
        profile_.events.push_back(event);
    }
    // Calls that launch work: cudaLaunchKernel, cuLaunchKernelEx, cudaGraphLaunch, cudaMemcpyAsync, cudaMemsetAsync.
    void add_launch() {
        const std::int64_t key = correlation();
        if (key < 0 || !(std::abs(event_.ts) <= latest)) return;
        if (event_.name.find("aunch") == std::string::npos && event_.name.find("emcpy") == std::string::npos &&
            event_.name.find("emset") == std::string::npos)
            return;
        if (profile_.launches.size() >= most_events)
            refuse("{}: more than {} launches: record fewer steps", place_, most_events);
        profile_.launches.emplace(key, event_.ts * microsecond);
    }
    void add_window() {
        if (!event_.name.starts_with(step_name)) return;
        if (!(event_.dur > 0.0 && event_.dur <= latest && std::abs(event_.ts) <= latest)) return;
        if (profile_.windows.size() >= 1'000'000) refuse("{}: more than 1,000,000 steps", place_);
        std::int64_t number = 0;
        for (const char c : std::string_view(event_.name).substr(step_name.size(), 12))
            number = c >= '0' && c <= '9' ? number * 10 + (c - '0') : number;
        profile_.windows.push_back({number, event_.ts * microsecond, (event_.ts + event_.dur) * microsecond});
    }

    const std::string& place_;
    DeviceProfile& profile_;
    NameTable names_;
    Event event_;
    std::string part_, member_;  // keys of the root's members, and of what lies within them
    int depth_ = 0, events_ = 0; // depth of the list of events while it is open, else 0
    Key key_ = Key::other, argument_ = Key::other;
    bool in_args_ = false, seen_ = false, root_is_array_ = false;
};

} // namespace

DeviceProfile read_chrome_trace(const NextPiece& next, const std::string& place) {
    DeviceProfile profile;
    profile.source = "PyTorch profiler";
    Handler handler(place, profile);
    PieceReader reader(next, place);
    SortedJson::sax_parse(PieceIterator(&reader), PieceIterator(), &handler);
    handler.check();
    return profile;
}

DeviceProfile read_chrome_trace_file(const std::string& path) {
    FilePieces file(path, most_trace_bytes);
    return read_chrome_trace([&file] { return file.next(); }, path);
}

} // namespace moe::tools
