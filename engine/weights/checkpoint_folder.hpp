// The folder that a run keeps its checkpoints in: whose it is, what lies there, and whether it can be written.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace moe::weights {

std::string inside(const std::string& folder, const std::string& name); // FOLDER/NAME
std::string checkpoint_name(std::int64_t step);                         // "step-00000012"
// The step of a name that checkpoint_name() gives.
std::optional<std::int64_t> step_of_name(std::string_view name);
// FOLDER/step-00000012.partialRUN, where the processes of a run gather a checkpoint.
std::string partial_checkpoint(const std::string& folder, std::int64_t step, const std::string& run);

// Steps of the checkpoints in a folder, newest first; empty where the folder is missing.
std::vector<std::int64_t> checkpoint_steps(const std::string& folder);
// Removes all checkpoints but the newest `keep`. One that is being removed has no final name any more, so that a run
// which is killed meanwhile leaves no half of it there.
void keep_newest(const std::string& folder, std::size_t keep);
// Refuses to resume from a folder without checkpoints that holds anything else: throws Error (bad_input) naming it.
// A folder that is missing or empty is a run's that has not saved yet.
void refuse_foreign_folder(const std::string& folder);
// Makes the folder, writes a small file there, flushes and removes it. Throws Error (failure) with the reason.
void test_write(const std::string& folder, const std::string& run);
// Throws Error (failure) where the folder's file system says that it has less room than `bytes`; some say nothing.
void require_room(const std::string& folder, double bytes);

// Keeps other runs from a folder while it lives. The system lets go of the lock when its process dies; for file systems
// that keep locks to one machine, FOLDER/lock names host and process, and its time is renewed every few seconds.
class FolderLock {
public:
    static constexpr double renewed = 3.0; // seconds between two renewals

    // Makes the folder. Throws Error (bad_input) naming the owner where another run has it, and Error (failure) where
    // it cannot be made. A lock left by another host is watched for three renewals before it is taken over.
    explicit FolderLock(const std::string& folder);
    ~FolderLock();
    FolderLock(const FolderLock&) = delete;
    FolderLock& operator=(const FolderLock&) = delete;

    // Removes what runs that are gone left beside the final names. Nobody else writes while the lock is held.
    void remove_partial_checkpoints() const;

private:
    void renew();

    std::string folder_;
    int file_ = -1;
    std::mutex mutex_;
    std::condition_variable ended_;
    bool ending_ = false; // mutex_ guards it
    std::thread renewing_;
};

} // namespace moe::weights
