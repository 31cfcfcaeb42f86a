// The order between streams of a rank that run side by side: work waits for other work that touches the same bytes.
#pragma once

#include "engine/device/arena.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/op_kind.hpp"

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace moe::device {

// Streams beside those that Programs name: one that copies into boxes, and three for messages that leave. In a V
// activations and gradients go both ways, and none may queue behind another whose receiver waits for it.
inline constexpr int box_stream = program::stream_count, send_streams = program::stream_count + 1;
inline constexpr int queue_streams = program::stream_count + 4;

// One rank's work, in the order of OpWalk, on as many streams as the Program names. Work waits for the last that wrote
// what it reads or writes, and for those that have read since what it writes: by addresses, so that memory which
// tensors use in turn is covered like a tensor. Waits that follow from other waits, or from the order of a stream, are
// left out.
class StreamOrder {
public:
    StreamOrder(const program::Program& program, const Arena& arena, int stages);

    struct Work {
        int op = 0;         // number of the op in the order of OpWalk
        bool boxes = false; // whether it is the copy of what a send sends; the send follows, unless it is to itself
        int stream = 0;
        int signal = -1;            // number of the event that others wait for, -1 = nobody waits
        int before = -1;            // work before it on its stream, -1 = none
        std::span<const int> waits; // work on other streams that ends before
    };
    std::size_t size() const { return op_.size(); }
    Work operator[](std::size_t work) const;
    int signals() const { return signals_; }
    const std::array<bool, queue_streams>& used() const { return used_; }

private:
    friend class StreamOrderBuilder;

    std::vector<int> op_;
    std::vector<bool> boxes_;
    std::vector<std::uint8_t> stream_;
    std::vector<int> signal_, before_;
    std::vector<std::size_t> first_wait_; // place in waits_ where the waits of each work begin, and the end
    std::vector<int> waits_;
    std::array<bool, queue_streams> used_{};
    int signals_ = 0;
};

} // namespace moe::device
