// A small snapshot of two ranks, made without a trainer.
#pragma once

#include "engine/weights/checkpoint.hpp"

#include <cstdint>
#include <string>

// One parameter "a" of 4 x 6, whose left half rank 0 holds and whose right half rank 1 does. The values of a kind of
// state count up from `base` + 100 times its number.
inline moe::weights::Snapshot made_snapshot(std::int64_t step, const std::string& run, float base = 0.0f) {
    using namespace moe::weights;
    Snapshot snapshot;
    snapshot.state = {step, 8 * step, 1, "made", R"({"hidden_size":6})", {{2, {1.0f, 2.0f}}}, {}, {0.5f, 2.0f}, 0};
    snapshot.state.data = {true, 4, 8, {{"text", 1000, 10, 7, 1.0, 0, 0, 4, 32 * step, 8 * step}}};
    snapshot.world = 2;
    snapshot.run = run;
    for (int rank = 0; rank < 2; ++rank) {
        Slice slice{"a", 4, 6, {{3 * rank, 3, 6, 4}}, 12, {}};
        for (std::size_t kind = 0; kind < kinds_of(false).size(); ++kind)
            for (int i = 0; i < 12; ++i) {
                const int place = i / 3 * 6 + 3 * rank + i % 3;
                slice.values[kind].push_back(base + 100.0f * static_cast<float>(kind) + static_cast<float>(place));
            }
        snapshot.ranks.push_back({rank, {slice}});
    }
    return snapshot;
}
