// Windows by NCCL's device API, where the library that was opened has the one that the kernels are compiled with.
#include "kernels/cuda/tokens/nccl_windows.hpp"
#include "engine/backends/cuda/nccl.hpp"
#include "kernels/cuda/check.hpp"
#include "kernels/cuda/cuda_kernels.hpp"
#include "planner/base/error.hpp"

#if __has_include(<nccl_device.h>)
#include <nccl.h>
#include <nccl_device.h>
#define MOE_NCCL_DEVICE NCCL_VERSION_CODE
#else
#define MOE_NCCL_DEVICE 0
#endif

#include <type_traits>

namespace moe::backends {

namespace {

std::string named(int version) {
    return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

#if MOE_NCCL_DEVICE > 0

struct Functions {
    std::string missing; // the first one that the library does not have
    ncclTeam_t (*team_world)(ncclComm_t) = nullptr;
    ncclTeam_t (*team_lsa)(ncclComm_t) = nullptr; // the members that reach each other by loads and stores
    decltype(&ncclMemAlloc) allocate = nullptr;
    decltype(&ncclMemFree) release = nullptr;
    decltype(&ncclCommWindowRegister) open = nullptr;
    decltype(&ncclCommWindowDeregister) close = nullptr;
    decltype(&ncclDevCommCreate) create = nullptr;
    decltype(&ncclDevCommDestroy) destroy = nullptr;
#if MOE_NCCL_DEVICE >= 22907
    decltype(&ncclCommQueryProperties) properties = nullptr;
#endif
};

const Functions& functions() {
    static const Functions all = [] {
        Functions f;
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(nccl_symbol(name));
            if (function == nullptr && f.missing.empty()) f.missing = name;
        };
        find(f.team_world, "ncclTeamWorld");
        find(f.team_lsa, "ncclTeamLsa");
        find(f.allocate, "ncclMemAlloc");
        find(f.release, "ncclMemFree");
        find(f.open, "ncclCommWindowRegister");
        find(f.close, "ncclCommWindowDeregister");
        find(f.create, "ncclDevCommCreate");
        find(f.destroy, "ncclDevCommDestroy");
#if MOE_NCCL_DEVICE >= 22907
        find(f.properties, "ncclCommQueryProperties");
#endif
        return f;
    }();
    return all;
}

// Why the members that loads and stores do not reach cannot be reached over the network; empty where they can.
std::string no_network([[maybe_unused]] ncclComm_t comm, int remote, int members) {
    const std::string who = fmt::format("{} of {} ranks are beyond loads and stores", remote, members);
#if MOE_NCCL_DEVICE >= 22907
    ncclCommProperties_t properties = NCCL_COMM_PROPERTIES_INITIALIZER;
    if (const ncclResult_t status = functions().properties(comm, &properties); status != ncclSuccess)
        return nccl_words(status, comm);
    return properties.ginType == NCCL_GIN_TYPE_NONE ? who + ", and NCCL has no network that a GPU drives" : "";
#else
    return fmt::format("{}, and before 2.29.7 NCCL cannot be asked for a network that a GPU drives", who);
#endif
}

class NcclWindow : public comm::SlotWindow {
public:
    NcclWindow(ncclComm_t comm, std::int64_t slots_bytes, int blocks) : comm_(comm) {
        const ncclTeam_t world = functions().team_world(comm), near = functions().team_lsa(comm);
        first_ = world.rank - near.rank, near_ = near.nRanks;
        group_.members = world.nRanks;
        group_.member = world.rank;
        group_.remote = world.nRanks - near_;
        group_.blocks = blocks;
        group_.window_bytes = cuda_exchange_kernels().window_bytes(world.nRanks, slots_bytes, group_.remote > 0);
    }
    ~NcclWindow() override {
        if (window_ != nullptr) functions().close(comm_, window_);
        if (created_) functions().destroy(comm_, &device_);
        if (group_.own != nullptr) functions().release(group_.own);
        cudaFree(reached_);
    }
    NcclWindow(const NcclWindow&) = delete;
    NcclWindow& operator=(const NcclWindow&) = delete;

    // What stands against it here; empty: its memory is there.
    std::string take_memory() {
        if (group_.remote > 0)
            if (std::string why = no_network(comm_, group_.remote, group_.members); !why.empty()) return why;
        void* memory = nullptr;
        const ncclResult_t status = functions().allocate(&memory, static_cast<std::size_t>(group_.window_bytes));
        if (status != ncclSuccess) {
            cudaGetLastError(); // The next launch's check must not find it.
            return fmt::format("{:.2f} GiB for windows: {}", static_cast<double>(group_.window_bytes) / (1 << 30),
                               nccl_words(status));
        }
        group_.own = static_cast<char*>(memory);
        CUDA_CHECK(cudaMemset(group_.own, 0, static_cast<std::size_t>(group_.window_bytes)));
        CUDA_CHECK(
            cudaMalloc(reinterpret_cast<void**>(&reached_), sizeof(char*) * static_cast<std::size_t>(group_.members)));
        CUDA_CHECK(cudaStreamSynchronize(nullptr));
        group_.reached = reached_;
        return "";
    }

    // The device communicator comes first: where the members have no symmetric memory it says so, and a registration
    // would not.
    std::string open() override {
#if MOE_NCCL_DEVICE >= 22902
        ncclDevCommRequirements requirements = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
#else
        ncclDevCommRequirements requirements{};
#endif
#if MOE_NCCL_DEVICE >= 22907
        if (group_.remote > 0) {
            requirements.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
            requirements.ginSignalCount = nccl_exchange_signals(group_.blocks);
        }
#endif
        ncclResult_t status = functions().create(comm_, &requirements, &device_);
        if (status != ncclSuccess) return nccl_words(status, comm_);
        created_ = true;
        status = functions().open(comm_, group_.own, static_cast<std::size_t>(group_.window_bytes), &window_,
                                  NCCL_WIN_COLL_SYMMETRIC);
        if (status != ncclSuccess) return nccl_words(status, comm_);
        if (window_ == nullptr) return "NCCL registers no windows here";
        end_ = {window_, &device_};
        if (group_.remote > 0) group_.library = &end_;
        nccl_reached_windows(window_, first_, near_, group_.members, reached_);
        return "";
    }

    SlotGroup group() const override { return group_; }
    const ExchangeKernels& kernels() const override { return cuda_exchange_kernels(); }
    std::string name() const override {
        return named(nccl_version()) + "'s device API" +
               (group_.remote > 0 ? fmt::format(", {} of {} ranks over its network", group_.remote, group_.members)
                                  : "");
    }

private:
    ncclComm_t comm_;
    SlotGroup group_;
    int first_ = 0, near_ = 1; // the members that loads and stores reach
    ncclDevComm device_{};
    bool created_ = false;
    ncclWindow_t window_ = nullptr;
    char** reached_ = nullptr;
    NcclEnd end_;
};

#endif

} // namespace

// The device functions are inlined into the kernels and know what the library's structures look like, which differs
// from one minor version to the next.
std::unique_ptr<comm::SlotWindow> nccl_slot_window([[maybe_unused]] void* member,
                                                   [[maybe_unused]] std::int64_t slots_bytes,
                                                   [[maybe_unused]] int blocks, std::string& why) {
    const int compiled = nccl_device_version(), loaded = nccl_version();
    if (compiled == 0) {
        why = "this program was compiled without NCCL's device API";
        return nullptr;
    }
    if (loaded / 100 != compiled / 100 || loaded < compiled) {
        why = fmt::format("{} was opened, and the kernels are compiled with the device API of {}", named(loaded),
                          named(compiled));
        return nullptr;
    }
#if MOE_NCCL_DEVICE > 0
    if (!functions().missing.empty()) {
        why = named(loaded) + " has no " + functions().missing;
        return nullptr;
    }
    auto window = std::make_unique<NcclWindow>(static_cast<ncclComm_t>(member), slots_bytes, blocks);
    why = window->take_memory();
    if (why.empty()) return window;
#endif
    return nullptr;
}

} // namespace moe::backends
