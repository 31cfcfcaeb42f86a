// Waits between streams from the last writers and readers of every run of bytes, and what is known without waiting.
#include "engine/device/streams.hpp"

#include "planner/program/communicators.hpp"
#include "planner/program/program.hpp"

#include <algorithm>
#include <functional>

namespace moe::device {

namespace {

using Clock = std::array<int, queue_streams>; // last work of each stream that has ended for sure, -1 = none

// The memory in runs of bytes with one history each.
class History {
public:
    // Calls on(other) for all that must have ended before `work` touches [begin, begin + bytes), and remembers it.
    template <class On>
    void touch(std::uintptr_t begin, std::int64_t bytes, bool writes, int work, int stream, On on) {
        if (bytes <= 0) return;
        const std::uintptr_t end = begin + static_cast<std::uintptr_t>(bytes);
        cut(begin);
        cut(end);
        std::uintptr_t at = begin;
        for (auto run = runs_.lower_bound(begin); at < end;) {
            if (run == runs_.end() || run->first > at) { // No work has touched these bytes before.
                const std::uintptr_t next = run == runs_.end() ? end : std::min(end, run->first);
                run = runs_.emplace_hint(run, at, Run{next, -1, nobody()});
            }
            Run& here = run->second;
            if (here.writer >= 0) on(here.writer);
            if (writes) {
                for (const int reader : here.readers)
                    if (reader >= 0) on(reader);
            } else {
                here.readers[static_cast<std::size_t>(stream)] = work;
            }
            at = here.end;
            ++run;
        }
        if (!writes) return;
        runs_.erase(runs_.lower_bound(begin), runs_.lower_bound(end));
        runs_.emplace(begin, Run{end, work, nobody()});
    }

private:
    static Clock nobody() {
        Clock none;
        none.fill(-1);
        return none;
    }
    struct Run {
        std::uintptr_t end = 0;
        int writer = -1;
        Clock readers; // last reader on each stream since the writer
    };

    void cut(std::uintptr_t at) {
        auto run = runs_.lower_bound(at);
        if (run == runs_.begin()) return;
        --run;
        if (run->second.end <= at) return;
        Run rest = run->second;
        run->second.end = at;
        runs_.emplace(at, rest);
    }

    std::map<std::uintptr_t, Run> runs_; // runs by first byte
};

const program::PeerAttr* message(const program::Op& op) { return std::get_if<program::PeerAttr>(&op.attr); }

// Forward activations on the stream that the Program names, others by kind and direction.
int leaves_on(const program::Op& op, int stages) {
    const program::Channel channel = program::channel_of(*message(op), stages);
    const int line = 2 * static_cast<int>(channel.delta != 1) + channel.tag % 2;
    return line == 0 ? static_cast<int>(op.stream) : send_streams + line - 1;
}

// The places where messages wait, as addresses that no arena has: one byte for each place.
class Places {
public:
    Places(const program::Program& program, int stages) : boxes_(program::boxes_of(program, stages)), stages_(stages) {}

    std::uintptr_t next(const program::Op& op, std::map<program::Channel, int>& counts) {
        const auto found = boxes_.find(program::channel_of(*message(op), stages_));
        const auto box = static_cast<std::uintptr_t>(std::distance(boxes_.begin(), found));
        return 1 + box * (1 << 20) + static_cast<std::uintptr_t>(counts[found->first]++ % found->second.places);
    }
    std::map<program::Channel, int> copied, sent, received;

private:
    std::map<program::Channel, program::Box> boxes_;
    int stages_;
};

} // namespace

// Puts work on streams, one after another.
class StreamOrderBuilder {
public:
    explicit StreamOrderBuilder(StreamOrder& order) : o_(order) {
        none_.fill(-1);
        last_.fill(-1);
    }

    void begin(int op, bool boxes, int stream) {
        number_ = static_cast<int>(o_.op_.size());
        o_.op_.push_back(op);
        o_.boxes_.push_back(boxes);
        o_.stream_.push_back(static_cast<std::uint8_t>(stream));
        needed_ = none_;
    }
    void touch(std::uintptr_t begin, std::int64_t bytes, bool writes) {
        history_.touch(begin, bytes, writes, number_, o_.stream_.back(), [&](int other) {
            int& latest = needed_[o_.stream_[static_cast<std::size_t>(other)]];
            if (other != number_) latest = std::max(latest, other); // Work may touch the same bytes twice.
        });
    }
    void end() {
        const std::size_t stream = o_.stream_.back();
        o_.before_.push_back(last_[stream]);
        o_.signal_.push_back(-1);
        o_.first_wait_.push_back(o_.waits_.size());
        o_.used_[stream] = true;
        Clock known = last_[stream] >= 0 ? ended_[static_cast<std::size_t>(last_[stream])] : none_;
        // The latest first: what it implies need not be waited for.
        std::sort(needed_.begin(), needed_.end(), std::greater<>());
        for (const int other : needed_) {
            if (other < 0) break;
            const auto n = static_cast<std::size_t>(other);
            if (known[o_.stream_[n]] >= other) continue;
            o_.waits_.push_back(other);
            if (o_.signal_[n] < 0) o_.signal_[n] = o_.signals_++;
            for (std::size_t t = 0; t < known.size(); ++t) known[t] = std::max(known[t], ended_[n][t]);
        }
        known[stream] = number_;
        ended_.push_back(known);
        last_[stream] = number_;
    }
    void finish() { o_.first_wait_.push_back(o_.waits_.size()); }

private:
    StreamOrder& o_;
    History history_;
    std::vector<Clock> ended_; // work that has ended when each work has
    Clock none_, last_;        // last_: last work of each stream
    Clock needed_{};
    int number_ = 0;
};

StreamOrder::StreamOrder(const program::Program& program, const Arena& arena, int stages) {
    StreamOrderBuilder builder(*this);
    Places boxes(program, stages);
    int number = 0;
    for (program::OpWalk walk(program); !walk.done(); walk.next(), ++number) {
        const program::Op& op = walk.op();
        const auto touch = [&](const program::Operands& ids, bool writes) {
            for (const program::TensorId id : ids)
                if (id != program::no_tensor)
                    builder.touch(reinterpret_cast<std::uintptr_t>(arena.at(id, walk.slot().micro_batch)),
                                  program.tensors[static_cast<std::size_t>(id)].bytes(), writes);
        };
        const bool own = message(op) != nullptr && message(op)->delta % stages == 0;
        if (op.kind == program::OpKind::send) {
            builder.begin(number, true, box_stream);
            touch(op.in, false);
            builder.touch(boxes.next(op, boxes.copied), 1, true);
            builder.end();
            if (own) continue;
        }
        builder.begin(number, false,
                      op.kind == program::OpKind::send ? leaves_on(op, stages) : static_cast<int>(op.stream));
        if (op.kind == program::OpKind::send) {
            builder.touch(boxes.next(op, boxes.sent), 1, false);
        } else {
            touch(op.in, false);
            touch(op.out, true);
            if (own) builder.touch(boxes.next(op, boxes.received), 1, false);
        }
        builder.end();
    }
    builder.finish();
}

StreamOrder::Work StreamOrder::operator[](std::size_t work) const {
    return {op_[work],
            boxes_[work],
            stream_[work],
            signal_[work],
            before_[work],
            std::span<const int>(waits_).subspan(first_wait_[work], first_wait_[work + 1] - first_wait_[work])};
}

} // namespace moe::device
