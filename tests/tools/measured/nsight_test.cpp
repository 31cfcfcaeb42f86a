// Exports of Nsight Systems: databases that this test makes with the exporter's own schema, and what is refused.
//
// Schema: that of `nsys export --type sqlite` of Nsight Systems 2024 and 2025, as their exports print it under .schema.
#include "planner/base/error.hpp"
#include "tests/support/folder.hpp"
#include "tests/support/nearly.hpp"
#include "tools/measured/nsight.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>
#include <sqlite3.h>

#include <fstream>

using namespace moe;
using namespace moe::tools;

namespace {

const char* schema = R"(
CREATE TABLE StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE TARGET_INFO_GPU (vmId INTEGER NOT NULL, id INTEGER NOT NULL, name TEXT, busLocation TEXT, isDiscrete INTEGER,
    l2CacheSize INTEGER, totalMemory INTEGER, memoryBandwidth INTEGER, clockRate INTEGER, smCount INTEGER, chipName TEXT);
CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL,
    globalTid INTEGER, correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL, callchainId INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    demangledName INTEGER NOT NULL, shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER,
    registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL,
    blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL,
    dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL,
    gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    bytes INTEGER NOT NULL, copyKind INTEGER NOT NULL, deprecatedSrcId INTEGER, srcKind INTEGER, dstKind INTEGER,
    srcDeviceId INTEGER, srcContextId INTEGER, dstDeviceId INTEGER, dstContextId INTEGER, migrationCause INTEGER,
    graphNodeId INTEGER, virtualAddress INTEGER);
CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL,
    contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER,
    value INTEGER NOT NULL, bytes INTEGER NOT NULL, graphNodeId INTEGER, memKind INTEGER);
CREATE TABLE NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER,
    color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER,
    uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, int32Value INTEGER, floatValue REAL,
    jsonTextId INTEGER, jsonText TEXT);
)";

class Database {
public:
    explicit Database(const std::string& path) { REQUIRE(sqlite3_open(path.c_str(), &handle_) == SQLITE_OK); }
    ~Database() { sqlite3_close(handle_); }
    void run(const std::string& sql) {
        char* words = nullptr;
        const int state = sqlite3_exec(handle_, sql.c_str(), nullptr, nullptr, &words);
        REQUIRE_MESSAGE(state == SQLITE_OK, words);
    }
    // Nanoseconds; process: a number below 2^24.
    void kernel(long start, long end, int device, int stream, int correlation, int process, int name) {
        run(fmt::format(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ({}, {}, {}, 1, NULL, {}, {}, {}, {}, {}, {}, NULL, "
            "NULL, 32, 1, 1, 1, 128, 1, 1, 0, 0, 0, 0, 1, NULL, NULL, NULL)",
            start, end, device, stream, correlation, long(process) << 24, name, name, name));
    }
    void launch(long start, int correlation, int process) {
        run(fmt::format("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES ({}, {}, 0, {}, {}, 9, 0, NULL)", start,
                        start + 10, (long(process) << 24) + 5, correlation));
    }

private:
    sqlite3* handle_ = nullptr;
};

// Two processes with a GPU each, two steps of 1000 ns on the host.
void make_export(const std::string& path) {
    Database d(path);
    d.run(schema);
    d.run("INSERT INTO StringIds VALUES (1, 'nvjet_tst_128x256'), (2, "
          "'ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)'), "
          "(3, 'ProfilerStep#7'), (9, 'cudaLaunchKernel_v7000')");
    d.run("INSERT INTO TARGET_INFO_GPU (vmId, id, name, totalMemory) VALUES (0, 0, 'NVIDIA H200', 151397597184)");
    d.run("INSERT INTO NVTX_EVENTS (start, end, eventType, text) VALUES (1000, 2000, 59, 'ProfilerStep#6'), "
          "(1005, 2005, 59, 'ProfilerStep#6'), (500, 600, 59, 'other'), (700, NULL, 34, 'ProfilerStep#9')");
    d.run("INSERT INTO NVTX_EVENTS (start, end, eventType, textId) VALUES (2000, 3000, 59, 3)");
    for (const int process : {11, 12}) {
        // The two processes use the same correlations.
        for (const int step : {0, 1}) {
            d.launch(1100 + 1000 * step, 50 + step, process);
            d.launch(1200 + 1000 * step, 60 + step, process);
            d.kernel(1500 + 1000 * step, 1900 + 1000 * step, 0, 7, 50 + step, process, 1);
            d.kernel(1600 + 1000 * step, 2000 + 1000 * step, 0, 20, 60 + step, process, 2);
        }
    }
    d.run(
        fmt::format("INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, contextId, streamId, correlationId, "
                    "globalPid, bytes, copyKind) VALUES (2950, 2990, 0, 1, 7, 999, {}, 64, 2)",
                    11L << 24));
    d.run(fmt::format(
        "INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET (start, end, deviceId, contextId, streamId, globalPid, value, "
        "bytes) VALUES (100, 110, 0, 1, 7, {}, 0, 64)",
        11L << 24));
}

void check_refused(const std::string& path, const std::string& words) {
    try {
        read_nsight_file(path);
        FAIL("accepted: " << path);
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        CHECK_MESSAGE(std::string(error.what()).find(words) != std::string::npos, error.what());
        CHECK(std::string(error.what()).find(path) != std::string::npos);
    }
}

} // namespace

TEST_CASE("Nsight: kernels, copies and fills of two processes, their launches, and NVTX steps") {
    const Folder folder;
    make_export(folder / "a.sqlite");
    const DeviceProfile profile = read_nsight_file(folder / "a.sqlite");
    CHECK(profile.source == "Nsight Systems");
    CHECK(profile.gpu == "NVIDIA H200");
    CHECK(profile.gpu_gib == 141.0);
    CHECK(profile.devices == std::vector<std::string>{"0 of process 11", "0 of process 12"});
    CHECK(profile.events.size() == 10);
    CHECK(profile.launches.size() == 8);
    REQUIRE(profile.windows.size() == 2); // The first of several processes counts; ranges without end are none.
    CHECK(profile.windows[1].number == 7);

    const ProfiledSteps steps = steps_of(profile, 0, "a");
    CHECK(steps.steps.size() == 2);
    CHECK(steps.outside == 1); // The fill runs before the first step.
    CHECK(steps.events.size() == 9);
    CHECK(steps.steps[0].seconds == nearly(1000e-9));
    CHECK(steps.steps[1].seconds == nearly((500e-9 + 500e-9) / 2));
    std::vector<std::string> names;
    for (const EventName& name : profile.names) names.push_back(name.kernel);
    CHECK(names == std::vector<std::string>{"nvjet_tst_128x256", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)",
                                            "Memcpy DtoH", "Memset"});
}

TEST_CASE("Nsight: an export without NVTX, calls and processes is read all the same") {
    const Folder folder;
    {
        Database d(folder / "old.sqlite"); // Files of 2020 have no globalPid.
        d.run("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);"
              "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT NOT NULL, end INT NOT NULL, deviceId INT NOT NULL, "
              "streamId INT NOT NULL, correlationId INT NOT NULL, demangledName INT NOT NULL);"
              "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 30, 2, 7, 1, 4)");
    }
    const DeviceProfile profile = read_nsight_file(folder / "old.sqlite");
    REQUIRE(profile.events.size() == 1);
    CHECK(profile.names[0].kernel == "(no name)");
    CHECK(steps_of(profile, 1, "a").seconds == nearly(20e-9));
    CHECK_THROWS_WITH_AS(steps_of(profile, 0, "a"), doctest::Contains("--steps"), Error);
}

TEST_CASE("Nsight: a graph that was recorded as a whole") {
    const Folder folder;
    {
        Database d(folder / "g.sqlite");
        d.run("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);"
              "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId "
              "INTEGER "
              "NOT NULL, contextId INTEGER NOT NULL, greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId "
              "INTEGER, "
              "globalPid INTEGER, graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL);"
              "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (10, 30, 0, 1, NULL, 7, 1, 0, 1, 1)");
    }
    CHECK(read_nsight_file(folder / "g.sqlite").names.at(0).kernel == "(CUDA graph as a whole)");
}

TEST_CASE("Nsight: what is refused, in one line") {
    const Folder folder;
    check_refused(folder / "none.sqlite", "not a file");
    check_refused(folder.path.string(), "not a file");
    std::ofstream(folder / "text.sqlite") << "SQLite format 3 is not all that it takes";
    check_refused(folder / "text.sqlite", "not a database");
    const auto database = [&](const std::string& sql) {
        std::string path = folder / "case.sqlite";
        std::filesystem::remove(path);
        Database d(path);
        d.run(sql);
        return path;
    };
    const std::string strings = "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);";
    const std::string kernels =
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, demangledName);";
    check_refused(database("CREATE TABLE a (b)"), "no table CUPTI_ACTIVITY_KIND_KERNEL");
    check_refused(database(strings), "no table CUPTI_ACTIVITY_KIND_KERNEL");
    check_refused(database(strings + "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end)"), "has no column deviceId");
    check_refused(database(strings + kernels + "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES ('x', 1, 0, 7, 1)"),
                  "start is no number");
    check_refused(database(strings + kernels + "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 1, 0, 7, 1)"),
                  "ends at 1 ns");
    // A view could hold any query: only tables are read.
    check_refused(database(strings +
                           "CREATE TABLE k (a); CREATE VIEW CUPTI_ACTIVITY_KIND_KERNEL AS SELECT a AS start, a AS "
                           "end, a AS deviceId, a AS streamId, a AS demangledName FROM k"),
                  "no table CUPTI_ACTIVITY_KIND_KERNEL");
    make_export(folder / "whole.sqlite");
    std::filesystem::resize_file(folder / "whole.sqlite", 4096 * 3);
    check_refused(folder / "whole.sqlite", "whole.sqlite");
    CHECK(is_sqlite(std::string_view("SQLite format 3\0 and more", 25)));
    CHECK_FALSE(is_sqlite("SQLite format"));
}
