// The tensors that an op reads, or those that it writes: a short list that takes no memory of its own.
#pragma once

#include "planner/program/tensor.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <utility>
#include <vector>

namespace moe::program {

// A vector of tensors whose first few lie in it: searches lower millions of ops, nearly all of few operands.
class Operands {
public:
    Operands() = default;
    Operands(std::initializer_list<TensorId> ids) { copy(ids.begin(), ids.size()); }
    Operands(const std::vector<TensorId>& ids) { copy(ids.data(), ids.size()); }
    Operands(const Operands& other) { copy(other.data(), other.size()); }
    Operands(Operands&& other) noexcept { take(other); }
    Operands& operator=(const Operands& other) {
        if (this == &other) return *this;
        size_ = 0;
        copy(other.data(), other.size());
        return *this;
    }
    Operands& operator=(Operands&& other) noexcept {
        if (this == &other) return *this;
        if (room_ > own_room) delete[] more();
        take(other);
        return *this;
    }
    ~Operands() {
        if (room_ > own_room) delete[] more();
    }

    std::size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    TensorId* data() { return room_ > own_room ? more() : own_; }
    const TensorId* data() const { return room_ > own_room ? more() : own_; }
    TensorId* begin() { return data(); }
    TensorId* end() { return data() + size_; }
    const TensorId* begin() const { return data(); }
    const TensorId* end() const { return data() + size_; }
    TensorId& operator[](std::size_t i) { return data()[i]; }
    TensorId operator[](std::size_t i) const { return data()[i]; }
    TensorId at(std::size_t i) const {
        if (i >= size_) throw std::out_of_range("operand");
        return data()[i];
    }
    TensorId front() const { return data()[0]; }
    TensorId back() const { return data()[size_ - 1]; }

    void push_back(TensorId id) {
        if (size_ == room_) grow(2 * std::size_t{room_});
        data()[size_++] = id;
    }
    void append(std::initializer_list<TensorId> ids) {
        for (const TensorId id : ids) push_back(id);
    }
    void resize(std::size_t size, TensorId id) {
        while (size_ < size) push_back(id);
        size_ = static_cast<std::uint32_t>(size);
    }
    bool operator==(const Operands& other) const { return std::equal(begin(), end(), other.begin(), other.end()); }

private:
    static constexpr std::uint32_t own_room = 6;

    // Longer lists have their place instead of the first few.
    TensorId* more() const {
        TensorId* ids = nullptr;
        std::memcpy(&ids, own_, sizeof ids);
        return ids;
    }
    void grow(std::size_t room) {
        auto* ids = new TensorId[room];
        std::copy(begin(), end(), ids);
        if (room_ > own_room) delete[] more();
        std::memcpy(own_, &ids, sizeof ids);
        room_ = static_cast<std::uint32_t>(room);
    }
    void copy(const TensorId* ids, std::size_t size) {
        if (size > room_) grow(size);
        std::copy_n(ids, size, data());
        size_ = static_cast<std::uint32_t>(size);
    }
    // What this list had is gone.
    void take(Operands& other) noexcept {
        std::copy(std::begin(other.own_), std::end(other.own_), own_);
        size_ = std::exchange(other.size_, 0U);
        room_ = std::exchange(other.room_, own_room);
    }

    std::uint32_t size_ = 0, room_ = own_room;
    TensorId own_[own_room] = {};
};

} // namespace moe::program
