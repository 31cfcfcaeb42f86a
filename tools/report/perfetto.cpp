// Writes the packets of a Perfetto trace: descriptors of tracks, slices, counters and flows, with interned names.
#include "tools/report/perfetto.hpp"

#include "planner/base/counted.hpp"
#include "planner/lower/lower.hpp"
#include "planner/memory/memory_timeline.hpp"
#include "planner/plan/plan.hpp"
#include "planner/program/program.hpp"
#include "tools/report/protobuf.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace moe::tools {

namespace {

// Fields and values of perfetto_trace.proto, by message.
namespace trace {
constexpr int packet = 1;
}
namespace packet {
constexpr int timestamp = 8, sequence = 10, track_event = 11, interned_data = 12, flags = 13, descriptor = 60;
constexpr std::uint64_t state_cleared = 1, needs_state = 2;
} // namespace packet
namespace track {
constexpr int uuid = 1, name = 2, parent = 5, counter = 8, child_order = 11, rank_among_siblings = 12;
constexpr std::uint64_t explicit_order = 3;
} // namespace track
namespace counter {
constexpr int unit_name = 6;
}
namespace event {
constexpr int categories = 3, annotations = 4, type = 9, name = 10, track = 11, counter = 30, real_counter = 44,
              flows = 47, ending_flows = 48;
constexpr std::uint64_t begin = 1, end = 2, count = 4;
} // namespace event
namespace annotation {
constexpr int name = 1, real = 5;
}
namespace interned {
constexpr int categories = 1, names = 2, annotations = 3, iid = 1, text = 2;
}

std::uint64_t nanoseconds(double seconds) { return static_cast<std::uint64_t>(std::llround(seconds * 1e9)); }

// Packets of one sequence, whose names are said once and then go by number.
class Packets {
public:
    // Tracks are numbered from 1 as they are described. parent 0: none. Children come in the order of their
    // description.
    std::uint64_t add_track(const std::string& name, std::uint64_t parent, const char* unit = nullptr) {
        ProtobufMessage about;
        about.number(track::uuid, ++tracks_);
        about.text(track::name, name);
        if (parent != 0) about.number(track::parent, parent);
        about.number(track::child_order, track::explicit_order);
        about.number(track::rank_among_siblings, tracks_);
        if (unit != nullptr) {
            ProtobufMessage counted;
            counted.text(counter::unit_name, unit);
            about.message(track::counter, counted);
        }
        ProtobufMessage whole;
        whole.message(packet::descriptor, about);
        add(whole, false);
        return tracks_;
    }

    class Event {
    public:
        Event(Packets& packets, std::uint64_t type, std::uint64_t track) : packets_(packets) {
            message_.number(event::type, type);
            message_.number(event::track, track);
        }
        void name(const std::string& text) { message_.number(event::name, number_of(interned::names, text)); }
        void category(const std::string& text) {
            message_.number(event::categories, number_of(interned::categories, text));
        }
        void annotate(const char* name, double value) {
            ProtobufMessage inner;
            inner.number(annotation::name, number_of(interned::annotations, name));
            inner.real(annotation::real, value);
            message_.message(event::annotations, inner);
        }
        void flow(int field, std::uint64_t id) { message_.fixed64(field, id); }
        ProtobufMessage& message() { return message_; }
        bool named() const { return named_; }

    private:
        std::uint64_t number_of(int kind, const std::string& text) {
            named_ = true;
            return packets_.number_of(kind, text);
        }
        Packets& packets_;
        ProtobufMessage message_;
        bool named_ = false; // whether it has names of the sequence, whose state a reader then needs
    };

    void add(std::uint64_t time, Event& event) {
        ProtobufMessage whole;
        whole.number(packet::timestamp, time);
        whole.message(packet::track_event, event.message());
        if (!fresh_.bytes().empty()) whole.message(packet::interned_data, fresh_);
        fresh_.clear();
        add(whole, event.named());
    }
    void end_slice(std::uint64_t time, std::uint64_t track) {
        Event last(*this, event::end, track);
        add(time, last);
    }
    void count(std::uint64_t time, std::uint64_t track, double value) {
        Event counted(*this, event::count, track);
        if (value == std::floor(value) && value >= 0.0)
            counted.message().number(event::counter, static_cast<std::uint64_t>(value));
        else
            counted.message().real(event::real_counter, value);
        add(time, counted);
    }

    std::string take() { return std::move(bytes_).bytes(); }

private:
    void add(ProtobufMessage& whole, bool uses_names) {
        whole.number(packet::sequence, 1);
        if (bytes_.bytes().empty())
            whole.number(packet::flags, packet::state_cleared);
        else if (uses_names)
            whole.number(packet::flags, packet::needs_state);
        bytes_.message(trace::packet, whole);
    }
    std::uint64_t number_of(int kind, const std::string& text) {
        const auto [known, is_new] = numbers_[kind].try_emplace(text, numbers_[kind].size() + 1);
        if (is_new) {
            ProtobufMessage entry;
            entry.number(interned::iid, known->second);
            entry.text(interned::text, text);
            fresh_.message(kind, entry);
        }
        return known->second;
    }

    ProtobufMessage bytes_, fresh_; // fresh_: names that the next packet says
    std::uint64_t tracks_ = 0;
    std::map<int, std::unordered_map<std::string, std::uint64_t>> numbers_;
};

std::string name_of(const program::TimelineRow& row) {
    const std::string layer = row.layer < 0 ? "" : fmt::format(" L{}", row.layer);
    return fmt::format("{}{} {}", program::to_string(row.kind), layer, program::to_string(row.phase));
}

// Numbers of arrows. A send and its receive have the same tag, stage and micro-batch; of the ranks of one pipeline
// rank, in the order of ranks, the n-th sends to the n-th of the other.
class Flows {
public:
    Flows(const program::Timeline& timeline, int stages) : timeline_(timeline), stages_(stages) {
        std::map<int, int> seen;
        for (const int stage : timeline.pipeline_rank) place_.push_back(seen[stage]++);
    }

    std::uint64_t of(std::size_t rank, const program::TimelineRow& row, const program::PeerAttr& peer) {
        const int here = timeline_.pipeline_rank[rank], there = ((here + peer.delta) % stages_ + stages_) % stages_;
        const bool sends = row.kind == program::OpKind::send;
        const Key key{sends ? here : there, sends ? there : here, place_[rank], peer.tag, peer.stage, row.micro_batch};
        return numbers_.try_emplace(key, numbers_.size() + 1).first->second;
    }

private:
    using Key = std::tuple<int, int, int, int, int, int>; // from, to, place, tag, stage, micro-batch
    const program::Timeline& timeline_;
    int stages_;
    std::vector<int> place_;
    std::map<Key, std::uint64_t> numbers_;
};

// One rank: its rows are those from `begin` to `end`.
class RankTracks {
public:
    using Rows = std::vector<program::TimelineRow>::const_iterator;
    RankTracks(Packets& packets, std::uint64_t group, std::size_t rank, Rows begin, Rows end)
        : packets_(packets), group_(group), rank_(rank), begin_(begin), end_(end) {
        for (int s = 0; s < program::stream_count; ++s) {
            const auto stream = static_cast<program::Stream>(s);
            if (std::any_of(begin, end, [&](const auto& row) { return row.stream == stream; }))
                streams_[s] = packets.add_track(program::to_string(stream), group);
        }
    }

    void slices(const program::Program& program, Flows& flows) {
        for (auto row = begin_; row != end_; ++row) {
            const std::uint64_t track = streams_.at(static_cast<int>(row->stream));
            Packets::Event slice(packets_, event::begin, track);
            slice.name(name_of(*row));
            slice.category(program::to_string(row->module));
            slice.category(fmt::format("micro-batch {}", row->micro_batch));
            const program::Op* op = program::op_of(program, *row);
            if (const auto* peer = op == nullptr ? nullptr : std::get_if<program::PeerAttr>(&op->attr);
                peer != nullptr && peer->delta != 0)
                slice.flow(row->kind == program::OpKind::send ? event::flows : event::ending_flows,
                           flows.of(rank_, *row, *peer));
            packets_.add(nanoseconds(row->start), slice);
            packets_.end_slice(nanoseconds(row->end), track);
        }
    }

    // What a stream of transfers moves while it moves it: the bytes of its op over the seconds that it is busy.
    void links(const program::Program& program) {
        std::map<int, std::pair<std::uint64_t, std::uint64_t>> counters; // track, and when its latest op ends
        for (auto row = begin_; row != end_; ++row) {
            const program::Op* op = program::op_of(program, *row);
            if (op == nullptr || row->stream == program::Stream::compute || !(op->bytes > 0.0 && row->busy > 0.0))
                continue;
            const int stream = static_cast<int>(row->stream);
            if (counters.count(stream) == 0)
                counters[stream] = {
                    packets_.add_track(fmt::format("link {}", program::to_string(row->stream)), group_, "MB/s"), 0};
            auto& [track, ends] = counters[stream];
            const std::uint64_t start = nanoseconds(row->start);
            if (ends != 0 && ends < start) packets_.count(ends, track, 0.0);
            packets_.count(start, track, std::round(op->bytes / row->busy / 1e6));
            ends = nanoseconds(row->end);
        }
        for (const auto& [stream, counter] : counters) packets_.count(counter.second, counter.first, 0.0);
    }

    void memory(const std::vector<memory::MemoryUse>& uses) {
        for (int c = 0; c < memory::memory_class_count; ++c) {
            const auto bytes = [c](const memory::MemoryUse& use) { return use.bytes[static_cast<std::size_t>(c)]; };
            if (std::all_of(uses.begin(), uses.end(), [&](const auto& use) { return bytes(use) == 0.0; })) continue;
            const char* name = memory::to_string(static_cast<memory::MemoryClass>(c));
            const std::uint64_t track = packets_.add_track(fmt::format("memory {}", name), group_, "GiB");
            std::optional<double> last;
            for (const memory::MemoryUse& use : uses)
                if (!last || bytes(use) != *last) {
                    last = bytes(use);
                    packets_.count(nanoseconds(use.from), track, *last / 0x1p30);
                }
        }
    }

private:
    Packets& packets_;
    std::uint64_t group_;
    std::size_t rank_;
    Rows begin_, end_;
    std::map<int, std::uint64_t> streams_; // track by stream, where it has rows
};

} // namespace

bool is_perfetto(const std::string& path) { return path.ends_with(".pftrace"); }

std::string perfetto_trace(const program::Timeline& timeline, const TracedPlans& plans) {
    Packets packets;
    const std::uint64_t step = packets.add_track(timeline.predicted ? "predicted step" : "measured step", 0);
    Packets::Event whole(packets, event::begin, step);
    whole.name("step");
    whole.annotate("tflops_per_gpu", timeline.tflops_per_gpu);
    whole.annotate("memory_gib", timeline.memory_gib);
    packets.add(0, whole);
    packets.end_slice(nanoseconds(timeline.step_seconds), step);

    Flows flows(timeline, plans.timed.pp);
    auto begin = timeline.rows.begin();
    for (std::size_t i = 0; i < timeline.ranks.size(); ++i) {
        const int rank = timeline.ranks[i], stage = timeline.pipeline_rank[i];
        const auto end = std::find_if(begin, timeline.rows.end(), [&](const auto& row) { return row.rank != rank; });
        const int stands_for = timeline.represents[i];
        const std::uint64_t group =
            packets.add_track(fmt::format("rank {} (stage {}, {})", rank, stage, counted(stands_for, "rank")), step);
        const program::Program timed = lower::lower(plans.timed, stage);
        RankTracks tracks(packets, group, i, begin, end);
        tracks.slices(timed, flows);
        tracks.memory(memory::memory_over_time(lower::lower(plans.planned, stage),
                                               plans.memory.at(static_cast<std::size_t>(stage)), timeline, rank,
                                               memory_samples));
        tracks.links(timed);
        begin = end;
    }
    return packets.take();
}

} // namespace moe::tools
