// Rows (op id, rank, stream, start, end) of one step, predicted or measured: one format, so that both can be lined up.
#pragma once

#include "planner/plan/schedule.hpp"
#include "planner/program/fwd.hpp"
#include "planner/program/op_kind.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace moe::program {

struct TimelineRow {
    std::int32_t rank = 0; // global rank (predicted: the representative of its class)
    std::int32_t slot = 0; // into the rank's Program::slots
    std::int32_t op = 0;   // into the slot's template
    std::int16_t layer = -1;
    OpKind kind{};
    Stream stream{};
    Module module{};
    Phase phase{};
    plan::SlotKind slot_kind{};
    std::int16_t chunk = -1;
    std::int32_t micro_batch = 0;
    double start = 0.0, end = 0.0; // seconds from the start of the step; communication rows include the wait for peers
    double busy = 0.0;             // seconds of it spent working: without waiting for peers, a core or the host
};

// The op of a row in its rank's Program; none where the Program has no such op, because the row is of another one.
const Op* op_of(const Program& program, const TimelineRow& row);

struct Timeline {
    bool predicted = true;
    std::string plan_json;          // the plan it belongs to
    std::vector<int> ranks;         // ranks that have rows
    std::vector<int> pipeline_rank; // pipeline rank of each of them
    std::vector<int> represents;    // number of ranks that each of them stands for (measured: 1)
    double step_seconds = 0.0;      // measured: median of the recorded steps
    double tflops_per_gpu = 0.0;
    double memory_gib = 0.0;       // peak over ranks
    std::vector<TimelineRow> rows; // ordered by rank, then start
};

// Chrome trace JSON (Perfetto): one process per rank, one thread per stream, complete events in microseconds with
// args {slot, op, chunk, micro_batch, phase, layer, busy}; the fields above under "metadata". Written piece by piece
// through write_file(): a full disk leaves nothing behind and throws Error (failure).
void write_trace(const Timeline& timeline, const std::string& path);
// Reads what write_trace wrote; throws Error (bad_input) for anything else.
Timeline read_trace(const std::string& path);

} // namespace moe::program
