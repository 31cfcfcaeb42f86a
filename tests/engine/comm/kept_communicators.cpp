// A library of collectives over NCCL's whose members are handed from run to run; all its other functions are NCCL's
// own.
#include "tests/engine/comm/kept_communicators.hpp"

#include "engine/backends/backends.hpp"
#include "planner/base/error.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

using namespace moe;

namespace {

struct Made {
    std::vector<int> devices; // by index
    int blocks = 0;           // that were asked for
    std::vector<comm::CollectiveLibrary::Member> members;
    std::size_t left = 0; // members that nobody uses
};

// Members that look for each other: the last one to come knows all their devices, and so whether one is kept for them.
struct Hall {
    std::vector<int> devices;
    std::size_t come = 0, gone = 0;
    std::shared_ptr<Made> made;
    comm::MeetingPoint point{}; // NCCL's, where it is new
    bool fresh = false;
};

class Keeper {
public:
    explicit Keeper(const comm::CollectiveLibrary& library) : library_(library) {}

    comm::MeetingPoint meeting_point() {
        const std::lock_guard<std::mutex> lock(mutex_);
        comm::MeetingPoint point{};
        std::memcpy(point.data(), &++points_, sizeof points_);
        return point;
    }

    comm::CollectiveLibrary::Member join(const comm::MeetingPoint& point, int members, int index, int blocks) {
        const auto mine = static_cast<std::size_t>(index);
        const Hall hall = meet(point, static_cast<std::size_t>(members), mine, blocks);
        if (!hall.fresh) return hall.made->members[mine];
        const comm::CollectiveLibrary::Member member = library_.join(hall.point, members, index, blocks);
        const std::lock_guard<std::mutex> lock(mutex_);
        made_of_[member] = hall.made;
        return hall.made->members[mine] = member;
    }

    void leave(comm::CollectiveLibrary::Member member) {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++made_of_.at(member)->left;
    }
    // Its work may be unfinished, and the other members will not be used again either.
    void abandon(comm::CollectiveLibrary::Member member) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            std::erase(kept_, made_of_.at(member));
        }
        library_.abandon(member);
    }

private:
    Hall meet(const comm::MeetingPoint& point, std::size_t members, std::size_t index, int blocks) {
        int device = 0;
        if (cudaGetDevice(&device) != cudaSuccess) fail("which GPU is this thread's?");
        std::uint64_t number = 0;
        std::memcpy(&number, point.data(), sizeof number);
        std::unique_lock<std::mutex> lock(mutex_);
        Hall& hall = halls_[number];
        hall.devices.resize(members);
        hall.devices[index] = device;
        if (++hall.come == members) {
            find(hall, blocks);
            wake_.notify_all();
        }
        wake_.wait(lock, [&] { return hall.made != nullptr; });
        const Hall found = hall;
        if (++hall.gone == members) halls_.erase(number);
        return found;
    }
    void find(Hall& hall, int blocks) {
        const auto fits = [&](const std::shared_ptr<Made>& made) {
            return made->left == hall.devices.size() && made->blocks == blocks && made->devices == hall.devices;
        };
        const auto found = std::find_if(kept_.begin(), kept_.end(), fits);
        if (found != kept_.end()) {
            hall.made = *found;
            hall.made->left = 0;
            return;
        }
        hall.fresh = true;
        hall.point = library_.meeting_point();
        hall.made = std::make_shared<Made>(Made{hall.devices, blocks, {}, 0});
        hall.made->members.resize(hall.devices.size());
        kept_.push_back(hall.made);
    }

    const comm::CollectiveLibrary& library_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::uint64_t points_ = 0;
    std::map<std::uint64_t, Hall> halls_;
    std::vector<std::shared_ptr<Made>> kept_;
    std::map<comm::CollectiveLibrary::Member, std::shared_ptr<Made>> made_of_;
};

// Never taken down: NCCL may be gone before it when the process ends.
Keeper& keeper() {
    static Keeper& all = *new Keeper(backends::backend_named("cuda").collectives());
    return all;
}

template <bool windows>
const comm::CollectiveLibrary& keeping_library() {
    static const comm::CollectiveLibrary library = [] {
        comm::CollectiveLibrary l = backends::backend_named("cuda").collectives();
        l.meeting_point = [] { return keeper().meeting_point(); };
        l.join = [](const comm::MeetingPoint& point, int members, int index, int blocks) {
            return keeper().join(point, members, index, blocks);
        };
        l.leave = [](comm::CollectiveLibrary::Member member) { keeper().leave(member); };
        l.abandon = [](comm::CollectiveLibrary::Member member) { keeper().abandon(member); };
        if (!windows) l.slot_window = nullptr;
        return l;
    }();
    return library;
}

template <bool windows>
const ops::Backend& keeping() {
    static const ops::Backend backend = [] {
        ops::Backend b = backends::backend_named("cuda");
        b.collectives = keeping_library<windows>;
        return b;
    }();
    return backend;
}

} // namespace

const ops::Backend& cuda_keeping(bool windows) { return windows ? keeping<true>() : keeping<false>(); }
