// Short lists of words that are asked for membership.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

namespace moe::tools {

inline bool contains(const std::vector<std::string>& list, const std::string& item) {
    return std::find(list.begin(), list.end(), item) != list.end();
}

inline void add_once(std::vector<std::string>& list, const std::string& item) {
    if (!contains(list, item)) list.push_back(item);
}

} // namespace moe::tools
