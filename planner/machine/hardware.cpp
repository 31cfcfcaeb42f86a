// Hardware profiles: reading, checking, and resolving what depends on this machine.
#include "planner/machine/hardware.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/names.hpp"
#include "planner/base/profile.hpp"
#include "planner/base/schema.hpp"

#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <thread>
#include <utility>

namespace moe::machine {
namespace {

constexpr std::array<const char*, precision_count> precision_names{"fp32",          "bf16",  "fp8-tensor",
                                                                   "fp8-blockwise", "mxfp8", "nvfp4"};

// Upper bounds that no machine reaches and that keep products of them finite.
constexpr double max_rate = 1e19, max_bytes = 1e15, max_cycles = 1e9, max_capability = 99.9, max_mhz = 1e5;
constexpr int max_count = 1 << 20;

// What a figure may be, an order of magnitude and more around every machine from a single CPU core to the accelerators
// announced for 2027; a figure in another unit (TFLOPS, GB, us) falls outside.
struct Plausible {
    double low, high;
    const char* unit;
    const char* example;
};
constexpr Plausible gpu_flops{1e11, 1e18, "FLOP/s", "an H100 has 9.89e14 in bf16"};
constexpr Plausible cpu_flops{1e7, 1e16, "FLOP/s", "a core does some 1e10"};
constexpr Plausible gpu_memory{1e9, 1e14, "bytes", "an H100 has 8.6e10"};
constexpr Plausible cpu_memory{1e6, 1e14, "bytes", "a small machine has 8e9"};
constexpr Plausible gpu_memory_rate{1e9, 1e15, "bytes/s", "an H100 has 3.35e12"};
constexpr Plausible cpu_memory_rate{1e7, 1e14, "bytes/s", "a core reads some 1e10"};
constexpr Plausible link_rate{1e6, 1e14, "bytes/s", "NVLink of an H100 has 4.5e11, a port of 400 Gb/s 5e10"};
constexpr Plausible link_latency{0.0, 0.1, "seconds", "NVLink has 2e-6"};
constexpr Plausible call_seconds{1e-9, 1e4, "seconds", "a launch takes some 1e-5"};
constexpr Plausible call_work{0.0, 1e24, "FLOP or bytes", "a large product has 1e13"};

bool within(double value, const Plausible& range) { return value >= range.low && value <= range.high; }

// A required number within its range.
double plausible(const JsonObject& json, const std::string& key, const Plausible& range) {
    const double value = json.number(key, -max_rate, max_rate);
    if (!within(value, range))
        json.refuse_value(
            key, fmt::format("must be in {}, from {:g} to {:g}: {}", range.unit, range.low, range.high, range.example));
    return value;
}

// 0, or where it is missing, stands for a figure that is not known.
double plausible_or_none(const JsonObject& json, const std::string& key, const Plausible& range) {
    return json.number_or(key, 0.0, -max_rate, max_rate) == 0.0 ? 0.0 : plausible(json, key, range);
}

Link read_link(const JsonObject& json, const std::string& key) {
    if (!json.has(key)) return {};
    const JsonObject link = json.object(key);
    if (key == "nic")
        link.only({"bandwidth", "latency", "message"});
    else
        link.only({"bandwidth", "latency"});
    return {plausible(link, "bandwidth", link_rate), plausible(link, "latency", link_latency),
            plausible_or_none(link, "message", link_latency)};
}

void read_peaks(const JsonObject& json, Hardware& hardware) {
    const JsonObject peaks = json.object("peak_flops");
    peaks.only({precision_names.begin(), precision_names.end()});
    double best = 0.0;
    for (std::size_t i = 0; i < precision_names.size(); ++i) {
        hardware.peak_flops[i] = plausible_or_none(peaks, precision_names[i], hardware.cpu ? cpu_flops : gpu_flops);
        best = std::max(best, hardware.peak_flops[i]);
    }
    if (best == 0.0) json.refuse_value("peak_flops", "must give the rate of at least one precision");
}

// The clocks of a family's calls, one for each row.
void read_clocks(const JsonObject& json, const std::string& family, std::vector<MeasuredCall>& calls) {
    if (!json.has("measured_clocks")) return;
    const JsonObject families = json.object("measured_clocks");
    if (!families.has(family)) return;
    const std::vector<double> clocks = families.numbers(family, 0.0, max_mhz);
    if (clocks.size() != calls.size())
        families.refuse_value(family,
                              fmt::format("must hold {} clocks, one for each row of \"measured\"", calls.size()));
    for (std::size_t i = 0; i < calls.size(); ++i) calls[i].clock_hz = 1e6 * clocks[i];
}

void read_measured(const JsonObject& json, Hardware& hardware) {
    if (!json.has("measured")) return;
    const JsonObject kinds = json.object("measured");
    if (json.has("measured_clocks")) json.object("measured_clocks").only(kinds.keys());
    for (const std::string& kind : kinds.keys()) {
        std::vector<MeasuredCall>& calls = hardware.measured[kind];
        for (const std::vector<double>& row : kinds.number_rows(kind)) {
            const bool whole = row.size() >= 2 && row[0] >= 0.0 && row[1] > 0.0;
            if (whole && (!within(row[0], call_work) || !within(row[1], call_seconds)))
                refuse(
                    "{}: {}: row {} = [{:g}, {:g}, ..]: work must be in {} up to {:g}, and the time in {} from {:g} to "
                    "{:g}: {}",
                    kinds.place(), kind, calls.size() + 1, row[0], row[1], call_work.unit, call_work.high,
                    call_seconds.unit, call_seconds.low, call_seconds.high, call_seconds.example);
            if (!whole || std::any_of(row.begin() + 2, row.end(), [](double side) { return side < 1.0; }))
                kinds.refuse_value(kind, "must hold rows [work, seconds, sides..], work >= 0, seconds > 0, sides >= 1");
            calls.push_back({row[0], row[1], {row.begin() + 2, row.end()}, 0.0});
            if (calls.back().sides.size() != calls.front().sides.size())
                kinds.refuse_value(kind, "must give the same number of sides in every row");
        }
        read_clocks(json, kind, calls);
        std::stable_sort(calls.begin(), calls.end(), [](const auto& a, const auto& b) { return a.work < b.work; });
    }
}

// Rows of seven numbers, by family.
void read_tiles(const JsonObject& json, Hardware& hardware) {
    if (!json.has("product_tiles")) return;
    const JsonObject families = json.object("product_tiles");
    for (const std::string& family : families.keys()) {
        if (!hardware.measured.contains(family)) families.refuse_value(family, "must name a family of \"measured\"");
        std::vector<ProductTile>& tiles = hardware.product_tiles[family];
        for (const std::vector<double>& row : families.number_rows(family)) {
            const auto count = [&](std::size_t i) { return row[i] >= 1.0 && row[i] <= max_count; };
            const bool whole = row.size() == 7 && count(0) && count(1) && count(2) && count(3) && row[4] > 0.0 &&
                               row[4] <= max_cycles && row[5] >= 0.0 && row[5] <= max_cycles &&
                               (row[6] == 0.0 || row[6] == 1.0);
            if (!whole)
                families.refuse_value(family, "must hold rows [multiprocessors, down, across, depth, step cycles, "
                                              "tile cycles, swapped (0 or 1)], all but the last two above 0");
            const auto whole_number = [&](std::size_t i) { return static_cast<int>(row[i]); };
            tiles.push_back(
                {whole_number(0), whole_number(1), whole_number(2), whole_number(3), row[4], row[5], row[6] == 1.0});
            if (tiles.back().multiprocessors > hardware.sm_count)
                families.refuse_value(family, fmt::format("must keep to sm_count = {}", hardware.sm_count));
        }
    }
}

// The cards of a kind, each with a factor of every family that it was measured in.
void read_cards(const JsonObject& json, Hardware& hardware) {
    if (!json.has("cards")) return;
    constexpr double most = 100.0; // times that one card is as slow as the mean
    for (const JsonObject& card : json.objects("cards")) {
        card.only({"measured_by", "factors"});
        MeasuredCard& known = hardware.cards.emplace_back(MeasuredCard{card.string("measured_by"), {}});
        const JsonObject factors = card.object("factors");
        for (const std::string& family : factors.keys()) {
            if (!hardware.measured.contains(family)) factors.refuse_value(family, "must name a family of \"measured\"");
            known.factors[family] = factors.number(family, 1.0 / most, most);
        }
    }
    if (hardware.cards.size() < 2) json.refuse_value("cards", "must hold two cards or more");
}

// Rows [members, bytes], or one number for any.
std::map<int, double> read_by_members(const JsonObject& json, const std::string& key) {
    if (!json.is_array(key)) return {{2, json.number(key, 0.0, max_bytes)}};
    std::map<int, double> bytes;
    for (const std::vector<double>& row : json.number_rows(key)) {
        if (row.size() != 2 || row[0] < 2.0 || row[0] > max_count || row[1] < 0.0 || row[1] > max_bytes)
            json.refuse_value(key, "must be a number of bytes or hold rows [members, bytes], members >= 2");
        bytes[static_cast<int>(row[0])] = row[1];
    }
    return bytes;
}

// One number, of any communicator, or one for each use.
CommunicatorBytes read_communicators(const JsonObject& json) {
    const std::string key = "communicator_bytes";
    if (!json.is_object(key)) {
        const double each = json.number_or(key, 0.0, 0.0, max_bytes);
        return {0.0, 0.0, each, {{2, each}}, {{2, each}}};
    }
    const JsonObject bytes = json.object(key);
    bytes.only({"first", "first_pairwise", "collective", "pairwise", "messages"});
    return {bytes.number("first", 0.0, max_bytes), bytes.number_or("first_pairwise", 0.0, 0.0, max_bytes),
            bytes.number("messages", 0.0, max_bytes), read_by_members(bytes, "collective"),
            read_by_members(bytes, "pairwise")};
}

std::string read_source(const JsonObject& json) {
    if (!json.is_array("source")) return json.string_or("source", "");
    return fmt::format("{}", fmt::join(json.strings("source"), "; "));
}

// A CPU profile may leave cores and memory to the machine that reads it.
void resolve_machine(Hardware& hardware) {
    if (!hardware.cpu) return;
    if (hardware.cores == 0) hardware.cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    if (hardware.memory_bytes > 0.0) return;
    const long pages = ::sysconf(_SC_PHYS_PAGES);
    const long page = ::sysconf(_SC_PAGESIZE);
    if (pages <= 0 || page <= 0) fail("cannot ask this machine for its memory: give memory_bytes in the profile");
    hardware.memory_bytes = static_cast<double>(pages) * static_cast<double>(page);
}

void check(const JsonObject& json, const Hardware& hardware) {
    if (!hardware.cpu && hardware.memory_bytes <= 0.0) json.refuse_value("memory_bytes", "must be above 0");
    if (!hardware.cpu && hardware.sm_count <= 0) json.refuse_value("sm_count", "must be above 0");
    if (hardware.nvlink_domain_used > hardware.nvlink_domain)
        json.refuse_value("nvlink_domain_used",
                          fmt::format("must not exceed nvlink_domain = {}", hardware.nvlink_domain));
    if (hardware.nvlink_domain > 1 && hardware.nvlink.bandwidth == 0.0)
        json.refuse_value("nvlink", fmt::format("must be given, since nvlink_domain = {}", hardware.nvlink_domain));
    if (hardware.gpus_per_node > hardware.nvlink_domain && hardware.pcie.bandwidth == 0.0)
        json.refuse_value("pcie", fmt::format("must be given, since gpus_per_node = {} exceeds nvlink_domain = {}",
                                              hardware.gpus_per_node, hardware.nvlink_domain));
    if (hardware.context_bytes >= hardware.memory_bytes && hardware.memory_bytes > 0.0)
        json.refuse_value("context_bytes", fmt::format("must be below memory_bytes = {}", hardware.memory_bytes));
}

// Accelerators of other vendors, asked for by name, are refused as what they are rather than as a typing error.
void refuse_foreign(const std::string& name) {
    static const std::pair<const char*, const char*> beginnings[] = {
        {"mi1", "AMD"},     {"mi2", "AMD"},    {"mi3", "AMD"},         {"mi4", "AMD"},      {"tpu", "Google"},
        {"gaudi", "Intel"}, {"trn", "Amazon"}, {"trainium", "Amazon"}, {"ascend", "Huawei"}};
    std::string lower = name;
    std::transform(lower.begin(), lower.end(), lower.begin(), [](unsigned char c) { return std::tolower(c); });
    if (lower.find_first_of("/.") != std::string::npos) return; // a path
    for (const auto& [beginning, vendor] : beginnings)
        if (lower.rfind(beginning, 0) == 0)
            refuse("hardware '{}' is an accelerator of {}: only GPUs of NVIDIA and CPUs can be planned for",
                   shown(name), vendor);
}

// Nodes of 8 are one NVLink domain; a larger domain has trays of four (GB200 and GB300 NVL72: 18 trays of 4).
int usual_node(int nvlink_domain) { return nvlink_domain <= 8 ? nvlink_domain : 4; }

// By the narrowest precision that the tensor cores have: MXFP8 and NVFP4 came with 10.0, FP8 of any scaling with 9.0 in
// training software (CUDA C programming guide, "Compute Capabilities").
double usual_capability(const Hardware& hardware) {
    const auto computes = [&hardware](Precision precision) {
        return hardware.peak_flops[static_cast<std::size_t>(precision)] > 0.0;
    };
    if (hardware.cpu) return 0.0;
    if (computes(Precision::mxfp8) || computes(Precision::nvfp4)) return 10.0;
    return computes(Precision::fp8_tensor) || computes(Precision::fp8_blockwise) ? 9.0 : 8.0;
}

// The text of a profile that states only what differs from its base.
std::string on_base(const JsonObject& json, const std::string& text) {
    using Tree = nlohmann::ordered_json;
    const ProfileFile file = find_profile(json.string("base"), "hardware", json.place() + ": base", "");
    Tree own = parse_json<Tree>(text, json.place());
    auto whole = load_json<Tree>(file.path);
    if (whole.contains("base")) json.refuse_value("base", "must name a profile without a base");
    const auto list = [](const Tree& source) { return source.is_array() ? source : Tree::array({source}); };
    Tree sources = own.contains("source") ? list(own["source"]) : Tree::array();
    if (whole.contains("source"))
        for (const Tree& source : list(whole["source"])) sources.push_back(source);
    own.erase("base");
    own["source"] = sources;
    whole.merge_patch(own);
    return whole.dump(-1, ' ', false, Tree::error_handler_t::replace);
}

} // namespace

double bytes_among(const std::map<int, double>& measured, int members) {
    if (measured.empty()) return 0.0;
    const auto found = measured.lower_bound(members);
    return found != measured.end() ? found->second : measured.rbegin()->second;
}

const char* to_string(Precision precision) { return precision_names[static_cast<std::size_t>(precision)]; }

Precision precision_from_string(const std::string& text) {
    const std::vector<std::string> known{precision_names.begin(), precision_names.end()};
    const auto found = std::find(known.begin(), known.end(), text);
    if (found == known.end())
        refuse("precision '{}' is unknown{}; known are {}", shown(text), did_you_mean(text, known),
               fmt::join(known, ", "));
    return static_cast<Precision>(found - known.begin());
}

Hardware hardware_from_json(const std::string& text, const std::string& place) {
    const JsonObject json = JsonObject::parse(text, place);
    check_schema(json, schema::hardware);
    json.only({"schema",
               "name",
               "vendor",
               "compute_capability",
               "cpu",
               "cores",
               "sm_count",
               "peak_flops",
               "memory_bytes",
               "memory_bandwidth",
               "nvlink_domain",
               "nvlink_domain_used",
               "gpus_per_node",
               "nvlink",
               "pcie",
               "nic",
               "host",
               "host_memory_bytes",
               "context_bytes",
               "communicator_bytes",
               "default_stack",
               "like",
               "source",
               "measured",
               "measured_clocks",
               "product_tiles",
               "measured_by",
               "cards"});
    Hardware hardware;
    hardware.name = json.string("name");
    if (hardware.name.empty()) json.refuse_value("name", "must name the machine");
    hardware.cpu = json.boolean_or("cpu", false);
    hardware.vendor = json.string_or("vendor", hardware.cpu ? "" : "NVIDIA");
    hardware.cores = static_cast<int>(json.integer_or("cores", 0, 0, max_count));
    hardware.sm_count = static_cast<int>(json.integer_or("sm_count", 0, 0, max_count));
    read_peaks(json, hardware);
    hardware.compute_capability = json.number_or("compute_capability", usual_capability(hardware), 1.0, max_capability);
    if (json.number("memory_bytes", -max_bytes, max_bytes) != 0.0) // 0: as the machine has
        hardware.memory_bytes = plausible(json, "memory_bytes", hardware.cpu ? cpu_memory : gpu_memory);
    hardware.memory_bandwidth = plausible(json, "memory_bandwidth", hardware.cpu ? cpu_memory_rate : gpu_memory_rate);
    hardware.nvlink_domain = static_cast<int>(json.integer_or("nvlink_domain", 1, 1, max_count));
    hardware.nvlink_domain_used =
        static_cast<int>(json.integer_or("nvlink_domain_used", hardware.nvlink_domain, 1, max_count));
    hardware.gpus_per_node =
        static_cast<int>(json.integer_or("gpus_per_node", usual_node(hardware.nvlink_domain), 1, max_count));
    hardware.nvlink = read_link(json, "nvlink");
    hardware.pcie = read_link(json, "pcie");
    hardware.nic = read_link(json, "nic");
    hardware.host = read_link(json, "host");
    hardware.host_memory_bytes = plausible_or_none(json, "host_memory_bytes", cpu_memory);
    hardware.context_bytes = json.number_or("context_bytes", 0.0, 0.0, max_bytes);
    hardware.communicators = read_communicators(json);
    hardware.default_stack = json.string_or("default_stack", "moe-plan");
    hardware.like = json.string_or("like", "");
    hardware.source = read_source(json);
    read_measured(json, hardware);
    read_tiles(json, hardware);
    hardware.measured_by = json.string_or("measured_by", "");
    read_cards(json, hardware);
    check(json, hardware);
    resolve_machine(hardware);
    hardware.json = to_json(hardware);
    return hardware;
}

Hardware load_hardware(const std::string& name_or_path) {
    refuse_foreign(name_or_path);
    const ProfileFile file = find_profile(name_or_path, "hardware", "hardware", "");
    const std::string text = read_file(file.path);
    const JsonObject json = JsonObject::parse(text, file.path);
    return hardware_from_json(json.has("base") ? on_base(json, text) : text, file.path);
}

} // namespace moe::machine
