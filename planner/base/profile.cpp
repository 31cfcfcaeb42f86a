// Resolves a profile's name or path, and suggests the nearest name for a typo.
#include "planner/base/profile.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <filesystem>
#include <system_error>

namespace moe {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> names_in(const fs::path& folder) {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
        if (entry->path().extension() == ".json") names.push_back(entry->path().stem().string());
    }
    std::sort(names.begin(), names.end());
    return names;
}

// The last folder of a path also when the path is just "config.json".
std::string folder_name(const fs::path& file) {
    std::error_code error;
    const fs::path whole = fs::absolute(file, error);
    return error ? file.stem().string() : whole.lexically_normal().parent_path().filename().string();
}

ProfileFile from_path(const fs::path& path, const std::string& inside) {
    std::error_code error;
    if (!inside.empty() && fs::is_directory(path, error)) return {(path / inside).string(), folder_name(path / inside)};
    if (!inside.empty() && path.filename() == inside) return {path.string(), folder_name(path)};
    return {path.string(), path.stem().string()};
}

} // namespace

std::vector<std::string> profile_names(const std::string& folder) {
    return names_in(fs::path(profiles_folder()) / folder);
}

ProfileFile find_profile(const std::string& name_or_path, const std::string& folder, const std::string& what,
                         const std::string& inside) {
    if (name_or_path.empty()) refuse("no {} named: give a name in profiles/{} or a path", what, folder);
    const fs::path path(name_or_path);
    const bool bare = name_or_path.find('/') == std::string::npos;
    std::vector<std::string> known;
    if (bare && path.extension() != ".json") {
        const fs::path profiles = fs::path(profiles_folder()) / folder;
        known = names_in(profiles);
        if (std::find(known.begin(), known.end(), name_or_path) != known.end())
            return {(profiles / (name_or_path + ".json")).string(), name_or_path};
    }
    std::error_code error;
    if (known.empty() || fs::exists(path, error)) return from_path(path, inside);
    const std::string hint = did_you_mean(name_or_path, known);
    if (!hint.empty()) refuse("unknown {} '{}'{}", what, shown(name_or_path), hint);
    refuse("unknown {} '{}': give a path, or one of {}", what, shown(name_or_path), fmt::join(known, ", "));
}

} // namespace moe
