// Walks the tables of an Nsight Systems export once each, read-only and without running anything that lies in it.
#include "tools/measured/nsight.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "tools/measured/chrome_trace.hpp"
#include "tools/measured/sqlite.hpp"

#include <set>

namespace moe::tools {

namespace {

constexpr double nanosecond = 1e-9;

// CUpti_ActivityMemcpyKind, in the words of PyTorch's profiler.
std::string copy_name(std::int64_t kind) {
    switch (kind) {
    case 1:
        return "Memcpy HtoD";
    case 2:
        return "Memcpy DtoH";
    case 8:
        return "Memcpy DtoD";
    case 9:
        return "Memcpy HtoH";
    case 10:
        return "Memcpy PtoP";
    default:
        return "Memcpy (other)";
    }
}

class NsightReader {
public:
    NsightReader(const std::string& path, DeviceProfile& profile)
        : place_(path), database_(path), profile_(profile), names_(profile) {}

    void read() {
        if (!database_.has_table("StringIds") || !(database_.has_table(kernels) || database_.has_table(graphs)))
            refuse("{}: has no table {}: not an export of Nsight Systems, or one without --trace cuda", place_,
                   kernels);
        read_strings();
        read_kernels();
        read_others(copies, "copyKind", copy_name);
        read_others("CUPTI_ACTIVITY_KIND_MEMSET", "", [](std::int64_t) { return std::string("Memset"); });
        read_others(graphs, "", [](std::int64_t) { return std::string("(CUDA graph as a whole)"); });
        read_launches();
        read_windows();
        read_gpu();
    }

private:
    static constexpr const char* kernels = "CUPTI_ACTIVITY_KIND_KERNEL";
    static constexpr const char* copies = "CUPTI_ACTIVITY_KIND_MEMCPY";
    static constexpr const char* graphs = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE";
    static constexpr const char* calls = "CUPTI_ACTIVITY_KIND_RUNTIME";

    void read_strings() {
        SqliteRows rows = database_.rows("StringIds", {"id", "value"});
        while (rows.next()) {
            if (strings_.size() >= 10'000'000) refuse("{}: StringIds has more than 10,000,000 rows", place_);
            strings_.emplace(rows.integer(0), rows.text(1));
        }
    }
    const std::string& string(std::int64_t id) const {
        static const std::string unknown = "(no name)";
        const auto at = strings_.find(id);
        return at == strings_.end() ? unknown : at->second;
    }

    // Processes count correlations each for itself: theirs are told apart by the process's place in a list.
    std::int64_t correlation(std::int64_t process, std::int64_t id) {
        const auto [at, added] = processes_.try_emplace(process, static_cast<std::int64_t>(processes_.size()));
        if (processes_.size() > 4096) refuse("{}: more than 4096 processes", place_);
        return id < 0 || id > 0xffffffff ? -1 : (at->second << 32) + id;
    }
    void add(const SqliteRows& rows,
             std::int32_t name) { // columns: start end deviceId streamId correlationId globalPid
        if (profile_.events.size() >= most_events)
            refuse("{}: more than {} kernels: record fewer steps", place_, most_events);
        DeviceEvent event;
        const std::int64_t start = rows.integer(0), end = rows.integer(1);
        if (end < start) refuse("{}: a kernel ends at {} ns, before its start at {} ns", place_, end, start);
        event.start = static_cast<double>(start) * nanosecond;
        event.end = static_cast<double>(end) * nanosecond;
        event.name = name;
        const std::int64_t process = rows.integer(5);
        event.device =
            names_.device(fmt::format("{} of process {}", rows.integer(2), (process >> 24) & 0xffffff), place_);
        event.stream = static_cast<std::int32_t>(rows.integer(3) & 0x7fffffff);
        event.launch = correlation(process, rows.integer(4));
        profile_.events.push_back(event);
    }

    static std::vector<std::string> event_columns(const std::string& last) {
        std::vector<std::string> columns = {"start", "end", "deviceId", "streamId", "?correlationId", "?globalPid"};
        if (!last.empty()) columns.push_back(last);
        return columns;
    }
    void read_kernels() {
        if (!database_.has_table(kernels)) return;
        SqliteRows rows = database_.rows(kernels, event_columns("demangledName"));
        std::unordered_map<std::int64_t, std::int32_t> known; // names by id of the string
        while (rows.next()) {
            auto at = known.find(rows.integer(6));
            if (at == known.end())
                at = known.emplace(rows.integer(6), names_.name(string(rows.integer(6)), "", place_)).first;
            add(rows, at->second);
        }
    }
    template <class Name>
    void read_others(const char* table, const std::string& column, const Name& name) {
        if (!database_.has_table(table)) return;
        SqliteRows rows = database_.rows(table, event_columns(column));
        while (rows.next()) add(rows, names_.name(name(column.empty() ? 0 : rows.integer(6)), "", place_));
    }

    void read_launches() {
        if (!database_.has_table(calls)) return;
        SqliteRows rows = database_.rows(calls, {"start", "correlationId", "?globalTid"});
        while (rows.next()) {
            const std::int64_t process = rows.integer(2) & ~std::int64_t{0xffffff};
            const std::int64_t key = correlation(process, rows.integer(1));
            if (key < 0) continue;
            if (profile_.launches.size() >= most_events) refuse("{}: more than {} calls of CUDA", place_, most_events);
            profile_.launches.emplace(key, static_cast<double>(rows.integer(0)) * nanosecond);
        }
    }

    // Processes of one job open the same step at about the same time: the earliest start counts.
    void read_windows() {
        if (!database_.has_table("NVTX_EVENTS")) return;
        SqliteRows rows = database_.rows("NVTX_EVENTS", {"start", "?end", "?text", "?textId"});
        constexpr std::string_view step = "ProfilerStep#";
        std::set<std::int64_t> seen;
        while (rows.next()) {
            const std::string text = rows.is_null(2) ? string(rows.is_null(3) ? -1 : rows.integer(3)) : rows.text(2);
            if (!text.starts_with(step) || rows.is_null(1) || rows.integer(1) <= rows.integer(0)) continue;
            std::int64_t number = 0;
            for (const char c : text.substr(step.size(), 12))
                number = c >= '0' && c <= '9' ? number * 10 + (c - '0') : number;
            if (seen.size() >= 1'000'000) refuse("{}: more than 1,000,000 steps", place_);
            if (!seen.insert(number).second) continue;
            profile_.windows.push_back({number, static_cast<double>(rows.integer(0)) * nanosecond,
                                        static_cast<double>(rows.integer(1)) * nanosecond});
        }
    }
    void read_gpu() {
        if (!database_.has_table("TARGET_INFO_GPU")) return;
        SqliteRows rows = database_.rows("TARGET_INFO_GPU", {"?name", "?totalMemory"});
        if (!rows.next()) return;
        if (!rows.is_null(0)) profile_.gpu = rows.text(0).substr(0, 200);
        if (!rows.is_null(1) && rows.integer(1) > 0)
            profile_.gpu_gib = static_cast<double>(rows.integer(1)) / (1 << 30);
    }

    const std::string& place_;
    SqliteFile database_;
    DeviceProfile& profile_;
    NameTable names_;
    std::unordered_map<std::int64_t, std::string> strings_;
    std::unordered_map<std::int64_t, std::int64_t> processes_;
};

} // namespace

bool is_sqlite(std::string_view first_bytes) {
    return first_bytes.starts_with(std::string_view("SQLite format 3\0", 16));
}

DeviceProfile read_nsight_file(const std::string& path) {
    DeviceProfile profile;
    profile.source = "Nsight Systems";
    NsightReader(path, profile).read();
    return profile;
}

} // namespace moe::tools
