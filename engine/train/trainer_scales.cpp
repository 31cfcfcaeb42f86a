// Delayed scaling: scales of a step's operands from their histories, and the magnitudes that the step adds to them.
#include "engine/train/trainer_processes.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace moe::train {

namespace {

// The name of a quantized tensor in every plan.
std::string name_of(const program::ScaledIo& linear, std::size_t role) {
    constexpr const char* roles[program::scaled_roles] = {"in", "weight", "grad"}; // by RoundAttr::Role
    const std::string layer = linear.layer < 0 ? "" : fmt::format("layer{}.", linear.layer);
    return fmt::format("{}{}.{}", layer, linear.name, roles[role]);
}

// Calls visit(place, name) for every operand.
template <class Visit>
void each_operand(const program::Program& program, Visit visit) {
    constexpr auto roles = static_cast<std::size_t>(program::scaled_roles);
    for (std::size_t i = 0; i < program.io.scaled.size() * roles; ++i)
        visit(i, name_of(program.io.scaled[i / roles], i % roles));
}

} // namespace

bool Trainer::delays_scales() const {
    return std::any_of(programs_.begin(), programs_.end(),
                       [](const program::Program& program) { return !program.io.scaled.empty(); });
}

void Trainer::write_windows(Rank& r) const {
    const program::Program& program = program_of(r);
    std::vector<float> windows;
    each_operand(program,
                 [&](std::size_t, const std::string& name) { windows.push_back(scales_.window(name, done_ + 1)); });
    r.device->write(r.arena->at(program.io.scale_windows), windows.data(), windows.size() * sizeof windows[0]);
}

void Trainer::add_largest(int stage, std::span<const float> values) {
    each_operand(programs_[static_cast<std::size_t>(stage)],
                 [&](std::size_t place, const std::string& name) { scales_.add(name, done_, values[place]); });
}

// Every rank of a pipeline stage has the same: one speaks for it. Process 0, which writes checkpoints, gets those of
// all stages.
void Trainer::keep_largest() {
    if (!delays_scales()) return;
    std::vector<float> flat; // each stage, and what it has
    for (int stage = 0; stage < plan_.pp; ++stage) {
        const auto speaker =
            std::find_if(ranks_.begin(), ranks_.end(), [stage](const Rank& r) { return r.stage == stage; });
        const program::Program& program = programs_[static_cast<std::size_t>(stage)];
        if (speaker == ranks_.end() || program.io.scaled.empty()) continue;
        std::vector<float> values(program.io.scaled.size() * program::scaled_roles);
        speaker->device->read(values.data(), speaker->arena->at(program.io.scale_largest),
                              values.size() * sizeof values[0]);
        add_largest(stage, values);
        flat.push_back(static_cast<float>(stage));
        flat.insert(flat.end(), values.begin(), values.end());
    }
    if (transport() == nullptr) return;
    std::vector<bool> known(static_cast<std::size_t>(plan_.pp), false);
    for (const std::vector<float>& part : gathered(flat)) {
        if (part.empty()) continue;
        const int stage = static_cast<int>(part[0]);
        if (stage != ranks_.front().stage && !known[static_cast<std::size_t>(stage)])
            add_largest(stage, std::span(part).subspan(1));
        known[static_cast<std::size_t>(stage)] = true;
    }
}

} // namespace moe::train
