// Reads traces of PyTorch's profiler: Chrome trace events as Kineto writes them.
#pragma once

#include "tools/measured/device_profile.hpp"
#include "tools/measured/file_pieces.hpp"

#include <cstdint>
#include <string>

namespace moe::tools {

inline constexpr std::uint64_t most_trace_bytes = std::uint64_t{8} << 30;
inline constexpr std::size_t most_events = 50'000'000;

// Reads event by event and keeps what ran on devices, when it was launched, and the steps. Throws Error (bad_input)
// naming `place` for what is no such trace, is nested more than 16 deep, holds a text over 1 MiB or more than
// most_events events of a device.
DeviceProfile read_chrome_trace(const NextPiece& next, const std::string& place);
DeviceProfile read_chrome_trace_file(const std::string& path);

} // namespace moe::tools
