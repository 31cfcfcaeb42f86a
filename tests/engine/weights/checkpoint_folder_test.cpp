// The folder of checkpoints: one run at a time, whole checkpoints whenever a process ends, nothing foreign resumed.
#include "engine/weights/checkpoint.hpp"
#include "planner/base/failpoint.hpp"
#include "planner/base/files.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/weights/made_snapshot.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <functional>

using namespace moe;

namespace fs = std::filesystem;

namespace {

constexpr int killed = 77;
int left = 0; // failpoints until the process ends

// Runs `act` in a child that ends at its failpoint number `at`, without unwinding; true where it came to its end.
bool survives(int at, const std::function<void()>& act) {
    const pid_t child = ::fork();
    if (child == 0) {
        left = at;
        failpoint_hook = [](const char*) {
            if (left-- == 0) ::_exit(killed);
        };
        try {
            act();
        } catch (...) {
            ::_exit(1);
        }
        ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    REQUIRE(WIFEXITED(status));
    CHECK((WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == killed));
    return WEXITSTATUS(status) == 0;
}

// The first weight of the newest checkpoint, which must be whole.
float newest_weight(const std::string& folder, std::int64_t& step) {
    std::vector<std::string> skipped;
    const auto found = weights::newest_checkpoint(folder, skipped);
    REQUIRE(found);
    CHECK(skipped.empty());
    std::vector<float> values(24);
    found->read("a", weights::StateKind::weight, 0, values);
    for (int i = 0; i < 24; ++i) CHECK(values[static_cast<std::size_t>(i)] == values[0] + static_cast<float>(i));
    step = found->state().step;
    return values[0];
}

void save(const std::string& folder, std::int64_t step, const std::string& run, float base) {
    const weights::FolderLock lock(folder);
    lock.remove_partial_checkpoints();
    weights::test_write(folder, run);
    weights::write_checkpoint(folder, made_snapshot(step, run, base));
}

} // namespace

TEST_CASE("a run that ends at any point of a checkpoint, and the next one at any other, lose nothing that was saved") {
    Folder folder;
    if (const fs::path memory = "/dev/shm"; fs::is_directory(memory)) { // where flushing costs nothing
        fs::remove_all(folder.path);
        folder.path = memory / folder.path.filename();
        fs::create_directories(folder.path);
    }
    int points = 0;
    save(folder / "count", 1, "-0", 0.0f);
    while (!survives(points, [&] { save(folder / "count", 2, "-1", 1.0f); })) ++points;
    MESSAGE(points, " points at which a checkpoint can be cut off");
    CHECK(points > 10);
    for (int first = 0; first <= points; ++first)
        for (int second = 0; second <= points; ++second) {
            CAPTURE(first);
            CAPTURE(second);
            const std::string place = folder / "c";
            fs::remove_all(place);
            save(place, 1, "-0", 10.0f);
            std::int64_t step = 0;
            const bool one = survives(first, [&] { save(place, 2, "-1", 20.0f); });
            const float after_one = newest_weight(place, step);
            CHECK(after_one == (step == 2 ? 20.0f : 10.0f));
            if (one) CHECK(step == 2);
            const std::int64_t before = step;
            const bool two = survives(second, [&] { save(place, 3, "-2", 30.0f); });
            const float after_two = newest_weight(place, step);
            CHECK(step >= before);
            if (two) CHECK(step == 3);
            CHECK(after_two == 10.0f * static_cast<float>(step));
            save(place, 4, "-3", 40.0f);
            CHECK(newest_weight(place, step) == 40.0f);
            for (const auto& entry : fs::directory_iterator(place))
                CHECK_FALSE(mentions(entry.path().filename().string(), "partial"));
        }
}

TEST_CASE("only the newest checkpoints stay, and a run that ends while an old one goes leaves no half of it") {
    const Folder folder;
    const std::string place = folder / "c";
    for (int at = 0;; ++at) {
        CAPTURE(at);
        fs::remove_all(place);
        for (const int step : {1, 2, 3, 10}) save(place, step, "-0", 10.0f * static_cast<float>(step));
        const bool whole = survives(at, [&] { weights::keep_newest(place, 2); });
        const std::vector<std::int64_t> steps = weights::checkpoint_steps(place);
        CHECK(steps.size() == (whole ? 2 : static_cast<std::size_t>(3 - at)));
        CHECK(steps[0] == 10);
        CHECK(steps[1] == 3);
        std::int64_t step = 0;
        CHECK(newest_weight(place, step) == 100.0f);
        weights::keep_newest(place, 5);
        CHECK(weights::checkpoint_steps(place) == steps);
        save(place, 11, "-1", 110.0f);
        for (const auto& entry : fs::directory_iterator(place))
            CHECK_FALSE(mentions(entry.path().filename().string(), "partial"));
        if (whole) break;
        REQUIRE(at < 10);
    }
}

TEST_CASE("one run has a folder; the lock of one that is gone is free at once") {
    const Folder folder;
    {
        const weights::FolderLock lock(folder / "c");
        const std::string said = message([&] { weights::FolderLock second(folder / "c"); });
        CHECK(mentions(said, "another run writes there (host "));
        CHECK(mentions(said, fmt::format("process {}", ::getpid())));
    }
    const weights::FolderLock after(folder / "c");
    CHECK_FALSE(survives(0, [&] {
        const weights::FolderLock lock(folder / "d");
        failpoint("killed with the lock");
    }));
    const weights::FolderLock over(folder / "d");
}

TEST_CASE("the lock of another host counts while it is renewed, and is taken over when it is not") {
    const Folder folder;
    fs::create_directories(folder / "c");
    write_file(folder / "c/lock", "host elsewhere, process 12");
    std::atomic<bool> end{false};
    std::thread renewing([&] {
        while (!end) {
            fs::last_write_time(folder / "c/lock", fs::file_time_type::clock::now());
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
        }
    });
    CHECK(mentions(message([&] { weights::FolderLock lock(folder / "c"); }), "host elsewhere, process 12"));
    end = true;
    renewing.join();
    const weights::FolderLock lock(folder / "c");
    CHECK(mentions(read_file(folder / "c/lock"), fmt::format("process {}", ::getpid())));
}

TEST_CASE("what is no folder of checkpoints is not resumed from") {
    const Folder folder;
    weights::refuse_foreign_folder(folder / "missing");
    fs::create_directories(folder / "c/step-00000009.partial-1");
    write_file(folder / "c/lock", std::string());
    weights::refuse_foreign_folder(folder / "c");
    write_file(folder / "c/__0_0.distcp", "x");
    CHECK(mentions(message([&] { weights::refuse_foreign_folder(folder / "c"); }),
                   "holds __0_0.distcp and no checkpoint of execute"));
    weights::write_checkpoint(folder / "d", made_snapshot(3, "-x"));
    CHECK(mentions(message([&] { weights::refuse_foreign_folder(folder / "d/step-00000003/"); }),
                   "is one checkpoint: give the folder that it lies in"));
}

TEST_CASE("a folder that cannot be written is named before the first step") {
    const Folder folder;
    fs::create_directories(folder / "c/write-test-x"); // as a full disk or missing rights, also for the superuser
    CHECK_THROWS_WITH_AS(weights::test_write(folder / "c", "-x"), doctest::Contains("write-test-x"), Error);
    weights::test_write(folder / "c", "-y");
    CHECK_FALSE(fs::exists(folder / "c/write-test-y"));
}

TEST_CASE("a checkpoint that cannot have room is named before the first step") {
    const Folder folder;
    weights::require_room(folder.path.string(), 1.0);
    weights::require_room("/proc", 1e18); // says nothing of room
    CHECK_THROWS_WITH_AS(weights::require_room(folder.path.string(), 1e18),
                         doctest::Contains("a checkpoint takes 1e+09 GB, but "), Error);
}
