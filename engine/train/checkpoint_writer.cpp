// One thread that writes the last snapshot while the trainer goes on.
#include "engine/train/checkpoint_writer.hpp"

#include "engine/train/trainer.hpp"
#include "planner/base/error.hpp"

#include <utility>

namespace moe::train {

CheckpointWriter::CheckpointWriter(std::string folder, std::string run, int place, Position position, std::size_t keep)
    : folder_(std::move(folder)), position_(std::move(position)), keep_(place == 0 ? keep : 0) {
    weights::test_write(folder_, fmt::format("{}-{}", run, place));
    snapshot_.run = std::move(run);
}

CheckpointWriter::~CheckpointWriter() {
    if (writing_.joinable()) writing_.join();
}

void CheckpointWriter::save(const Trainer& trainer) {
    finish();
    trainer.snapshot(snapshot_);
    if (position_) snapshot_.state.data = position_(snapshot_.state.samples);
    writing_ = std::thread([this] {
        try {
            weights::write_checkpoint(folder_, snapshot_);
            if (keep_ > 0) weights::keep_newest(folder_, keep_);
        } catch (...) {
            failure_ = std::current_exception();
        }
    });
}

void CheckpointWriter::finish() {
    if (!writing_.joinable()) return;
    writing_.join();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    saved_ = snapshot_.state.step;
}

} // namespace moe::train
