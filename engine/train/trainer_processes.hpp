// The messages that the trainers of several processes exchange between ops.
#pragma once

#include "engine/train/trainer.hpp"

#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

namespace moe::train {

template <class Talk>
auto Trainer::among_processes(Talk talk) const {
    try {
        return talk(*transport());
    } catch (const engine::Aborted&) {
        fail("{}", transport()->aborted());
    }
}

template <class T>
std::vector<std::vector<T>> Trainer::gathered(const std::vector<T>& mine) const {
    static_assert(std::is_trivially_copyable_v<T>);
    const std::span<const char> bytes{reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(T)};
    std::vector<std::vector<T>> all;
    for (const std::vector<char>& part : among_processes([&](comm::Transport& t) { return t.gather(0, bytes); })) {
        all.emplace_back(part.size() / sizeof(T));
        if (!part.empty()) std::memcpy(all.back().data(), part.data(), part.size());
    }
    return all;
}

} // namespace moe::train
