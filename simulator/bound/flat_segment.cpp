// Resolves a lowered segment's tensors into waits between ops and lifetimes, and plays the result.
#include "simulator/bound/flat_segment.hpp"

#include "planner/base/error.hpp"
#include "planner/memory/memory.hpp"
#include "planner/program/program.hpp"
#include "simulator/estimate/segment_cache.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <unordered_map>

namespace moe {
namespace {

TensorId root(const Program& program, TensorId id) {
    const TensorId base = program.tensors[static_cast<std::size_t>(id)].base;
    return base == no_tensor ? id : base;
}

const std::string& name_of(const Program& program, TensorId id) {
    return program.tensors[static_cast<std::size_t>(id)].name;
}

// Kind and first output's name tell the ops of a template apart; ops that write the same tensor repeat in order.
std::string label(const Program& program, const Op& op, std::size_t cut) {
    std::string text = to_string(op.kind);
    for (const TensorId id : op.out)
        if (id != no_tensor) {
            const std::string& name = name_of(program, id);
            return text + ' ' + name.substr(0, name.size() - std::min(cut, name.size()));
        }
    return text;
}

// Ops of the plain segment by label, handed out in order, again from the first when all are used.
class Originals {
public:
    explicit Originals(const Program& plain) {
        const std::vector<Op>& ops = plain.templates[0].ops;
        for (std::size_t i = 0; i < ops.size(); ++i) found_[label(plain, ops[i], 0)].ops.push_back(static_cast<int>(i));
    }
    int next(const std::string& label) {
        const auto it = found_.find(label);
        if (it == found_.end()) return -1;
        std::vector<int>& ops = it->second.ops;
        return ops[it->second.used++ % ops.size()];
    }

private:
    struct Entry {
        std::vector<int> ops;
        std::size_t used = 0;
    };
    std::unordered_map<std::string, Entry> found_;
};

constexpr std::size_t again = 6; // length of ".again", which recompute_pass() appends to names

// For both templates: the plain op that each op is or repeats.
std::array<std::vector<int>, 2> plain_ops(const Program& plain, const Program& segment) {
    std::array<std::vector<int>, 2> result;
    const auto forwards = static_cast<int>(plain.templates[0].ops.size());
    Originals originals(plain);
    int backwards = 0;
    for (std::size_t i = 0; i < segment.templates[0].ops.size(); ++i) result[0].push_back(static_cast<int>(i));
    if (segment.templates[1].ops.size() == plain.templates[1].ops.size()) { // they are the same
        for (std::size_t i = 0; i < segment.templates[1].ops.size(); ++i)
            result[1].push_back(forwards + static_cast<int>(i));
        return result;
    }
    for (const Op& op : segment.templates[1].ops) {
        const bool repeats = op.phase == Phase::recompute;
        const int number = repeats ? originals.next(label(segment, op, again)) : forwards + backwards++;
        const auto at = static_cast<std::size_t>(number);
        const bool sound = repeats ? number >= 0 && plain.templates[0].ops[at].flops == op.flops &&
                                         plain.templates[0].ops[at].bytes == op.bytes
                                   : static_cast<std::size_t>(backwards) <= plain.templates[1].ops.size();
        if (!sound) fail("segment: op {} is not one of the plain segment's", label(segment, op, 0));
        result[1].push_back(number);
    }
    if (result[0].size() != plain.templates[0].ops.size())
        fail("segment: {} forward ops, the plain one has {}", result[0].size(), plain.templates[0].ops.size());
    return result;
}

// Recomputed tensors lie behind the plain ones and are as large as those that they repeat.
std::vector<int> plain_tensors(const Program& plain, const Program& segment,
                               const std::array<std::vector<int>, 2>& price_of) {
    std::vector<int> result(segment.tensors.size());
    for (std::size_t i = 0; i < result.size(); ++i) result[i] = static_cast<int>(i);
    if (segment.tensors.size() == plain.tensors.size()) return result;
    const std::vector<Op>& ops = segment.templates[1].ops;
    for (std::size_t i = 0; i < ops.size(); ++i) {
        if (ops[i].phase != Phase::recompute) continue;
        const Op& original = plain.templates[0].ops[static_cast<std::size_t>(price_of[1][i])];
        for (std::size_t k = 0; k < ops[i].out.size(); ++k)
            if (ops[i].out[k] != no_tensor)
                result[static_cast<std::size_t>(ops[i].out[k])] = static_cast<int>(original.out[k]);
    }
    return result;
}

// Last writer of each tensor and the last reader on each stream, op by op.
struct Clock {
    int written = -1;
    std::array<int, stream_count> read;
    Clock() { read.fill(-1); }
};

} // namespace

FlatSegment::FlatSegment(const Program& plain, const Program& segment) {
    const std::array<std::vector<int>, 2> price_of = plain_ops(plain, segment);
    for (int direction = 0; direction < 2; ++direction)
        add_ops(direction, segment, price_of[static_cast<std::size_t>(direction)]);
    add_lives(segment, plain_tensors(plain, segment, price_of));
}

// Streams keep their order, so that an op waits for at most the latest op of each other stream.
void FlatSegment::add_ops(int direction, const Program& segment, const std::vector<int>& price_of) {
    Direction& d = directions_[direction];
    const std::vector<Op>& ops = segment.templates[static_cast<std::size_t>(direction)].ops;
    std::vector<Clock> clocks(segment.tensors.size());
    const char* message = direction == 0 ? "segment_in" : "segment_dout";
    for (std::size_t i = 0; i < ops.size(); ++i) {
        const Op& op = ops[i];
        const auto own = static_cast<std::size_t>(op.stream);
        std::array<int, stream_count> latest;
        latest.fill(-1);
        const auto wait = [&](int other) {
            if (other < 0) return;
            int& seen = latest[d.ops[static_cast<std::size_t>(other)].stream];
            seen = std::max(seen, other);
        };
        for (const TensorId id : op.in) {
            if (id == no_tensor) continue;
            wait(clocks[static_cast<std::size_t>(root(segment, id))].written);
            if (d.first_reader < 0 && name_of(segment, id) == message) d.first_reader = static_cast<int>(i);
        }
        FlatOp flat;
        flat.price = price_of[i];
        flat.stream = static_cast<std::uint8_t>(op.stream);
        flat.counts = op.kind == OpKind::expert_counts;
        flat.reads_begin = static_cast<int>(d.waits.size());
        if (flat.counts)
            for (const int other : latest)
                if (other >= 0) d.waits.push_back(other);
        flat.reads_end = flat.waits_begin = static_cast<int>(d.waits.size());
        for (const TensorId id : op.out) {
            if (id == no_tensor) continue;
            const Clock& clock = clocks[static_cast<std::size_t>(root(segment, id))];
            wait(clock.written);
            for (const int reader : clock.read) wait(reader);
        }
        for (std::size_t s = 0; s < latest.size(); ++s)
            if (s != own && latest[s] >= 0) d.waits.push_back(latest[s]);
        flat.waits_end = static_cast<int>(d.waits.size());
        d.ops.push_back(flat);
        for (const TensorId id : op.in)
            if (id != no_tensor) clocks[static_cast<std::size_t>(root(segment, id))].read[own] = static_cast<int>(i);
        for (const TensorId id : op.out)
            if (id != no_tensor) clocks[static_cast<std::size_t>(root(segment, id))].written = static_cast<int>(i);
        if (is_communication(op.kind)) groups_ |= group_bit(op.group);
    }
}

// The rules of segment_memory(): what both directions use is saved, the rest lives from its first to its last op.
void FlatSegment::add_lives(const Program& segment, const std::vector<int>& tensor_of) {
    struct Use {
        int first = std::numeric_limits<int>::max(), last = -1;
    };
    std::array<std::vector<Use>, 2> uses;
    for (std::size_t t = 0; t < 2; ++t) {
        uses[t].resize(segment.tensors.size());
        const std::vector<Op>& ops = segment.templates[t].ops;
        for (std::size_t i = 0; i < ops.size(); ++i) {
            const auto touch = [&](TensorId id, bool written) {
                if (id == no_tensor) return;
                const TensorId base = root(segment, id);
                if (segment.tensors[static_cast<std::size_t>(base)].storage != Storage::activation) return;
                Use& use = uses[t][static_cast<std::size_t>(base)];
                if (use.last < 0) use.first = written ? static_cast<int>(i) : 0;
                use.last = static_cast<int>(i);
            };
            for (const TensorId id : ops[i].in) touch(id, false);
            for (const TensorId id : ops[i].out) touch(id, true);
        }
    }
    for (std::size_t id = 0; id < segment.tensors.size(); ++id) {
        const bool forward = uses[0][id].last >= 0, backward = uses[1][id].last >= 0;
        if (forward && backward) {
            saved_.push_back(tensor_of[id]);
            continue;
        }
        for (std::size_t t = 0; t < 2; ++t)
            if (uses[t][id].last >= 0)
                directions_[t].lives.push_back({tensor_of[id], uses[t][id].first, uses[t][id].last});
    }
}

FlatSegment::Play FlatSegment::play(int direction, const std::vector<OpCost>& prices, double lead, double sync_seconds,
                                    std::vector<double>& ends) const {
    const Direction& d = directions_[direction];
    ends.resize(d.ops.size());
    std::array<double, stream_count> free{};
    Play play;
    double host = -lead;
    for (std::size_t i = 0; i < d.ops.size(); ++i) {
        const FlatOp& op = d.ops[i];
        const OpCost& price = prices[static_cast<std::size_t>(op.price)];
        double issue = host, start = free[op.stream];
        if (op.counts && price.waits_for_counts) {
            double there = 0.0;
            for (int w = op.reads_begin; w < op.reads_end; ++w)
                there = std::max(there, ends[static_cast<std::size_t>(d.waits[static_cast<std::size_t>(w)])]);
            issue = std::max(host, there) + sync_seconds;
            play.waits = true;
        }
        for (int w = op.waits_begin; w < op.waits_end; ++w)
            start = std::max(start, ends[static_cast<std::size_t>(d.waits[static_cast<std::size_t>(w)])]);
        start = std::max(start, issue);
        if (static_cast<int>(i) == d.first_reader) play.before_input = start;
        const double end = start + price.device;
        ends[i] = free[op.stream] = end;
        play.end = std::max(play.end, end);
        host = issue + price.host;
        play.host += price.host;
    }
    play.issued = host;
    return play;
}

std::array<double, stream_count> FlatSegment::busy(int direction, const std::vector<OpCost>& prices) const {
    std::array<double, stream_count> sums{};
    for (const FlatOp& op : directions_[direction].ops)
        sums[op.stream] += prices[static_cast<std::size_t>(op.price)].device;
    return sums;
}

std::int64_t FlatSegment::saved(const std::vector<std::int64_t>& bytes) const {
    std::int64_t sum = 0;
    for (const int id : saved_) sum += bytes[static_cast<std::size_t>(id)];
    return sum;
}

std::int64_t FlatSegment::least_workspace(int direction, const std::vector<std::int64_t>& bytes) const {
    const Direction& d = directions_[direction];
    std::vector<std::int64_t> change(d.ops.size() + 1, 0);
    for (const Life& life : d.lives) {
        change[static_cast<std::size_t>(life.first)] += bytes[static_cast<std::size_t>(life.tensor)];
        change[static_cast<std::size_t>(life.last) + 1] -= bytes[static_cast<std::size_t>(life.tensor)];
    }
    std::int64_t alive = 0, most = 0;
    for (const std::int64_t c : change) most = std::max(most, alive += c);
    return most;
}

std::vector<std::int32_t> signature(const Program& segment) {
    std::vector<std::int32_t> text;
    for (const Template& tmpl : segment.templates) {
        text.push_back(-2);
        for (const Op& op : tmpl.ops) {
            text.push_back(static_cast<std::int32_t>(op.kind) << 16 | static_cast<std::int32_t>(op.stream) << 8 |
                           static_cast<std::int32_t>(op.module));
            text.push_back(static_cast<std::int32_t>(op.group.axes) << 8 | static_cast<std::int32_t>(op.group.domain));
            if (const NormAttr* norm = std::get_if<NormAttr>(&op.attr)) // which recomputation reaches it
                text.push_back(static_cast<std::int32_t>(norm->within));
            for (const std::vector<TensorId>* ids : {&op.in, &op.out}) {
                for (const TensorId id : *ids) text.push_back(id == no_tensor ? no_tensor : root(segment, id));
                text.push_back(-3);
            }
        }
    }
    return text;
}

std::vector<std::int64_t> activation_bytes(const Program& segment) {
    std::vector<std::int64_t> bytes(segment.tensors.size(), 0);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        const Tensor& t = segment.tensors[i];
        if (t.storage != Storage::activation || t.base != no_tensor) continue;
        bytes[i] = aligned(t.bytes());
    }
    return bytes;
}

} // namespace moe
