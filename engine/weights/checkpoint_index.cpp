// Checked reading of a checkpoint's index, and its text.
#include "engine/weights/checkpoint_index.hpp"

#include "engine/base/crc32c.hpp"
#include "planner/base/error.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"
#include "planner/base/schema.hpp"

#include <nlohmann/json.hpp>

#include <charconv>
#include <cmath>
#include <functional>
#include <queue>
#include <set>
#include <tuple>

namespace moe::weights {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* format_name = "moe-plan checkpoint";
constexpr std::int64_t most_elements = std::int64_t{1} << 48, most_count = std::int64_t{1} << 53;
constexpr std::int64_t most_layers = 1 << 20, most_experts = 1 << 20, most_shards = 1 << 20;

// A value of the file, known by the names that lead to it.
class Value {
public:
    Value(const Json& json, const std::string& path, std::string name)
        : json_(json), path_(path), name_(std::move(name)) {}

    [[noreturn]] void no(const std::string& why) const {
        refuse("{}: {} = {}: {}", path_, shown(name_), shown_json(json_), why);
    }
    bool has(const char* key) const { return json_.is_object() && json_.contains(key); }
    Value at(const char* key) const {
        if (!json_.is_object()) no("must be an object");
        const auto found = json_.find(key);
        if (found == json_.end()) refuse("{}: {}.{} is missing", path_, shown(name_), key);
        return {*found, path_, name_ + "." + key};
    }
    std::int64_t whole(std::int64_t low, std::int64_t high) const {
        const bool fits = json_.is_number_unsigned() ? json_.get<std::uint64_t>() <= static_cast<std::uint64_t>(high)
                                                     : json_.is_number_integer() && json_.get<std::int64_t>() <= high;
        if (!fits || json_.get<std::int64_t>() < low)
            no(fmt::format("must be a whole number from {} to {}", low, high));
        return json_.get<std::int64_t>();
    }
    std::uint64_t natural() const {
        if (!json_.is_number_unsigned()) no("must be a whole number of 0 or more");
        return json_.get<std::uint64_t>();
    }
    std::uint32_t checksum() const { return static_cast<std::uint32_t>(whole(0, 0xffffffff)); }
    double number(double low, double high) const {
        const double value = json_.is_number() ? json_.get<double>() : NAN;
        if (!(value >= low && value <= high)) no(fmt::format("must be a number from {} to {}", low, high));
        return value;
    }
    bool flag() const {
        if (!json_.is_boolean()) no("must be true or false");
        return json_.get<bool>();
    }
    std::string text() const {
        if (!json_.is_string()) no("must be text");
        return json_.get<std::string>();
    }
    void each_element(std::int64_t most, const std::function<void(const Value&)>& visit) const {
        if (!json_.is_array() || json_.size() > static_cast<std::size_t>(most))
            no(fmt::format("must be an array of at most {} elements", most));
        for (std::size_t i = 0; i < json_.size(); ++i) visit({json_[i], path_, fmt::format("{}[{}]", name_, i)});
    }
    std::vector<std::int64_t> wholes(std::size_t count, std::int64_t low, std::int64_t high) const {
        std::vector<std::int64_t> values;
        each_element(static_cast<std::int64_t>(count), [&](const Value& v) { values.push_back(v.whole(low, high)); });
        if (values.size() != count) no(fmt::format("must have {} numbers", count));
        return values;
    }
    void each_field(const std::function<void(const std::string& key, const Value&)>& visit) const {
        if (!json_.is_object()) no("must be an object");
        for (const auto& [key, value] : json_.items()) visit(key, {value, path_, name_ + "." + key});
    }
    const Json& json() const { return json_; }

private:
    const Json& json_;
    const std::string& path_;
    std::string name_;
};

Runs read_runs(const Value& value, std::int64_t total) {
    const std::vector<std::int64_t> v = value.wholes(4, 0, total);
    const Runs r{v[0], v[1], v[2], v[3]};
    if (r.count < 1 || r.repeat < 1) value.no("an empty run");
    if (r.repeat > 1 && r.stride < r.count) value.no("a run that lies over itself");
    const std::int64_t room = total - r.first - r.count;
    if (room < 0 || (r.repeat > 1 && r.repeat - 1 > room / r.stride))
        value.no(fmt::format("reaches beyond the tensor's {} elements", total));
    return r;
}

IndexedTensor read_tensor(const Value& value, std::size_t shards) {
    const std::vector<std::int64_t> shape = value.at("shape").wholes(2, 1, most_elements);
    IndexedTensor tensor{shape[0], shape[1], {}};
    if (tensor.rows > most_elements / tensor.cols) value.at("shape").no("has too many elements");
    const std::int64_t total = tensor.rows * tensor.cols;
    std::int64_t held = 0;
    std::set<std::size_t> seen;
    value.at("slices").each_element(most_shards, [&](const Value& of) {
        IndexedSlice slice;
        slice.shard = static_cast<std::size_t>(of.at("shard").whole(0, static_cast<std::int64_t>(shards) - 1));
        if (!seen.insert(slice.shard).second) of.no("a second slice of one shard");
        of.at("runs").each_element(most_elements, [&](const Value& run) {
            slice.runs.push_back(read_runs(run, total));
            slice.elements += slice.runs.back().count * slice.runs.back().repeat;
            if (slice.elements > total) run.no(fmt::format("the runs hold more than the tensor's {} elements", total));
        });
        const std::vector<std::int64_t> sums = of.at("crc32c").wholes(state_kind_count, 0, 0xffffffff);
        for (std::size_t k = 0; k < sums.size(); ++k) slice.checksums[k] = static_cast<std::uint32_t>(sums[k]);
        held += slice.elements;
        if (held > total) of.no(fmt::format("the slices hold more than the tensor's {} elements", total));
        tensor.slices.push_back(std::move(slice));
    });
    if (held != total) value.no(fmt::format("has {} x {} elements, its slices {}", shape[0], shape[1], held));
    return tensor;
}

data::DataPosition read_position(const Value& value) {
    data::DataPosition position;
    position.shuffled = value.at("shuffled").flag();
    position.seq = value.at("seq").whole(1, most_count);
    position.global_batch = value.at("global_batch").whole(1, most_count);
    value.at("datasets").each_element(1 << 16, [&](const Value& of) {
        data::DatasetPosition d;
        d.prefix = of.at("prefix").text();
        d.tokens = of.at("tokens").whole(1, most_count);
        d.documents = of.at("documents").whole(1, most_count);
        d.mark = of.at("mark").checksum();
        d.weight = of.at("weight").number(1e-300, 1e300);
        d.order = of.at("order").whole(0, most_count);
        d.pass = of.at("pass").whole(0, most_count);
        d.block = of.at("block").whole(1, d.tokens);
        d.consumed = of.at("consumed").whole(0, d.tokens);
        d.drawn = of.at("drawn").whole(0, most_count);
        position.datasets.push_back(std::move(d));
    });
    return position;
}

Json position_json(const data::DataPosition& position) {
    Json datasets = Json::array();
    for (const data::DatasetPosition& d : position.datasets)
        datasets.push_back({{"prefix", d.prefix},
                            {"tokens", d.tokens},
                            {"documents", d.documents},
                            {"mark", d.mark},
                            {"weight", d.weight},
                            {"order", d.order},
                            {"pass", d.pass},
                            {"block", d.block},
                            {"consumed", d.consumed},
                            {"drawn", d.drawn}});
    return {{"shuffled", position.shuffled},
            {"seq", position.seq},
            {"global_batch", position.global_batch},
            {"datasets", std::move(datasets)}};
}

RunState read_state(const Value& index) {
    RunState state;
    state.step = index.at("step").whole(0, most_count);
    state.samples = index.at("samples").whole(0, most_count);
    state.seed = index.at("seed").natural();
    state.model = index.at("model").text();
    if (!index.at("config").json().is_object()) index.at("config").no("must be an object");
    state.config = json_text(index.at("config").json());
    index.at("router_loads").each_field([&](const std::string& key, const Value& loads) {
        int layer = 0;
        const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), layer);
        if (error != std::errc() || end != key.data() + key.size() || layer < 0 || layer >= most_layers)
            loads.no("belongs to no layer");
        std::vector<float>& of = state.router_loads[layer];
        loads.each_element(most_experts,
                           [&](const Value& load) { of.push_back(static_cast<float>(load.number(0.0, 1e30))); });
    });
    if (index.has("data")) state.data = read_position(index.at("data"));
    return state;
}

} // namespace

std::string shard_name(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }

std::string stored_name(const std::string& name, StateKind kind) {
    return kind == StateKind::weight ? name : name + "." + to_string(kind);
}

CheckpointIndex read_index(const std::string& path) {
    const Json file = load_json<Json>(path, long_json);
    if (!file.is_object() || !file.contains("crc32c") || !file.contains("checkpoint"))
        refuse("{}: is not the index of a checkpoint", path);
    const std::uint32_t found = engine::crc32c(json_text(file["checkpoint"]));
    if (file["crc32c"] != found)
        refuse("{}: its checksum is {}, its content gives {}: it is damaged", path, shown_json(file["crc32c"]), found);
    const Value index(file["checkpoint"], path, "checkpoint");
    const std::string format = index.at("format").text();
    const std::int64_t version = index.at("version").whole(0, most_count);
    if (format != format_name || version != 1)
        refuse("{}: format \"{}\", version {}: this program reads \"{}\", version 1", path, shown(format), version,
               format_name);
    CheckpointIndex result;
    result.state = read_state(index);
    index.at("shards").each_element(most_shards, [&](const Value& shard) {
        const std::string expected = shard_name(static_cast<int>(result.shards.size()));
        if (shard.text() != expected) shard.no("must be " + expected);
        result.shards.push_back(expected);
    });
    index.at("tensors").each_field([&](const std::string& name, const Value& tensor) {
        result.tensors.emplace(name, read_tensor(tensor, result.shards.size()));
    });
    return result;
}

// Runs by where their next piece begins: each must begin where the one before has ended.
void check_partition(const std::string& path, const std::string& name, const IndexedTensor& tensor) {
    using Next = std::tuple<std::int64_t, const Runs*, std::int64_t>; // begin, runs, pieces behind it
    std::priority_queue<Next, std::vector<Next>, std::greater<>> next;
    for (const IndexedSlice& slice : tensor.slices)
        for (const Runs& r : slice.runs) next.emplace(r.first, &r, r.repeat - 1);
    std::int64_t covered = 0;
    while (!next.empty()) {
        const auto [begin, runs, left] = next.top();
        next.pop();
        if (begin != covered)
            refuse("{}: {}: element {} lies in {}", path, shown(name), std::min(begin, covered),
                   begin > covered ? "no slice" : "two slices");
        covered += runs->count;
        if (left > 0) next.emplace(begin + runs->stride, runs, left - 1);
    }
}

std::string part_text(const RankSlices& rank) {
    Json part = Json::object();
    for (const Slice& slice : rank.slices) {
        Json runs = Json::array(), sums = Json::array();
        for (const Runs& r : slice.runs) runs.push_back({r.first, r.count, r.stride, r.repeat});
        for (const std::vector<float>& values : slice.values)
            sums.push_back(
                engine::crc32c({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)}));
        part[slice.name] = {
            {"shape", {slice.rows, slice.cols}}, {"runs", std::move(runs)}, {"crc32c", std::move(sums)}};
    }
    return json_text(part);
}

std::string index_text(const RunState& state, const std::vector<std::string>& parts) {
    std::map<std::string, Json> tensors;
    Json shards = Json::array();
    for (std::size_t rank = 0; rank < parts.size(); ++rank) {
        shards.push_back(shard_name(static_cast<int>(rank)));
        Json part = parse_json<Json>(parts[rank], fmt::format("the part of rank {}", rank), long_json);
        for (auto& [name, slice] : part.items()) {
            Json& tensor = tensors[name];
            tensor["shape"] = slice.at("shape");
            tensor["slices"].push_back({{"shard", rank}, {"runs", slice.at("runs")}, {"crc32c", slice.at("crc32c")}});
        }
    }
    Json index = {{"format", format_name},
                  {"version", 1},
                  {"model", state.model},
                  {"step", state.step},
                  {"samples", state.samples},
                  {"seed", state.seed},
                  {"config", parse_json<Json>(state.config, "the model's config", long_json)},
                  {"router_loads", Json::object()},
                  {"shards", std::move(shards)},
                  {"tensors", Json::object()}};
    for (auto& [name, tensor] : tensors) index["tensors"][name] = std::move(tensor);
    for (const auto& [layer, load] : state.router_loads) index["router_loads"][std::to_string(layer)] = load;
    if (!state.data.datasets.empty()) index["data"] = position_json(state.data);
    const std::string text = json_text(index);
    return fmt::format("{{\"schema\":\"{}\",\"crc32c\":{},\"checkpoint\":{}}}\n", schema::checkpoint,
                       engine::crc32c(text), text);
}

} // namespace moe::weights
