// Resolves a lowered segment's tensors into waits between ops and lifetimes, and plays the result.
#include "simulator/bound/flat_segment.hpp"

#include "planner/base/error.hpp"
#include "planner/memory/memory.hpp"
#include "planner/memory/packing.hpp"
#include "planner/program/program.hpp"
#include "simulator/estimate/segment_cache.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace moe::bound {
namespace {

bool copies_to_pages(const program::Op& op) { return op.kind == program::OpKind::stash_rows; }
bool copies_pages(const program::Op& op) {
    return op.kind == program::OpKind::stash_rows || op.kind == program::OpKind::unstash_rows;
}

// The stashed tensor of each pages' tensor, no_tensor for every other one.
std::vector<program::TensorId> stashed_of(const program::Program& program) {
    std::vector<program::TensorId> result(program.tensors.size(), program::no_tensor);
    for (const program::Op& op : program.templates[0].ops)
        if (copies_to_pages(op)) result[static_cast<std::size_t>(op.out[0])] = op.in[0];
    return result;
}

// Kind and first output tell the ops of a template apart; ops that write the same tensor repeat in order. What the
// backward computes or fetches again goes by the tensor that it repeats, and pages go by what they hold.
using OpName = std::pair<program::OpKind, program::TensorId>;
OpName name_of(const program::Program& program, const program::Op& op, bool again) {
    if (copies_to_pages(op)) return {op.kind, op.in[0]};
    for (const program::TensorId id : op.out)
        if (id != program::no_tensor)
            return {op.kind, again ? program.tensors[static_cast<std::size_t>(id)].again_of : id};
    return {op.kind, program::no_tensor};
}

// Ops of a template of the plain segment by name, handed out in order, again from the first when all are used.
class Originals {
public:
    // first: number of the template's first op.
    void add(const program::Program& plain, const program::Template& tmpl, int first, bool pages) {
        for (std::size_t i = 0; i < tmpl.ops.size(); ++i)
            if (copies_pages(tmpl.ops[i]) == pages)
                found_[name_of(plain, tmpl.ops[i], pages)].ops.push_back(first + static_cast<int>(i));
    }
    int next(const OpName& name) {
        const auto it = found_.find(name);
        if (it == found_.end()) return -1;
        std::vector<int>& ops = it->second.ops;
        return ops[it->second.used++ % ops.size()];
    }

private:
    struct Entry {
        std::vector<int> ops;
        std::size_t used = 0;
    };
    std::map<OpName, Entry> found_;
};

// The plain op that each op is or repeats, for both templates. What is computed again is not stashed, so that the
// segment may copy fewer tensors to pages and back.
std::array<std::vector<int>, 2> plain_ops(const program::Program& plain, const program::Program& segment) {
    const auto forwards = static_cast<int>(plain.templates[0].ops.size());
    std::array<std::vector<int>, 2> result;
    if (&plain == &segment) {
        for (std::size_t side = 0; side < 2; ++side) {
            result[side].resize(plain.templates[side].ops.size());
            std::iota(result[side].begin(), result[side].end(), side == 0 ? 0 : forwards);
        }
        return result;
    }
    Originals computed, copied;
    computed.add(plain, plain.templates[0], 0, false);
    copied.add(plain, plain.templates[0], 0, true);
    copied.add(plain, plain.templates[1], forwards, true);
    for (std::size_t side = 0; side < 2; ++side) {
        const std::vector<program::Op>& ops = plain.templates[side].ops;
        std::size_t next = 0; // op of the plain template
        const auto skip_copies = [&] {
            while (next < ops.size() && copies_pages(ops[next])) ++next;
        };
        for (const program::Op& op : segment.templates[side].ops) {
            skip_copies();
            int number = -1;
            if (copies_pages(op))
                number = copied.next(name_of(segment, op, true));
            else if (op.phase == program::Phase::recompute)
                number = computed.next(name_of(segment, op, true));
            else if (next < ops.size())
                number = (side == 0 ? 0 : forwards) + static_cast<int>(next++);
            const auto at = static_cast<std::size_t>(number);
            const auto sound = [&](const program::Op& original) {
                return original.flops == op.flops && original.bytes == op.bytes;
            };
            if (number < 0 || (op.phase == program::Phase::recompute && !sound(plain.templates[0].ops[at])))
                fail("segment: {} {} is not one of the plain segment's", program::to_string(op.phase),
                     program::to_string(op.kind));
            result[side].push_back(number);
        }
        skip_copies();
        if (next != ops.size())
            fail("segment: {} {} ops, the plain one has {}", next, side == 0 ? "forward" : "backward", ops.size());
    }
    return result;
}

// The plain tensor that each tensor of the segment is or repeats, which is as large.
std::vector<int> plain_tensors(const program::Program& plain, const program::Program& segment) {
    const std::vector<program::TensorId> stashed = stashed_of(plain), own = stashed_of(segment);
    std::map<program::TensorId, int> pages;
    std::size_t common = plain.tensors.size(); // Behind these stand what passes add: pages, and what is filled again.
    for (std::size_t i = stashed.size(); i-- > 0;)
        if (stashed[i] != program::no_tensor) {
            pages[stashed[i]] = static_cast<int>(i);
            common = i;
        }
    std::vector<int> result(segment.tensors.size());
    for (std::size_t i = 0; i < result.size(); ++i) {
        const program::TensorId original = segment.tensors[i].again_of;
        result[i] = static_cast<int>(i);
        if (own[i] != program::no_tensor)
            result[i] = pages.at(own[i]);
        else if (i >= common && original != program::no_tensor) // Others have themselves in `plain`.
            result[i] = static_cast<int>(original);
    }
    return result;
}

// Last writer of each tensor and the last reader on each stream, op by op.
struct Clock {
    int written = -1;
    std::array<int, program::stream_count> read;
    Clock() { read.fill(-1); }
};

} // namespace

FlatSegment::FlatSegment(const program::Program& plain, const program::Program& segment) {
    const std::array<std::vector<int>, 2> price_of = plain_ops(plain, segment);
    for (int direction = 0; direction < 2; ++direction)
        add_ops(direction, segment, price_of[static_cast<std::size_t>(direction)]);
    add_lives(segment, plain_tensors(plain, segment));
}

// Streams keep their order, so that an op waits for at most the latest op of each other stream.
void FlatSegment::add_ops(int direction, const program::Program& segment, const std::vector<int>& price_of) {
    Direction& d = directions_[direction];
    const std::vector<program::Op>& ops = segment.templates[static_cast<std::size_t>(direction)].ops;
    std::vector<Clock> clocks(segment.tensors.size());
    const program::TensorId message = segment.io.segment_message(direction);
    for (std::size_t i = 0; i < ops.size(); ++i) {
        const program::Op& op = ops[i];
        const auto own = static_cast<std::size_t>(op.stream);
        std::array<int, program::stream_count> latest;
        latest.fill(-1);
        const auto wait = [&](int other) {
            if (other < 0) return;
            int& seen = latest[d.ops[static_cast<std::size_t>(other)].stream];
            seen = std::max(seen, other);
        };
        for (const program::TensorId id : op.in) {
            if (id == program::no_tensor) continue;
            wait(clocks[static_cast<std::size_t>(memory::root(segment, id))].written);
            if (d.first_reader < 0 && id == message) d.first_reader = static_cast<int>(i);
        }
        FlatOp flat;
        flat.price = price_of[i];
        flat.stream = static_cast<std::uint8_t>(op.stream);
        flat.counts = op.kind == program::OpKind::expert_counts;
        flat.reads_begin = static_cast<int>(d.waits.size());
        if (flat.counts)
            for (const int other : latest)
                if (other >= 0) d.waits.push_back(other);
        flat.reads_end = flat.waits_begin = static_cast<int>(d.waits.size());
        for (const program::TensorId id : op.out) {
            if (id == program::no_tensor) continue;
            const Clock& clock = clocks[static_cast<std::size_t>(memory::root(segment, id))];
            wait(clock.written);
            for (const int reader : clock.read) wait(reader);
        }
        for (std::size_t s = 0; s < latest.size(); ++s)
            if (s != own && latest[s] >= 0) d.waits.push_back(latest[s]);
        flat.waits_end = static_cast<int>(d.waits.size());
        d.ops.push_back(flat);
        for (const program::TensorId id : op.in)
            if (id != program::no_tensor)
                clocks[static_cast<std::size_t>(memory::root(segment, id))].read[own] = static_cast<int>(i);
        for (const program::TensorId id : op.out)
            if (id != program::no_tensor)
                clocks[static_cast<std::size_t>(memory::root(segment, id))].written = static_cast<int>(i);
        if (program::is_communication(op.kind)) groups_ |= estimate::group_bit(op.group);
    }
}

void FlatSegment::add_lives(const program::Program& segment, const std::vector<int>& tensor_of) {
    const std::vector<memory::Use> use = memory::uses(segment);
    for (std::size_t id = 0; id < use.size(); ++id)
        if (use[id].saved()) saved_.push_back(tensor_of[id]);
    for (std::size_t t = 0; t < 2; ++t)
        for (const auto& [id, life] : memory::transients(segment, segment.templates[t], use))
            directions_[t].lives.push_back({tensor_of[static_cast<std::size_t>(id)], life.first, life.last});
}

FlatSegment::Play FlatSegment::play(int direction, const std::vector<cost::OpCost>& prices, double lead,
                                    double sync_seconds, std::vector<double>& ends) const {
    const Direction& d = directions_[direction];
    ends.resize(d.ops.size());
    std::array<double, program::stream_count> free{};
    Play play;
    double host = -lead;
    for (std::size_t i = 0; i < d.ops.size(); ++i) {
        const FlatOp& op = d.ops[i];
        const cost::OpCost& price = prices[static_cast<std::size_t>(op.price)];
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

std::array<double, program::stream_count> FlatSegment::busy(int direction,
                                                            const std::vector<cost::OpCost>& prices) const {
    std::array<double, program::stream_count> sums{};
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

std::vector<std::int32_t> signature(const program::Program& segment) {
    std::vector<std::int32_t> text;
    for (const program::Template& tmpl : segment.templates) {
        text.push_back(-2);
        for (const program::Op& op : tmpl.ops) {
            text.push_back(static_cast<std::int32_t>(op.kind) << 16 | static_cast<std::int32_t>(op.stream) << 8 |
                           static_cast<std::int32_t>(op.module));
            text.push_back(static_cast<std::int32_t>(op.group.axes) << 8 | static_cast<std::int32_t>(op.group.domain));
            if (const program::NormAttr* norm =
                    std::get_if<program::NormAttr>(&op.attr)) // Recomputation reaches norms by `within`.
                text.push_back(static_cast<std::int32_t>(norm->within));
            for (const program::Operands* ids : {&op.in, &op.out}) {
                for (const program::TensorId id : *ids)
                    text.push_back(id == program::no_tensor ? program::no_tensor : memory::root(segment, id));
                text.push_back(-3);
            }
        }
    }
    return text;
}

std::vector<std::int64_t> activation_bytes(const program::Program& segment) {
    std::vector<std::int64_t> bytes(segment.tensors.size(), 0);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        const program::Tensor& t = segment.tensors[i];
        if (t.storage != program::Storage::activation || t.base != program::no_tensor) continue;
        bytes[i] = memory::aligned(t.bytes());
    }
    return bytes;
}

} // namespace moe::bound
