// Names, owners and contents of a folder of checkpoints.
#include "engine/weights/checkpoint_folder.hpp"

#include "planner/base/error.hpp"
#include "planner/base/failpoint.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <system_error>

namespace moe::weights {

namespace {

namespace fs = std::filesystem;

constexpr const char* lock_name = "lock";
constexpr std::string_view partial_mark = ".partial", probe_name = "write-test";

bool is_partial(const std::string& name) {
    const std::size_t mark = name.find(partial_mark);
    return mark != std::string::npos && step_of_name(std::string_view(name).substr(0, mark)).has_value();
}

std::vector<std::string> names_in(const std::string& folder) {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
        names.push_back(entry->path().filename().string());
    std::sort(names.begin(), names.end());
    return names;
}

void make_folder(const std::string& folder) {
    std::error_code error;
    fs::create_directories(folder, error);
    if (error || !fs::is_directory(folder)) fail("cannot make the folder {}: {}", folder, error.message());
}

std::string host_name() {
    std::array<char, 256> name{};
    ::gethostname(name.data(), name.size() - 1);
    return name.data();
}

std::string text_of(int file) {
    std::array<char, 512> text{};
    const ssize_t count = ::pread(file, text.data(), text.size(), 0);
    return {text.data(), static_cast<std::size_t>(std::max<ssize_t>(count, 0))};
}

// Nanoseconds.
std::int64_t time_of(int file) {
    struct stat status {};
    ::fstat(file, &status);
    return std::int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec;
}

[[noreturn]] void refuse_owner(const std::string& folder, const std::string& owner) {
    refuse("{}: another run writes there ({}): wait for its end, or choose another folder", folder,
           owner.empty() ? "which has not said its name" : shown(owner));
}

} // namespace

std::string inside(const std::string& folder, const std::string& name) { return (fs::path(folder) / name).string(); }

std::string checkpoint_name(std::int64_t step) { return fmt::format("step-{:08}", step); }

std::optional<std::int64_t> step_of_name(std::string_view name) {
    constexpr std::string_view start = "step-";
    if (!name.starts_with(start)) return {};
    std::int64_t step = 0;
    const auto [end, fault] = std::from_chars(name.data() + start.size(), name.data() + name.size(), step);
    if (fault != std::errc() || end != name.data() + name.size() || name != checkpoint_name(step)) return {};
    return step;
}

std::string partial_checkpoint(const std::string& folder, std::int64_t step, const std::string& run) {
    return inside(folder, fmt::format("{}{}{}", checkpoint_name(step), partial_mark, run));
}

std::vector<std::int64_t> checkpoint_steps(const std::string& folder) {
    std::vector<std::int64_t> steps;
    for (const std::string& name : names_in(folder))
        if (const std::optional<std::int64_t> step = step_of_name(name)) steps.push_back(*step);
    std::sort(steps.rbegin(), steps.rend());
    return steps;
}

void keep_newest(const std::string& folder, std::size_t keep) {
    const std::vector<std::int64_t> steps = checkpoint_steps(folder);
    for (std::size_t i = keep; i < steps.size(); ++i) {
        const std::string path = inside(folder, checkpoint_name(steps[i])),
                          leaving = partial_checkpoint(folder, steps[i], "-removed");
        std::error_code error;
        fs::rename(path, leaving, error);
        failpoint("old checkpoint renamed");
        if (!error) fs::remove_all(leaving, error);
        if (error) fail("cannot remove {}: {}", path, error.message());
    }
}

void refuse_foreign_folder(const std::string& folder) {
    for (const std::string& name : names_in(folder)) {
        const fs::path whole = fs::absolute(folder).lexically_normal();
        if (name == "index.json" &&
            step_of_name((whole.has_filename() ? whole : whole.parent_path()).filename().string()))
            refuse("--resume: {} is one checkpoint: give the folder that it lies in", folder);
        if (name == lock_name || is_partial(name) || std::string_view(name).starts_with(probe_name)) continue;
        refuse(
            "--resume: {} holds {} and no checkpoint of execute: give the folder of an earlier execute --checkpoint, "
            "or an empty one to start from step 0",
            folder, shown(name));
    }
}

void test_write(const std::string& folder, const std::string& run) {
    make_folder(folder);
    const std::string path = inside(folder, fmt::format("{}{}", probe_name, run));
    write_file(path, "Written and removed before the first step.\n");
    std::error_code error;
    fs::remove(path, error);
    if (error) fail("cannot remove {}: {}", path, error.message());
}

void require_room(const std::string& folder, double bytes) {
    struct statvfs system {};
    if (::statvfs(folder.c_str(), &system) != 0 || system.f_blocks == 0) return;
    const double room = static_cast<double>(system.f_bavail) * static_cast<double>(system.f_frsize);
    if (room < bytes)
        fail("{}: a checkpoint takes {:.3g} GB, but {:.3g} GB are free: make room, or choose another folder", folder,
             bytes / 1e9, room / 1e9);
}

FolderLock::FolderLock(const std::string& folder) : folder_(folder) {
    make_folder(folder);
    const std::string path = inside(folder, lock_name);
    file_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (file_ < 0) fail("cannot write {}: {}", path, std::generic_category().message(errno));
    const bool taken = ::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    const std::string before = text_of(file_), host = host_name();
    const std::int64_t time = time_of(file_);
    bool lives = taken;
    // A host that died cannot say so: its lock is no longer renewed.
    if (!taken && !before.empty() && before.find("host " + host + ",") == std::string::npos) {
        const auto wait = std::chrono::duration<double>(3 * renewed);
        const auto end = std::chrono::steady_clock::now() + wait;
        while (!(lives = time_of(file_) != time) && std::chrono::steady_clock::now() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    if (lives) {
        ::close(file_);
        refuse_owner(folder, before);
    }
    const std::string owner = fmt::format("host {}, process {}", host, ::getpid());
    if (::ftruncate(file_, 0) != 0 || ::pwrite(file_, owner.data(), owner.size(), 0) < 0) {
        const int error = errno;
        ::close(file_);
        fail("cannot write {}: {}", path, std::generic_category().message(error));
    }
    renewing_ = std::thread([this] { renew(); });
}

FolderLock::~FolderLock() {
    {
        const std::lock_guard<std::mutex> held(mutex_);
        ending_ = true;
    }
    ended_.notify_all();
    renewing_.join();
    // Where that fails the owner stays named: whoever comes next watches the lock first.
    [[maybe_unused]] const int left = ::ftruncate(file_, 0);
    ::close(file_);
}

void FolderLock::renew() {
    std::unique_lock<std::mutex> held(mutex_);
    while (!ending_) {
        ::futimens(file_, nullptr);
        ended_.wait_for(held, std::chrono::duration<double>(renewed), [this] { return ending_; });
    }
}

void FolderLock::remove_partial_checkpoints() const {
    std::error_code error;
    for (const std::string& name : names_in(folder_))
        if (is_partial(name) || std::string_view(name).starts_with(probe_name))
            fs::remove_all(inside(folder_, name), error);
}

} // namespace moe::weights
