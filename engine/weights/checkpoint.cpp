// Checked reading of checkpoints: the index first, then the shards that it names, then what they hold.
#include "engine/weights/checkpoint.hpp"

#include "engine/base/crc32c.hpp"
#include "engine/weights/checkpoint_folder.hpp"
#include "engine/weights/checkpoint_index.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <filesystem>
#include <span>
#include <vector>

namespace moe::weights {

namespace {

const StoredTensor& stored_slice(const Safetensors& file, const std::string& name, std::int64_t elements) {
    const auto found = file.tensors().find(name);
    if (found == file.tensors().end() || found->second.elements != elements || found->second.dtype != "F32")
        refuse("{}: does not hold the {} elements of {} that the index names", file.path(), elements, shown(name));
    return found->second;
}

void check_sum(const std::string& path, const std::string& name, const StoredTensor& tensor, std::uint32_t expected) {
    std::uint32_t sum = 0;
    std::vector<char> part(std::size_t{1} << 20);
    const std::size_t bytes = 4 * static_cast<std::size_t>(tensor.elements);
    for (std::size_t done = 0; done < bytes; done += part.size()) {
        const std::span<char> some = std::span(part).first(std::min(part.size(), bytes - done));
        tensor.file->read(tensor.offset + done, some);
        sum = engine::crc32c(some, sum);
    }
    if (sum != expected)
        refuse("{}: {}: checksum {:08x}, but the index says {:08x}: it is damaged", path, shown(name), sum, expected);
}

// Reads what `runs`, whose elements lie one behind the other in `tensor`, share with [first, first + out.size());
// returns how many elements that were.
std::int64_t read_overlap(const std::vector<Runs>& runs, const StoredTensor& tensor, std::int64_t first,
                          std::span<float> out) {
    const std::int64_t last = first + static_cast<std::int64_t>(out.size());
    std::int64_t stored = 0, copied = 0;
    for (const Runs& r : runs) {
        // Repetitions that end at or before `first` are stepped over at once.
        std::int64_t i = r.stride > 0 ? std::max<std::int64_t>(0, (first - r.first - r.count) / r.stride) : 0;
        for (; i < r.repeat && r.first + i * r.stride < last; ++i) {
            const std::int64_t begin = r.first + i * r.stride;
            const std::int64_t low = std::max(begin, first), high = std::min(begin + r.count, last);
            if (low >= high) continue;
            const std::span<float> to =
                out.subspan(static_cast<std::size_t>(low - first), static_cast<std::size_t>(high - low));
            tensor.file->read(tensor.offset + 4 * static_cast<std::size_t>(stored + i * r.count + (low - begin)),
                              {reinterpret_cast<char*>(to.data()), to.size_bytes()});
            copied += high - low;
        }
        stored += r.count * r.repeat;
    }
    return copied;
}

} // namespace

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

StoredCheckpoint::StoredCheckpoint(const std::string& path) : path_(path) {
    const std::string place = inside(path, "index.json");
    CheckpointIndex index = read_index(place);
    state_ = std::move(index.state);
    if (const auto step = step_of_name(std::filesystem::path(path).filename().string()); step && *step != state_.step)
        refuse("{}: is of step {}, its folder's name of step {}", place, state_.step, *step);
    for (const std::string& shard : index.shards) files_.push_back(std::make_unique<Safetensors>(inside(path, shard)));
    for (const auto& [name, tensor] : index.tensors) {
        for (const IndexedSlice& slice : tensor.slices)
            for (const StateKind kind : kinds_of(state_.averages(), tensor.moments))
                stored_slice(*files_[slice.shard], stored_name(name, kind), slice.elements);
        check_partition(place, name, tensor);
    }
    for (auto& [name, tensor] : index.tensors) {
        shapes_[name] = {tensor.rows, tensor.cols, tensor.moments};
        for (IndexedSlice& slice : tensor.slices) {
            const Safetensors& file = *files_[slice.shard];
            for (const StateKind kind : kinds_of(state_.averages(), tensor.moments)) {
                const std::string stored = stored_name(name, kind);
                check_sum(file.path(), stored, file.tensors().at(stored),
                          slice.checksums[static_cast<std::size_t>(kind)]);
            }
            parts_[name].push_back({&file, std::move(slice.runs)});
        }
    }
}

void StoredCheckpoint::read(const std::string& name, StateKind kind, std::int64_t first, std::span<float> out) const {
    const auto found = parts_.find(name);
    if (found == parts_.end()) refuse("{}: holds no parameter {}", path_, name);
    const int moments = shapes_.at(name).moments;
    if ((kind == StateKind::exp_avg && moments < 1) || (kind == StateKind::exp_avg_sq && moments < 2))
        refuse("{}: holds {} of {}", path_, moments == 1 ? "one moment" : "no moments", name);
    if (kind == StateKind::average && !state_.averages()) refuse("{}: holds no average of the weights", path_);
    std::int64_t copied = 0;
    for (const Part& part : found->second) {
        const StoredTensor& tensor = part.file->tensors().at(stored_name(name, kind));
        copied += read_overlap(part.runs, tensor, first, out);
    }
    if (copied != static_cast<std::int64_t>(out.size()))
        refuse("{}: the slices of {} hold {} of the {} elements from {} on", path_, name, copied, out.size(), first);
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

} // namespace moe::weights
