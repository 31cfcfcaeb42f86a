// Whole-file reading, atomic writing and the search for the profiles folder, on POSIX calls for exact error reasons.
#include "planner/base/files.hpp"

#include "planner/base/error.hpp"
#include "planner/base/failpoint.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

namespace moe {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

class Descriptor {
public:
    explicit Descriptor(int value) : value_(value) {}
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() {
        if (value_ >= 0) ::close(value_);
    }
    int get() const { return value_; }
    int close() { // 0 or errno: some file systems report a full disk only here
        const int result = ::close(value_) == 0 ? 0 : errno;
        value_ = -1;
        return result;
    }

private:
    int value_;
};

void write_all(int descriptor, std::string_view data, const std::string& path) {
    while (!data.empty()) {
        const ssize_t written = ::write(descriptor, data.data(), data.size());
        if (written < 0 && errno == EINTR) continue;
        if (written < 0) fail("cannot write {}: {}", path, reason(errno));
        data.remove_prefix(static_cast<std::size_t>(written));
    }
}

using Writer = std::function<void(const std::function<void(std::string_view)>&)>;

// Small pieces are gathered, so that a writer may hand over one number at a time.
void write_to(int descriptor, const Writer& write, const std::string& path) {
    constexpr std::size_t full = std::size_t{1} << 18;
    std::string buffer;
    write([&](std::string_view piece) {
        buffer.append(piece);
        if (buffer.size() < full) return;
        write_all(descriptor, buffer, path);
        buffer.clear();
    });
    write_all(descriptor, buffer, path);
}

// Removes the partial file unless it has been renamed to its final name.
struct PartialFile {
    std::string path;
    bool kept = false;
    ~PartialFile() {
        if (!kept) ::unlink(path.c_str());
    }
};

} // namespace

std::string read_file(const std::string& path, std::size_t most) {
    const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (file.get() < 0) refuse("cannot read {}: {}", path, reason(errno));
    struct stat status {};
    if (::fstat(file.get(), &status) == 0 && S_ISDIR(status.st_mode))
        refuse("cannot read {}: {}", path, reason(EISDIR));
    std::string text;
    std::array<char, 1 << 16> block{};
    for (;;) {
        const ssize_t count = ::read(file.get(), block.data(), block.size());
        if (count < 0 && errno == EINTR) continue;
        if (count < 0) refuse("cannot read {}: {}", path, reason(errno));
        if (count == 0) return text;
        text.append(block.data(), static_cast<std::size_t>(count));
        if (text.size() > most) refuse("cannot read {}: it holds more than {} MiB", path, most >> 20);
        constexpr std::size_t endless = std::size_t{1} << 28;
        if (S_ISCHR(status.st_mode) && text.size() > endless) refuse("cannot read {}: it has no end", path);
    }
}

void write_file(const std::string& path, const Writer& write) {
    struct stat status {};
    const bool exists = ::stat(path.c_str(), &status) == 0;
    if (exists && S_ISDIR(status.st_mode)) fail("cannot write {}: {}", path, reason(EISDIR));
    if (exists && !S_ISREG(status.st_mode)) {
        Descriptor device(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
        if (device.get() < 0) fail("cannot write {}: {}", path, reason(errno));
        write_to(device.get(), write, path);
        if (const int error = device.close(); error != 0) fail("cannot write {}: {}", path, reason(error));
        return;
    }
    const std::string partial_path = path + ".partial";
    Descriptor file(::open(partial_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
    if (file.get() < 0) fail("cannot write {}: {}", path, reason(errno));
    PartialFile partial{partial_path};
    write_to(file.get(), write, path);
    failpoint("file written");
    if (::fsync(file.get()) != 0) fail("cannot write {}: {}", path, reason(errno));
    if (const int error = file.close(); error != 0) fail("cannot write {}: {}", path, reason(error));
    failpoint("file flushed");
    if (::rename(partial_path.c_str(), path.c_str()) != 0) fail("cannot write {}: {}", path, reason(errno));
    partial.kept = true;
    failpoint("file renamed");
}

void write_file(const std::string& path, const std::string& content) {
    write_file(path, [&](const std::function<void(std::string_view)>& append) { append(content); });
}

void refuse_overwriting(const std::string& option, const std::string& path, const std::string& other) {
    if (path.empty() || other.empty()) return;
    std::error_code ignored;
    const bool device = std::filesystem::exists(path, ignored) && !std::filesystem::is_regular_file(path, ignored);
    if (!device &&
        std::filesystem::weakly_canonical(path, ignored) == std::filesystem::weakly_canonical(other, ignored))
        refuse("{} {}: would write over {}: choose another name", option, path, other);
}

namespace {

// The file that holds this code: a shared library, such as a Python module, else the executable.
std::filesystem::path this_code() {
    Dl_info symbol;
    void* object = nullptr;
    const auto* here = reinterpret_cast<const void*>(&profiles_folder);
    // The loader's name of the executable itself is empty.
    if (::dladdr1(here, &symbol, &object, RTLD_DL_LINKMAP) != 0 && object != nullptr)
        if (const char* name = static_cast<const link_map*>(object)->l_name; *name != '\0') return name;
    std::error_code error;
    std::filesystem::path executable = std::filesystem::read_symlink("/proc/self/exe", error);
    if (error) fail("cannot find the profiles folder: /proc/self/exe: {}; set MOE_PLAN_PROFILES", error.message());
    return executable;
}

} // namespace

std::string profiles_folder() {
    namespace fs = std::filesystem;
    std::error_code error;
    if (const char* chosen = std::getenv("MOE_PLAN_PROFILES"); chosen != nullptr && *chosen != '\0') {
        if (fs::is_directory(fs::path(chosen) / "models", error)) return chosen;
        refuse("MOE_PLAN_PROFILES = {}: holds no folder \"models\"; point it to the profiles folder of moe-plan",
               chosen);
    }
    const fs::path code = this_code();
    const fs::path installed = code.parent_path() / ".." / "share" / "moe-plan" / "profiles";
    if (fs::is_directory(installed / "models", error)) return installed.lexically_normal().string();
    // Executables and libraries of the build tree lie one to four folders below the project's root.
    fs::path above = code.parent_path();
    for (int level = 0; level < 5; ++level, above = above.parent_path()) {
        if (fs::is_directory(above / "profiles" / "models", error)) return (above / "profiles").string();
    }
    fail("cannot find the profiles folder beside {}: set MOE_PLAN_PROFILES", code.string());
}

} // namespace moe
