// Saves checkpoints beside a run: the snapshot is taken between steps, the writing runs under the steps that follow.
#pragma once

#include "engine/weights/checkpoint.hpp"

#include <cstdint>
#include <exception>
#include <string>
#include <thread>

namespace moe::train {

class Trainer;

class CheckpointWriter {
public:
    // folder: made where it is missing. run: the same for all processes of one run, and no other's.
    CheckpointWriter(std::string folder, std::string run);
    ~CheckpointWriter(); // waits for the checkpoint that is being written
    CheckpointWriter(const CheckpointWriter&) = delete;
    CheckpointWriter& operator=(const CheckpointWriter&) = delete;

    // Takes a snapshot and returns while it is being written; waits first for the one before. Throws Error (failure)
    // when that one could not be written.
    void save(const Trainer& trainer);
    // Waits until the last snapshot is on the disk; throws like save().
    void finish();
    std::int64_t saved_step() const { return saved_; } // step of the last whole checkpoint written here, -1 = none

private:
    std::string folder_;
    weights::Snapshot snapshot_;
    std::thread writing_;
    std::exception_ptr failure_;
    std::int64_t saved_ = -1;
};

} // namespace moe::train
