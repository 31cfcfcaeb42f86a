// Finding a file that the user names either by its path or by its name in a folder of profiles/.
#pragma once

#include <string>
#include <vector>

namespace moe {

struct ProfileFile {
    std::string path;
    std::string name; // the profile's name, or what the path suggests: its stem, or its folder for `inside`
};

// `name_or_path` is a name in profiles/FOLDER (these come first; write ./NAME for a file of that name), a file, or a
// directory that holds a file called `inside` ("" = directories are refused). Throws Error (bad_input) "unknown WHAT
// 'X': did you mean Y?" or, for what looks like a path, "cannot read PATH: reason".
ProfileFile find_profile(const std::string& name_or_path, const std::string& folder, const std::string& what,
                         const std::string& inside);

// Names in profiles/FOLDER, sorted.
std::vector<std::string> profile_names(const std::string& folder);

} // namespace moe
