// NCCL as the library of collectives: opened when several GPUs are asked for, so that builds run where it is missing.
#include "engine/backends/cuda/nccl.hpp"

#include "engine/backends/cuda/backend.hpp"
#include "planner/base/error.hpp"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <nccl.h>

#include <cstdlib>
#include <cstring>
#include <type_traits>

namespace moe::backends {

namespace {

struct Functions {
    std::string missing; // reason why there is no library
    void* file = nullptr;
    decltype(&ncclGetVersion) version = nullptr;
    decltype(&ncclGetUniqueId) unique_id = nullptr;
    decltype(&ncclCommInitRankConfig) init = nullptr;
    decltype(&ncclCommDestroy) destroy = nullptr;
    decltype(&ncclCommAbort) abort = nullptr;
    decltype(&ncclCommGetAsyncError) async_error = nullptr;
    decltype(&ncclGetErrorString) error_string = nullptr;
    decltype(&ncclGetLastError) last_error = nullptr;
    decltype(&ncclGroupStart) group_start = nullptr;
    decltype(&ncclGroupEnd) group_end = nullptr;
    decltype(&ncclAllGather) all_gather = nullptr;
    decltype(&ncclReduceScatter) reduce_scatter = nullptr;
    decltype(&ncclAllReduce) all_reduce = nullptr;
    decltype(&ncclSend) send = nullptr;
    decltype(&ncclRecv) recv = nullptr;
};

// Sets what NCCL reads from the environment when it is first used. Variables that the user has set stay.
void set_environment() {
    const std::pair<const char*, const char*> wanted[] = {
        // NVLink multicast: reductions in the switch are not reproducible from one machine to the next, and a process
        // that dies while it holds a multicast group can take the GPUs of a shared host out of service.
        {"NCCL_NVLS_ENABLE", "0"},
        // Connections when a communicator is made, not inside the first step or its capture.
        {"NCCL_RUNTIME_CONNECT", "0"},
        // A captured graph needs no buffers registered: registration would make ranks wait for each other on the host.
        {"NCCL_GRAPH_REGISTER", "0"},
        // A communicator never has two launches under way: a step is one graph, and the host waits for its end before
        // anything else. Else every captured collective records an event for those that might come from elsewhere:
        // 637 of them took 10 ms of a step of 109 on four H200, and 130 MiB of the graph.
        {"NCCL_GRAPH_MIXING_SUPPORT", "0"},
    };
    for (const auto& [name, value] : wanted) ::setenv(name, value, 0);
}

Functions open_library() {
    Functions f;
    set_environment();
    for (const char* name : {"libnccl.so.2", "/usr/local/cuda/lib64/libnccl.so.2"})
        if (f.file == nullptr) f.file = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (f.file == nullptr) {
        f.missing = "libnccl.so.2 was not found (set LD_LIBRARY_PATH to its folder)";
        return f;
    }
    const auto find = [&](auto& function, const char* name) {
        function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(f.file, name));
        if (function == nullptr) f.missing = fmt::format("libnccl.so.2 has no {}: it is too old", name);
    };
    find(f.version, "ncclGetVersion");
    find(f.unique_id, "ncclGetUniqueId");
    find(f.init, "ncclCommInitRankConfig");
    find(f.destroy, "ncclCommDestroy");
    find(f.abort, "ncclCommAbort");
    find(f.async_error, "ncclCommGetAsyncError");
    find(f.error_string, "ncclGetErrorString");
    find(f.last_error, "ncclGetLastError");
    find(f.group_start, "ncclGroupStart");
    find(f.group_end, "ncclGroupEnd");
    find(f.all_gather, "ncclAllGather");
    find(f.reduce_scatter, "ncclReduceScatter");
    find(f.all_reduce, "ncclAllReduce");
    find(f.send, "ncclSend");
    find(f.recv, "ncclRecv");
    return f;
}

const Functions& nccl() {
    static const Functions functions = open_library();
    return functions;
}

std::string words(ncclResult_t status, ncclComm_t member) {
    const char* more = nccl().last_error(member);
    const bool says = more != nullptr && *more != '\0';
    return fmt::format("{}{}{}", nccl().error_string(status), says ? ": " : "", says ? more : "");
}

void check(ncclResult_t status, const char* what, void* member = nullptr) {
    if (status != ncclSuccess) fail("NCCL: {}: {}", what, words(status, static_cast<ncclComm_t>(member)));
}

ncclDataType_t type_of(program::Dtype dtype) {
    if (dtype == program::Dtype::f32) return ncclFloat32;
    if (dtype == program::Dtype::bf16) return ncclBfloat16;
    fail("a sum of {} values over ranks is not defined: use f32 or bf16", program::to_string(dtype));
}

ncclComm_t comm(void* member) { return static_cast<ncclComm_t>(member); }
cudaStream_t queued(void* stream) { return static_cast<cudaStream_t>(stream); }
std::size_t count(std::int64_t n) { return static_cast<std::size_t>(n); }

comm::MeetingPoint meeting_point() {
    ncclUniqueId id;
    static_assert(sizeof id == sizeof(comm::MeetingPoint));
    check(nccl().unique_id(&id), "making an id");
    comm::MeetingPoint point;
    std::memcpy(point.data(), &id, sizeof id);
    return point;
}

void* join(const comm::MeetingPoint& point, int members, int index, int blocks) {
    ncclUniqueId id;
    std::memcpy(&id, point.data(), sizeof id);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    if (blocks > 0) config.maxCTAs = blocks;
    ncclComm_t made = nullptr;
    check(nccl().init(&made, members, id, index, &config), "joining a communicator");
    return made;
}

void leave(void* member) { check(nccl().destroy(comm(member)), "leaving a communicator"); }
void abandon(void* member) { nccl().abort(comm(member)); }

std::string trouble(void* member) {
    ncclResult_t state = ncclSuccess;
    const ncclResult_t status = nccl().async_error(comm(member), &state);
    if (status != ncclSuccess) state = status;
    if (state == ncclSuccess || state == ncclInProgress) return "";
    return "NCCL: " + words(state, comm(member));
}

void all_gather(void* member, const void* x, void* y, std::int64_t bytes, void* stream) {
    check(nccl().all_gather(x, y, count(bytes), ncclInt8, comm(member), queued(stream)), "all_gather", member);
}
void reduce_scatter(void* member, const void* x, void* y, std::int64_t elements, program::Dtype dtype, void* stream) {
    check(nccl().reduce_scatter(x, y, count(elements), type_of(dtype), ncclSum, comm(member), queued(stream)),
          "reduce_scatter", member);
}
void all_reduce(void* member, const void* x, void* y, std::int64_t elements, program::Dtype dtype, bool max,
                void* stream) {
    check(
        nccl().all_reduce(x, y, count(elements), type_of(dtype), max ? ncclMax : ncclSum, comm(member), queued(stream)),
        "all_reduce", member);
}
void begin_group() { check(nccl().group_start(), "beginning a group"); }
void end_group() { check(nccl().group_end(), "a group of messages"); }
void send(void* member, const void* x, std::int64_t bytes, int to, void* stream) {
    check(nccl().send(x, count(bytes), ncclInt8, to, comm(member), queued(stream)), "send", member);
}
void recv(void* member, void* y, std::int64_t bytes, int from, void* stream) {
    check(nccl().recv(y, count(bytes), ncclInt8, from, comm(member), queued(stream)), "recv", member);
}

void copy(void* to, const void* from, std::int64_t bytes, void* stream) {
    const cudaError_t status = cudaMemcpyAsync(to, from, count(bytes), cudaMemcpyDeviceToDevice, queued(stream));
    if (status != cudaSuccess) fail("cuda: copying on the GPU: {}", cudaGetErrorString(status));
}

} // namespace

void* nccl_symbol(const char* name) { return ::dlsym(nccl().file, name); }

int nccl_version() {
    int version = 0;
    check(nccl().version(&version), "asking for its version");
    return version;
}

std::string nccl_words(int status, void* member) { return words(static_cast<ncclResult_t>(status), comm(member)); }

const comm::CollectiveLibrary& nccl_library() {
    static const comm::CollectiveLibrary library{meeting_point, join,           leave,      abandon,         trouble,
                                                 all_gather,    reduce_scatter, all_reduce, begin_group,     end_group,
                                                 send,          recv,           copy,       nccl_slot_window};
    if (!nccl().missing.empty()) refuse("--backend cuda over several GPUs: {}", nccl().missing);
    return library;
}

} // namespace moe::backends
