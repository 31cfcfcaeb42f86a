// Writing, checking and reading of checkpoints: shards, index, checksums.
#include "engine/weights/checkpoint.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"
#include "planner/base/schema.hpp"

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <thread>

namespace moe::weights {

namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

constexpr const char* format_name = "moe-plan checkpoint";
constexpr const char* partial_mark = ".partial";
constexpr StateKind kinds[] = {StateKind::weight, StateKind::exp_avg, StateKind::exp_avg_sq};

std::string stored_name(const std::string& name, StateKind kind) {
    return kind == StateKind::weight ? name : name + "." + to_string(kind);
}

std::string shard_name(int rank) { return fmt::format("rank-{:05}.safetensors", rank); }
std::string part_name(int rank) { return fmt::format("rank-{:05}.json", rank); }

std::string inside(const std::string& folder, const std::string& name) { return (fs::path(folder) / name).string(); }

std::array<std::array<std::uint32_t, 256>, 8> crc_tables() {
    std::array<std::array<std::uint32_t, 256>, 8> tables{};
    for (std::uint32_t i = 0; i < 256; ++i) {
        std::uint32_t crc = i;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
        tables[0][i] = crc;
    }
    for (std::size_t t = 1; t < 8; ++t)
        for (std::size_t i = 0; i < 256; ++i)
            tables[t][i] = (tables[t - 1][i] >> 8) ^ tables[0][tables[t - 1][i] & 0xffu];
    return tables;
}

// A rename or a new file is on the disk only when its folder is.
void flush_folder(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool flushed = descriptor >= 0 && ::fsync(descriptor) == 0;
    const int error = errno;
    if (descriptor >= 0) ::close(descriptor);
    if (!flushed) fail("cannot write {}: {}", path, std::generic_category().message(error));
}

std::uint32_t checksum(std::span<const float> values) {
    return crc32c({reinterpret_cast<const char*>(values.data()), values.size_bytes()});
}

void write_shard(const std::string& path, const std::vector<Slice>& slices) {
    std::vector<TensorToWrite> tensors;
    std::vector<const std::vector<float>*> values;
    for (const Slice& slice : slices)
        for (const StateKind kind : kinds) {
            tensors.push_back({stored_name(slice.name, kind), {slice.elements}});
            values.push_back(&slice.values[static_cast<std::size_t>(kind)]);
        }
    write_safetensors(path, tensors, program::Dtype::f32,
                      [next = std::size_t{0}, &values](const TensorToWrite&) mutable { return *values[next++]; });
}

// The content of a rank's shard: {name: {shape, runs, crc32c}}.
Json part_of(const RankSlices& rank) {
    Json part = Json::object();
    for (const Slice& slice : rank.slices) {
        Json runs = Json::array(), sums = Json::array();
        for (const Runs& r : slice.runs) runs.push_back({r.first, r.count, r.stride, r.repeat});
        for (const StateKind kind : kinds) sums.push_back(checksum(slice.values[static_cast<std::size_t>(kind)]));
        part[slice.name] = {
            {"shape", {slice.rows, slice.cols}}, {"runs", std::move(runs)}, {"crc32c", std::move(sums)}};
    }
    return part;
}

// Waits for the parts of all ranks and puts them together.
Json index_of(const std::string& partial, const Snapshot& snapshot, double patience) {
    std::map<std::string, Json> tensors;
    Json shards = Json::array();
    const auto start = std::chrono::steady_clock::now();
    for (int rank = 0; rank < snapshot.world; ++rank) {
        const std::string path = inside(partial, part_name(rank));
        while (!fs::exists(path)) {
            if (std::chrono::steady_clock::now() - start > std::chrono::duration<double>(patience))
                fail("{}: rank {} has not written its part after {} s; the checkpoint is given up", partial, rank,
                     patience);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        shards.push_back(shard_name(rank));
        Json part = Json::parse(read_file(path));
        for (auto& [name, slice] : part.items()) {
            Json& tensor = tensors[name];
            tensor["shape"] = slice["shape"];
            tensor["slices"].push_back({{"shard", rank}, {"runs", slice["runs"]}, {"crc32c", slice["crc32c"]}});
        }
    }
    Json index = {{"format", format_name},
                  {"version", 1},
                  {"model", snapshot.state.model},
                  {"step", snapshot.state.step},
                  {"samples", snapshot.state.samples},
                  {"seed", snapshot.state.seed},
                  {"config", Json::parse(snapshot.state.config)},
                  {"router_loads", Json::object()},
                  {"shards", std::move(shards)},
                  {"tensors", Json::object()}};
    for (auto& [name, tensor] : tensors) index["tensors"][name] = std::move(tensor);
    for (const auto& [layer, load] : snapshot.state.router_loads) index["router_loads"][std::to_string(layer)] = load;
    return index;
}

// The index as its file holds it, behind the checksum of its text.
Json read_index(const std::string& path) {
    const std::string text = read_file(path);
    Json file;
    try {
        file = Json::parse(text);
    } catch (const Json::exception&) {
        refuse("{}: is no JSON document: it is cut off or damaged", path);
    }
    if (!file.is_object() || !file.contains("crc32c") || !file.contains("checkpoint"))
        refuse("{}: is not the index of a checkpoint", path);
    const std::uint32_t found = crc32c(file["checkpoint"].dump());
    if (file["crc32c"] != found)
        refuse("{}: its checksum is {}, its content gives {}: it is damaged", path, file["crc32c"].dump(), found);
    const Json& index = file["checkpoint"];
    if (index.value("format", "") != format_name || index.value("version", 0) != 1)
        refuse("{}: format \"{}\", version {}: this program reads \"{}\", version 1", path,
               shown(index.value("format", "")), index.value("version", 0), format_name);
    return std::move(file["checkpoint"]);
}

std::int64_t elements_of(const std::vector<Runs>& runs) {
    std::int64_t sum = 0;
    for (const Runs& r : runs) sum += r.count * r.repeat;
    return sum;
}

void check_slice(const Safetensors& file, const std::string& name, std::int64_t elements, std::uint32_t expected) {
    const auto found = file.tensors().find(name);
    if (found == file.tensors().end() || found->second.elements != elements || found->second.dtype != "F32")
        refuse("{}: does not hold the {} elements of {} that the index names", file.path(), elements, shown(name));
    const StoredTensor& tensor = found->second;
    const std::uint32_t sum = crc32c({tensor.file->at(tensor.offset), 4 * static_cast<std::size_t>(elements)});
    if (sum != expected)
        refuse("{}: {}: checksum {:08x}, but the index says {:08x}: it is damaged", file.path(), shown(name), sum,
               expected);
}

// Copies what `runs`, whose elements lie one behind the other at `from`, share with [first, first + out.size());
// returns how many elements that were.
std::int64_t copy_overlap(const std::vector<Runs>& runs, const char* from, std::int64_t first, std::span<float> out) {
    const std::int64_t last = first + static_cast<std::int64_t>(out.size());
    std::int64_t stored = 0, copied = 0;
    for (const Runs& r : runs) {
        // Repetitions that end at or before `first` are stepped over at once.
        std::int64_t i = r.stride > 0 ? std::max<std::int64_t>(0, (first - r.first - r.count) / r.stride) : 0;
        for (; i < r.repeat && r.first + i * r.stride < last; ++i) {
            const std::int64_t begin = r.first + i * r.stride;
            const std::int64_t low = std::max(begin, first), high = std::min(begin + r.count, last);
            if (low >= high) continue;
            std::memcpy(out.data() + (low - first),
                        from + 4 * static_cast<std::size_t>(stored + i * r.count + (low - begin)),
                        4 * static_cast<std::size_t>(high - low));
            copied += high - low;
        }
        stored += r.count * r.repeat;
    }
    return copied;
}

} // namespace

// Eight bytes at a time ("slicing by 8", Kounavis and Berry, 2005).
std::uint32_t crc32c(std::span<const char> bytes) {
    static const auto tables = crc_tables();
    std::uint32_t crc = 0xffffffffu;
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
    std::size_t i = 0;
    for (; i + 8 <= bytes.size(); i += 8) {
        std::uint32_t low = 0;
        std::memcpy(&low, bytes.data() + i, 4);
        low ^= crc;
        crc = tables[7][low & 0xffu] ^ tables[6][(low >> 8) & 0xffu] ^ tables[5][(low >> 16) & 0xffu] ^
              tables[4][low >> 24] ^ tables[3][byte(i + 4)] ^ tables[2][byte(i + 5)] ^ tables[1][byte(i + 6)] ^
              tables[0][byte(i + 7)];
    }
    for (; i < bytes.size(); ++i) crc = (crc >> 8) ^ tables[0][(crc ^ byte(i)) & 0xffu];
    return ~crc;
}

void add_run(std::vector<Runs>& runs, std::int64_t first, std::int64_t count) {
    if (!runs.empty() && runs.back().count == count) {
        Runs& last = runs.back();
        const std::int64_t step = first - (last.first + (last.repeat - 1) * last.stride);
        if (step > 0 && (last.repeat == 1 || step == last.stride)) {
            last.stride = step;
            ++last.repeat;
            return;
        }
    }
    runs.push_back({first, count, 0, 1});
}

std::string checkpoint_name(std::int64_t step) { return fmt::format("step-{:08}", step); }

namespace {

// Shards and parts of the snapshot's ranks; the index as well where rank 0 is among them.
void write_into(const std::string& partial, const Snapshot& snapshot, double patience) {
    bool first = false;
    for (const RankSlices& rank : snapshot.ranks) {
        write_shard(inside(partial, shard_name(rank.rank)), rank.slices);
        write_file(inside(partial, part_name(rank.rank)), part_of(rank).dump());
        first = first || rank.rank == 0;
    }
    if (!first) return;
    const std::string text = index_of(partial, snapshot, patience).dump();
    write_file(inside(partial, "index.json"), fmt::format("{{\"schema\":\"{}\",\"crc32c\":{},\"checkpoint\":{}}}\n",
                                                          schema::checkpoint, crc32c(text), text));
}

// Removes the files that this process wrote, which would fill the disk that it ran out of; the folder with the last of
// all processes.
void remove_parts(const std::string& partial, const Snapshot& snapshot) {
    std::error_code error;
    for (const RankSlices& rank : snapshot.ranks)
        for (const std::string& name : {shard_name(rank.rank), part_name(rank.rank)})
            fs::remove(inside(partial, name), error);
    fs::remove(partial, error);
}

} // namespace

void write_checkpoint(const std::string& folder, const Snapshot& snapshot, double patience) {
    const std::string path = inside(folder, checkpoint_name(snapshot.state.step));
    const std::string partial = path + partial_mark + snapshot.run;
    std::error_code error;
    fs::create_directories(partial, error);
    if (error) fail("cannot make the folder {}: {}", partial, error.message());
    try {
        write_into(partial, snapshot, patience);
    } catch (...) {
        remove_parts(partial, snapshot);
        throw;
    }
    if (std::none_of(snapshot.ranks.begin(), snapshot.ranks.end(), [](const RankSlices& r) { return r.rank == 0; }))
        return;
    for (int rank = 0; rank < snapshot.world; ++rank) fs::remove(inside(partial, part_name(rank)), error);
    flush_folder(partial);
    fs::remove_all(path, error); // The folder is damaged: runs resume from whole ones, and no step is taken twice.
    fs::rename(partial, path, error);
    if (error) fail("cannot rename {} to {}: {}", partial, path, error.message());
    flush_folder(folder);
}

StoredCheckpoint::StoredCheckpoint(const std::string& path) : path_(path) {
    const std::string place = inside(path, "index.json");
    const Json index = read_index(place);
    try {
        state_ = {index.at("step"),  index.at("samples"),       index.at("seed"),
                  index.at("model"), index.at("config").dump(), {}};
        for (const auto& [layer, load] : index.at("router_loads").items())
            state_.router_loads[std::stoi(layer)] = load.get<std::vector<float>>();
        for (const Json& shard : index.at("shards"))
            files_.push_back(std::make_unique<Safetensors>(inside(path, shard.get<std::string>())));
        for (const auto& [name, tensor] : index.at("tensors").items()) {
            const Shape shape{tensor.at("shape").at(0), tensor.at("shape").at(1)};
            shapes_[name] = shape;
            std::int64_t held = 0;
            for (const Json& slice : tensor.at("slices")) {
                Part part{files_.at(slice.at("shard").get<std::size_t>()).get(), {}};
                for (const Json& r : slice.at("runs")) part.runs.push_back({r.at(0), r.at(1), r.at(2), r.at(3)});
                for (const StateKind kind : kinds)
                    check_slice(*part.file, stored_name(name, kind), elements_of(part.runs),
                                slice.at("crc32c").at(static_cast<std::size_t>(kind)));
                held += elements_of(part.runs);
                parts_[name].push_back(std::move(part));
            }
            if (held != shape.rows * shape.cols)
                refuse("{}: {} has {} x {} elements, its slices {}", place, shown(name), shape.rows, shape.cols, held);
        }
    } catch (const Json::exception&) {
        refuse("{}: a field is missing or of another type than version 1 has", place);
    } catch (const std::out_of_range&) {
        refuse("{}: a slice lies in a shard that is not listed", place);
    }
}

void StoredCheckpoint::read(const std::string& name, StateKind kind, std::int64_t first, std::span<float> out) const {
    const auto found = parts_.find(name);
    if (found == parts_.end()) refuse("{}: holds no parameter {}", path_, name);
    std::int64_t copied = 0;
    for (const Part& part : found->second) {
        const StoredTensor& tensor = part.file->tensors().at(stored_name(name, kind));
        copied += copy_overlap(part.runs, tensor.file->at(tensor.offset), first, out);
    }
    if (copied != static_cast<std::int64_t>(out.size()))
        refuse("{}: the slices of {} hold {} of the {} elements from {} on", path_, name, copied, out.size(), first);
}

std::vector<std::int64_t> checkpoint_steps(const std::string& folder) {
    std::vector<std::int64_t> steps;
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
        const std::string name = entry.path().filename().string();
        std::int64_t step = 0;
        if (name.rfind("step-", 0) != 0) continue;
        const auto [end, fault] = std::from_chars(name.data() + 5, name.data() + name.size(), step);
        if (fault == std::errc() && end == name.data() + name.size() && name == checkpoint_name(step))
            steps.push_back(step);
    }
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

std::unique_ptr<StoredCheckpoint> newest_checkpoint(const std::string& folder, std::vector<std::string>& skipped) {
    const std::vector<std::int64_t> steps = checkpoint_steps(folder);
    for (const std::int64_t step : steps) {
        try {
            return std::make_unique<StoredCheckpoint>(inside(folder, checkpoint_name(step)));
        } catch (const Error& error) {
            skipped.push_back(error.what());
        }
    }
    if (!steps.empty())
        refuse("{}: none of its {} checkpoints is whole: {}; choose another folder or start again without --resume",
               folder, steps.size(), skipped.front());
    return nullptr;
}

void remove_partial_checkpoints(const std::string& folder) {
    std::error_code error;
    std::vector<fs::path> left;
    for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
        const std::string name = entry.path().filename().string();
        if (name.rfind("step-", 0) == 0 && name.find(partial_mark) != std::string::npos) left.push_back(entry.path());
    }
    for (const fs::path& path : left) fs::remove_all(path, error);
}

} // namespace moe::weights
