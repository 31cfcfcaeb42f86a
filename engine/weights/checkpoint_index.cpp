// Checked reading of a checkpoint's index, and its text.
#include "engine/weights/checkpoint_index.hpp"

#include "engine/base/crc32c.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/json_object.hpp"
#include "planner/base/names.hpp"
#include "planner/base/schema.hpp"

#include <nlohmann/json.hpp>

#include <charconv>
#include <functional>
#include <limits>
#include <queue>
#include <set>
#include <tuple>

namespace moe::weights {

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* format_name = "moe-plan checkpoint";
constexpr std::int64_t most_elements = std::int64_t{1} << 48, most_count = std::int64_t{1} << 53;
constexpr std::size_t most_norms = 32;
constexpr double most_magnitude = std::numeric_limits<float>::max();
constexpr std::int64_t most_layers = 1 << 20, most_checksum = 0xffffffff;

Runs run_of(const std::vector<std::int64_t>& v, std::int64_t total, const JsonObject& slice) {
    const auto no = [&](const std::string& why) {
        slice.refuse_value("runs", fmt::format("[{}] {}", fmt::join(v, ", "), why));
    };
    const Runs r{v[0], v[1], v[2], v[3]};
    if (r.count < 1 || r.repeat < 1) no("is an empty run");
    if (r.repeat > 1 && r.stride < r.count) no("is a run that lies over itself");
    const std::int64_t room = total - r.first - r.count;
    if (room < 0 || (r.repeat > 1 && r.repeat - 1 > room / r.stride))
        no(fmt::format("reaches beyond the tensor's {} elements", total));
    return r;
}

IndexedTensor read_tensor(const JsonObject& of, std::size_t shards, bool averages) {
    const std::vector<std::int64_t> shape = of.integers("shape", 2, 1, most_elements);
    IndexedTensor tensor{
        shape[0], shape[1], {}, of.states("moments") ? static_cast<int>(of.integer("moments", 0, 2)) : 2};
    const std::vector<StateKind> kinds = kinds_of(averages, tensor.moments);
    if (tensor.rows > most_elements / tensor.cols) of.refuse_value("shape", "has too many elements");
    const std::int64_t total = tensor.rows * tensor.cols;
    std::int64_t held = 0;
    std::set<std::size_t> seen;
    for (const JsonObject& one : of.objects("slices")) {
        IndexedSlice slice;
        slice.shard = static_cast<std::size_t>(one.integer("shard", 0, static_cast<std::int64_t>(shards) - 1));
        if (!seen.insert(slice.shard).second) one.refuse_value("shard", "a second slice of one shard");
        for (const std::vector<std::int64_t>& run : one.integer_rows("runs", 4, 0, total)) {
            slice.runs.push_back(run_of(run, total, one));
            slice.elements += slice.runs.back().count * slice.runs.back().repeat;
            if (slice.elements > total)
                one.refuse_value("runs", fmt::format("hold more than the tensor's {} elements", total));
        }
        const std::vector<std::int64_t> sums = one.integers("crc32c", kinds.size(), 0, most_checksum);
        for (std::size_t k = 0; k < sums.size(); ++k)
            slice.checksums[static_cast<std::size_t>(kinds[k])] = static_cast<std::uint32_t>(sums[k]);
        held += slice.elements;
        if (held > total) of.refuse_value("slices", fmt::format("hold more than the tensor's {} elements", total));
        tensor.slices.push_back(std::move(slice));
    }
    if (held != total) of.refuse_value("slices", fmt::format("hold {} of {} x {} elements", held, shape[0], shape[1]));
    return tensor;
}

data::DataPosition read_position(const JsonObject& of) {
    data::DataPosition position;
    position.shuffled = of.boolean("shuffled");
    position.seq = of.integer("seq", 1, most_count);
    position.global_batch = of.integer("global_batch", 1, most_count);
    for (const JsonObject& one : of.objects("datasets")) {
        data::DatasetPosition d;
        d.prefix = one.string("prefix");
        d.tokens = one.integer("tokens", 1, most_count);
        d.documents = one.integer("documents", 1, most_count);
        d.mark = static_cast<std::uint32_t>(one.integer("mark", 0, most_checksum));
        d.weight = one.number("weight", 1e-300, 1e300);
        d.order = one.integer("order", 0, most_count);
        d.pass = one.integer("pass", 0, most_count);
        d.block = one.integer("block", 1, d.tokens);
        d.consumed = one.integer("consumed", 0, d.tokens);
        d.drawn = one.integer("drawn", 0, most_count);
        position.datasets.push_back(std::move(d));
    }
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

std::map<std::string, std::vector<Largest>> read_largest(const JsonObject& of, std::int64_t step) {
    std::map<std::string, std::vector<Largest>> result;
    for (const std::string& tensor : of.keys()) {
        const JsonObject history = of.object(tensor);
        const std::vector<double> values = history.numbers("values", 0.0, most_magnitude);
        const std::vector<std::int64_t> steps = history.integers("steps", values.size(), 1, step);
        for (std::size_t i = 0; i < steps.size(); ++i) {
            if (i > 0 && steps[i] <= steps[i - 1]) history.refuse_value("steps", "are not in order");
            result[tensor].push_back({steps[i], static_cast<float>(values[i])});
        }
    }
    return result;
}

Json largest_json(const std::map<std::string, std::vector<Largest>>& largest) {
    Json json = Json::object();
    for (const auto& [tensor, history] : largest) {
        Json steps = Json::array(), values = Json::array();
        for (const Largest& entry : history) steps.push_back(entry.step), values.push_back(entry.value);
        json[tensor] = {{"steps", std::move(steps)}, {"values", std::move(values)}};
    }
    return json;
}

RunState read_state(const JsonObject& index) {
    RunState state;
    state.step = index.integer("step", 0, most_count);
    state.samples = index.integer("samples", 0, most_count);
    state.seed = static_cast<std::uint64_t>(index.integer("seed", 0, std::numeric_limits<std::int64_t>::max()));
    state.model = index.string("model");
    state.config = index.object("config").dump();
    const JsonObject loads = index.object("router_loads");
    for (const std::string& key : loads.keys()) {
        int layer = 0;
        const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), layer);
        if (error != std::errc() || end != key.data() + key.size() || layer < 0 || layer >= most_layers)
            loads.refuse_value(key, "belongs to no layer");
        for (const double load : loads.numbers(key, 0.0, 1e30))
            state.router_loads[layer].push_back(static_cast<float>(load));
    }
    if (index.states("data")) state.data = read_position(index.object("data"));
    if (index.states("bad_steps")) {
        const JsonObject bad = index.object("bad_steps");
        state.skipped = bad.integer("skipped", 0, state.step);
        for (const double norm : bad.numbers("norms", 0.0, 1e30)) state.norms.push_back(static_cast<float>(norm));
        if (state.norms.size() > most_norms) bad.refuse_value("norms", "holds too many");
    }
    if (index.states("ema")) state.ema = index.number("ema", 0.0, 1.0);
    if (index.states("optimizer")) {
        const std::string name = index.string("optimizer");
        state.muon = name == "muon";
        if (!state.muon && name != "adamw") index.refuse_value("optimizer", "is neither adamw nor muon");
    }
    if (index.states("lora")) state.lora = index.string("lora");
    if (index.states("largest")) state.largest = read_largest(index.object("largest"), state.step);
    if (index.states("freeze")) state.freeze = index.strings("freeze");
    if (index.states("lr_groups")) state.lr_groups = index.strings("lr_groups");
    return state;
}

} // namespace

std::string shard_name(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }

std::string stored_name(const std::string& name, StateKind kind) {
    return kind == StateKind::weight ? name : name + "." + to_string(kind);
}

CheckpointIndex read_index(const std::string& path) {
    const JsonObject file = JsonObject::parse(read_file(path, long_json.bytes), path, long_json);
    if (!file.has("crc32c") || !file.has("checkpoint")) refuse("{}: is not the index of a checkpoint", path);
    const JsonObject index = file.object("checkpoint");
    if (const std::uint32_t found = engine::crc32c(index.dump()); file.integer("crc32c", 0, most_checksum) != found)
        file.refuse_value("crc32c", fmt::format("its content gives {}: it is damaged", found));
    const std::string format = index.string("format");
    const std::int64_t version = index.integer("version", 0, most_count);
    if (format != format_name || version != 1)
        refuse("{}: format \"{}\", version {}: this program reads \"{}\", version 1", path, shown(format), version,
               format_name);
    CheckpointIndex result;
    result.state = read_state(index);
    for (const std::string& shard : index.strings("shards")) {
        const std::string expected = shard_name(static_cast<int>(result.shards.size()));
        if (shard != expected) index.refuse_value("shards", fmt::format("holds {} for {}", shown(shard), expected));
        result.shards.push_back(expected);
    }
    const JsonObject tensors = index.object("tensors");
    for (const std::string& name : tensors.keys())
        result.tensors.emplace(name, read_tensor(tensors.object(name), result.shards.size(), result.state.averages()));
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
            if (!values.empty())
                sums.push_back(
                    engine::crc32c({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)}));
        part[slice.name] = {
            {"shape", {slice.rows, slice.cols}}, {"runs", std::move(runs)}, {"crc32c", std::move(sums)}};
        if (slice.moments < 2) part[slice.name]["moments"] = slice.moments;
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
            if (slice.contains("moments")) tensor["moments"] = slice.at("moments");
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
    if (!state.norms.empty() || state.skipped > 0)
        index["bad_steps"] = {{"skipped", state.skipped}, {"norms", state.norms}};
    if (state.averages()) index["ema"] = state.ema;
    if (state.muon) index["optimizer"] = "muon";
    if (!state.lora.empty()) index["lora"] = state.lora;
    if (!state.largest.empty()) index["largest"] = largest_json(state.largest);
    if (!state.freeze.empty()) index["freeze"] = state.freeze;
    if (!state.lr_groups.empty()) index["lr_groups"] = state.lr_groups;
    if (!state.data.datasets.empty()) index["data"] = position_json(state.data);
    const std::string text = json_text(index);
    return fmt::format("{{\"schema\":\"{}\",\"crc32c\":{},\"checkpoint\":{}}}\n", schema::checkpoint,
                       engine::crc32c(text), text);
}

} // namespace moe::weights
