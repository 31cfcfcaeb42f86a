// Writing of checkpoints: shards and parts by every process, the index and the final name by the one that holds rank 0.
#include "engine/weights/checkpoint_folder.hpp"
#include "engine/weights/checkpoint_index.hpp"

#include "planner/base/error.hpp"
#include "planner/base/failpoint.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <thread>

namespace moe::weights {

namespace {

namespace fs = std::filesystem;

std::string part_name(int rank) { return fmt::format("rank-{:05}.json", rank); }

// A rename or a new file is on the disk only when its folder is.
void flush_folder(const std::string& path) {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool flushed = descriptor >= 0 && ::fsync(descriptor) == 0;
    const int error = errno;
    if (descriptor >= 0) ::close(descriptor);
    if (!flushed) fail("cannot write {}: {}", path, std::generic_category().message(error));
    failpoint("folder flushed");
}

void write_shard(const std::string& path, const std::vector<Slice>& slices) {
    std::vector<TensorToWrite> tensors;
    std::vector<const std::vector<float>*> values;
    for (const Slice& slice : slices)
        for (const StateKind kind : state_kinds) {
            if (slice.values[static_cast<std::size_t>(kind)].empty()) continue;
            tensors.push_back({stored_name(slice.name, kind), {slice.elements}});
            values.push_back(&slice.values[static_cast<std::size_t>(kind)]);
        }
    write_safetensors(path, tensors, program::Dtype::f32,
                      [next = std::size_t{0}, &values](const TensorToWrite&) mutable { return *values[next++]; });
}

// Waits for the parts of all ranks.
std::vector<std::string> parts_of_all(const std::string& partial, int world, double patience) {
    std::vector<std::string> parts;
    const auto start = std::chrono::steady_clock::now();
    for (int rank = 0; rank < world; ++rank) {
        const std::string path = inside(partial, part_name(rank));
        while (!fs::exists(path)) {
            if (std::chrono::steady_clock::now() - start > std::chrono::duration<double>(patience))
                fail("{}: rank {} has not written its part after {} s; the checkpoint is given up", partial, rank,
                     patience);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        parts.push_back(read_file(path, long_json.bytes));
    }
    return parts;
}

bool holds_first(const Snapshot& snapshot) {
    return std::any_of(snapshot.ranks.begin(), snapshot.ranks.end(), [](const RankSlices& r) { return r.rank == 0; });
}

// Shards and parts of the snapshot's ranks; the index as well where rank 0 is among them.
void write_into(const std::string& partial, const Snapshot& snapshot, double patience) {
    for (const RankSlices& rank : snapshot.ranks) {
        write_shard(inside(partial, shard_name(rank.rank)), rank.slices);
        write_file(inside(partial, part_name(rank.rank)), part_text(rank));
    }
    if (!holds_first(snapshot)) return;
    write_file(inside(partial, "index.json"),
               index_text(snapshot.state, parts_of_all(partial, snapshot.world, patience)));
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
    const std::string partial = partial_checkpoint(folder, snapshot.state.step, snapshot.run);
    std::error_code error;
    fs::create_directories(partial, error);
    if (error) fail("cannot make the folder {}: {}", partial, error.message());
    failpoint("partial folder made");
    try {
        write_into(partial, snapshot, patience);
    } catch (...) {
        remove_parts(partial, snapshot);
        throw;
    }
    if (!holds_first(snapshot)) return;
    for (int rank = 0; rank < snapshot.world; ++rank) fs::remove(inside(partial, part_name(rank)), error);
    flush_folder(partial);
    fs::remove_all(path, error); // The folder is damaged: runs resume from whole ones, and no step is taken twice.
    failpoint("damaged folder removed");
    fs::rename(partial, path, error);
    if (error) fail("cannot rename {} to {}: {}", partial, path, error.message());
    failpoint("folder renamed");
    flush_folder(folder);
}

} // namespace moe::weights
