// Reading whole files and writing them so that nothing half-written ever stands under the final name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace moe {

// The whole file; throws Error (bad_input) "cannot read PATH: reason", also where it holds more than `most` bytes.
std::string read_file(const std::string& path, std::size_t most = SIZE_MAX);

// Calls write(append) to produce the content piece by piece into PATH.partial, then fsyncs and renames. On any failure
// (disk full, no permission) the partial file is removed and Error (failure) names path and reason. A path that is not
// a regular file (/dev/stdout, /dev/full) is written directly.
void write_file(const std::string& path,
                const std::function<void(const std::function<void(std::string_view)>& append)>& write);
void write_file(const std::string& path, const std::string& content);

// Refuses to write over what a verb reads, or over its other output: throws Error (bad_input) where PATH, which OPTION
// names, is the regular file `other`, or would be. Empty paths are none.
void refuse_overwriting(const std::string& option, const std::string& path, const std::string& other);

// The profiles folder: $MOE_PLAN_PROFILES, else beside the executable or library of this code. Throws Error (failure).
std::string profiles_folder();

} // namespace moe
