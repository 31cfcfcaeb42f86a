// Saves checkpoints beside a run: the snapshot is taken between steps, the writing runs under the steps that follow.
#pragma once

#include "engine/weights/checkpoint.hpp"

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <thread>

namespace moe::train {

class Trainer;

class CheckpointWriter {
public:
    // The position of the data when that sample is the next.
    using Position = std::function<data::DataPosition(std::int64_t sample)>;

    // folder: made where it is missing, and test-written: throws Error (failure) where that fails. run: the same for
    // all processes of one run, and no other's. place: another for each of them. position: none for data without one.
    // keep: checkpoints that stay in the folder, 0 = all; the process of place 0 removes older ones behind each save.
    CheckpointWriter(std::string folder, std::string run, int place = 0, Position position = {}, std::size_t keep = 0);
    ~CheckpointWriter(); // waits for the checkpoint that is being written
    CheckpointWriter(const CheckpointWriter&) = delete;
    CheckpointWriter& operator=(const CheckpointWriter&) = delete;

    // Takes a snapshot and returns while it is being written; waits first for the one before. Throws Error (failure)
    // when that one could not be written.
    void save(const Trainer& trainer);
    // Waits until the last snapshot is on the disk; throws like save().
    void finish();
    const std::string& folder() const { return folder_; }
    std::int64_t saved_step() const { return saved_; } // step of the last whole checkpoint written here, -1 = none

private:
    std::string folder_;
    Position position_;
    std::size_t keep_ = 0; // 0: all, or another process removes
    weights::Snapshot snapshot_;
    std::thread writing_;
    std::exception_ptr failure_;
    std::int64_t saved_ = -1;
};

} // namespace moe::train
