// Files: whole reads, atomic writes that leave nothing half-written, and the reasons in the error lines.
#include "planner/base/files.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <sys/resource.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace fs = std::filesystem;

namespace {

std::ptrdiff_t entries(const Folder& folder) {
    return std::distance(fs::directory_iterator(folder.path), fs::directory_iterator());
}

// Lets no file grow beyond `bytes`: what a full disk looks like to a writer.
struct SmallDisk {
    rlimit before{};
    void (*handler)(int);
    explicit SmallDisk(rlim_t bytes) : handler(std::signal(SIGXFSZ, SIG_IGN)) {
        REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
        rlimit now = before;
        now.rlim_cur = bytes;
        REQUIRE(::setrlimit(RLIMIT_FSIZE, &now) == 0);
    }
    SmallDisk(const SmallDisk&) = delete;
    SmallDisk& operator=(const SmallDisk&) = delete;
    ~SmallDisk() {
        ::setrlimit(RLIMIT_FSIZE, &before);
        std::signal(SIGXFSZ, handler);
    }
};

// Sets an environment variable for one scope.
struct Environment {
    const char* name;
    std::string before;
    bool was_set;
    Environment(const char* key, const std::string& value) : name(key), was_set(std::getenv(key) != nullptr) {
        if (was_set) before = std::getenv(key);
        ::setenv(key, value.c_str(), 1);
    }
    Environment(const Environment&) = delete;
    Environment& operator=(const Environment&) = delete;
    ~Environment() {
        if (was_set)
            ::setenv(name, before.c_str(), 1);
        else
            ::unsetenv(name);
    }
};

} // namespace

TEST_CASE("what is written is read back, whole and under the final name only") {
    const Folder folder;
    std::string content;
    for (int i = 0; i < 100000; ++i) content += std::to_string(i) + '\n';
    content += std::string("\0binary", 7);
    moe::write_file(folder / "a.json", [&](const auto& append) {
        const std::string_view all = content;
        for (std::size_t at = 0; at < all.size(); at += 1000) append(all.substr(at, 1000));
    });
    CHECK(moe::read_file(folder / "a.json") == content);
    CHECK(entries(folder) == 1);
    moe::write_file(folder / "a.json", "short");
    CHECK(moe::read_file(folder / "a.json") == "short");
    CHECK(entries(folder) == 1);
}

TEST_CASE("a failing writer leaves the old file and no partial one") {
    const Folder folder;
    moe::write_file(folder / "a.json", "old");
    CHECK_THROWS_AS(moe::write_file(folder / "a.json",
                                    [](const auto& append) {
                                        append(std::string(1 << 20, 'x'));
                                        throw std::runtime_error("no more");
                                    }),
                    std::runtime_error);
    CHECK(moe::read_file(folder / "a.json") == "old");
    CHECK(entries(folder) == 1);
}

TEST_CASE("a full disk is one line with exit status 1 and leaves nothing behind") {
    CHECK(fault_of([] { moe::write_file("/dev/full", "data"); }) ==
          "1: cannot write /dev/full: No space left on device");
    const Folder folder;
    std::string fault;
    {
        const SmallDisk disk(1 << 16);
        fault = fault_of([&] { moe::write_file(folder / "trace.json", std::string(1 << 20, 'x')); });
    }
    CHECK(fault == "1: cannot write " + (folder / "trace.json") + ": File too large");
    CHECK(entries(folder) == 0);
}

TEST_CASE("paths that cannot be read or written are named with the reason") {
    const Folder folder;
    const std::string here = folder.path.string();
    CHECK(fault_of([&] { moe::read_file(here); }) == "2: cannot read " + here + ": Is a directory");
    CHECK(fault_of([&] { moe::read_file(folder / "none"); }) ==
          "2: cannot read " + (folder / "none") + ": No such file or directory");
    CHECK(fault_of([&] { moe::write_file(here, "x"); }) == "1: cannot write " + here + ": Is a directory");
    CHECK(fault_of([&] { moe::write_file(folder / "no/such/file", "x"); }) ==
          "1: cannot write " + folder / "no/such/file" + ": No such file or directory");
}

TEST_CASE("the profiles folder is found beside the build tree or where MOE_PLAN_PROFILES points") {
    const fs::path found = moe::profiles_folder();
    CHECK(fs::exists(found / "models" / "DeepSeek-V3.json"));
    const Folder folder;
    {
        const Environment chosen("MOE_PLAN_PROFILES", folder.path.string());
        const std::string fault = fault_of([] { moe::profiles_folder(); });
        CHECK(fault.starts_with("2: MOE_PLAN_PROFILES = " + folder.path.string()));
    }
    fs::create_directory(folder.path / "models");
    const Environment chosen("MOE_PLAN_PROFILES", folder.path.string());
    CHECK(moe::profiles_folder() == folder.path.string());
}
