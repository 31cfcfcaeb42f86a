// Slots that the members of a communicator exchange by kernels of their devices: windows that all have opened, or the
// reason why the library's messages carry whole slots.
#pragma once

#include "engine/comm/collectives.hpp"
#include "engine/device/device.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/tensor.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace moe::comm {

class SlotExchange {
public:
    struct Place {
        CollectiveLibrary::Member member = nullptr;
        std::vector<int> ranks; // ranks of the group
        int index = 0;          // index of this rank in the group
    };
    // All members make theirs at the same time. slots_bytes: of all slots of the largest call, 0 = they are to travel
    // whole. all_agree: whether every member's answer is yes, for which all wait. Never throws for what stands against
    // windows: it is in by().
    SlotExchange(const CollectiveLibrary& library, device::Device& device, Place place, std::int64_t slots_bytes,
                 const std::function<bool(bool mine)>& all_agree);

    // True where the members exchange chunks; else whoever asks sends whole slots.
    bool open() const { return window_ != nullptr; }
    // How slots travel, and where they travel whole, why: a line for reports.
    const std::string& by() const { return by_; }
    std::int64_t bytes() const { return open() ? group_.window_bytes : 0; } // bytes taken beside the arena
    // Communicator::all_to_all_slots on the device, where open().
    void exchange(const program::RowsAttr& attr, const void* x, const std::int32_t* counts, void* y,
                  program::Dtype dtype, void* stream) const;
    // Throws Error (failure) when a call has waited for another rank for too long.
    void check() const;
    // Lets go of the window without a word to the library, whose communicator has been abandoned.
    void abandon() { static_cast<void>(window_.release()); }

private:
    std::string opened(const CollectiveLibrary& library, std::int64_t slots_bytes,
                       const std::function<bool(bool mine)>& all_agree);

    Place place_;
    std::unique_ptr<device::Device> host_;
    device::Memory trouble_; // an int that the device sets when a wait is given up
    std::unique_ptr<SlotWindow> window_;
    SlotGroup group_;
    std::string by_;
};

} // namespace moe::comm
