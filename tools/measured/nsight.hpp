// Reads SQLite files that Nsight Systems exports (nsys export --type sqlite).
#pragma once

#include "tools/measured/device_profile.hpp"

#include <string>
#include <string_view>

namespace moe::tools {

// Tells whether the first bytes of a file are those of a SQLite database.
bool is_sqlite(std::string_view first_bytes);

// Reads kernels, copies, fills and graphs of all devices, their launches, and NVTX ranges that are named
// ProfilerStep#N. A device is a GPU of one process. Tables and columns: "SQLite Schema Reference" of the Nsight Systems
// User Guide; tables are created only where they have rows, and columns come with releases, so that only those in use
// are asked for. Throws Error (bad_input) naming path, table and column.
DeviceProfile read_nsight_file(const std::string& path);

} // namespace moe::tools
