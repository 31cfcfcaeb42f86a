// The messages that the trainers of several processes exchange between ops, and the pieces of parameters that each
// holds.
#pragma once

#include "engine/train/trainer.hpp"
#include "planner/base/error.hpp"

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

template <class Visit>
void Trainer::for_each_piece(const std::string& name, Visit visit) const {
    if (shapes_.count(name) == 0) refuse("the model has no parameter '{}'", name);
    const auto found = holders_.find(name);
    if (found == holders_.end()) return; // Other processes hold the tensor.
    for (const Holder& holder : found->second) {
        const Rank& r = ranks_[static_cast<std::size_t>(holder.place)];
        const weights::LocalParameter& p = r.parameters[holder.parameter];
        const program::Bucket& bucket = program_of(r).buckets[static_cast<std::size_t>(p.bucket)];
        for (const weights::Piece& piece : p.pieces) visit(r, bucket, piece);
    }
}

} // namespace moe::train
