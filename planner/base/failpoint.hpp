// Places at which a test ends the process, as a kill or a cut of the power would.
#pragma once

namespace moe {

// Set by tests alone, before any thread starts; called with the name of the place.
inline void (*failpoint_hook)(const char* name) = nullptr;

inline void failpoint(const char* name) {
    if (failpoint_hook != nullptr) failpoint_hook(name);
}

} // namespace moe
