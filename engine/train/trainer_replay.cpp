// Router replay of a trainer: choices of routers between the ranks' rows and the tokens of the global batch.
#include "engine/train/trainer_processes.hpp"

#include "engine/base/crc32c.hpp"
#include "planner/model/model.hpp"

#include <algorithm>
#include <numeric>
#include <span>

namespace moe::train {

// In Programs that take steps, and in those that run between them, whose inputs must lie at the same places.
std::vector<std::vector<passes::KeptRouting>> Trainer::keep_routing(std::vector<program::Program>& programs,
                                                                    bool replay) const {
    std::vector<std::vector<passes::KeptRouting>> kept;
    if (options_.record_routing.empty() && options_.replay_routing.empty()) return kept;
    const char* const option = options_.record_routing.empty() ? "--replay-routing" : "--record-routing";
    for (program::Program& program : programs)
        kept.push_back(passes::keep_routing(program, replay && !options_.replay_routing.empty()));
    if (std::all_of(kept.begin(), kept.end(), [](const auto& layers) { return layers.empty(); }))
        refuse("{}: {} has no routed experts", option, plan_.model->name);
    if (plan_.router.forced && !options_.replay_routing.empty())
        refuse("--replay-routing {}: balance = forced chooses the experts itself: use balance = natural",
               options_.replay_routing);
    return kept;
}

// A step as its file has it, with an empty index.
RoutedStep Trainer::routed_step(std::int64_t step, std::int64_t samples) const {
    RoutedStep routed{step, samples, plan_.seq, 0, {}};
    for (const std::vector<passes::KeptRouting>& stage : kept_routing_)
        for (const passes::KeptRouting& kept : stage) routed.layers[kept.layer] = {kept.experts, kept.top_k, {}};
    return routed;
}

void Trainer::check_replay() const {
    if (options_.replay_routing.empty()) return;
    std::int64_t samples = samples_;
    for (std::int64_t step = done_ + 1; step <= options_.steps; ++step) {
        const std::int64_t batch = options_.ramp.batch(samples, plan_.gbs);
        check_routing(options_.replay_routing, routed_step(step, batch));
        samples += batch;
    }
}

namespace {

std::uint32_t crc_of(std::span<const std::int32_t> tokens) {
    return engine::crc32c({reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes()});
}

} // namespace

// Every process reads the whole file, as it reads the whole batch.
void Trainer::load_routing() {
    if (options_.replay_routing.empty()) return;
    if (!replay_checked_) check_replay();
    replay_checked_ = true;
    RoutedStep routed = routed_step(done_ + 1, batch_);
    routed.tokens_crc32c = crc_of(std::span(tokens_).first(static_cast<std::size_t>(batch_ * (plan_.seq + 1))));
    read_routing(options_.replay_routing, routed);
    replayed_ = std::move(routed.layers);
}

// Rows are those of write_rows(), shared out over the ranks of TP in one piece each.
template <class Visit>
void Trainer::for_each_token(int rank, int micro_batch, Visit visit) const {
    const std::vector<std::int32_t> positions = positions_of(rank);
    const std::int64_t rows = plan_.tokens_local(),
                       first = rows * mesh_.coordinate(plan::Domain::dense, plan::axis::tensor, rank),
                       data = mesh_.coordinate(plan::Domain::dense, plan::axis::data, rank),
                       sample = (micro_batch * plan_.dp + data) * plan_.mbs;
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t place = (first + row) / plan_.mbs, sequence = (first + row) % plan_.mbs;
        visit(row, (sample + sequence) * plan_.seq + positions[static_cast<std::size_t>(place)]);
    }
}

void Trainer::write_routing(Rank& r) {
    if (replayed_.empty()) return;
    std::vector<std::int32_t> rows;
    for (const passes::KeptRouting& kept : kept_routing_[static_cast<std::size_t>(r.stage)])
        for (int j = 0; j < micro_batches(); ++j) {
            const std::vector<std::int32_t>& index = replayed_.at(kept.layer).index;
            rows.resize(static_cast<std::size_t>(plan_.tokens_local() * kept.top_k));
            for_each_token(r.rank, j, [&](std::int64_t row, std::int64_t token) {
                std::copy_n(index.begin() + token * kept.top_k, kept.top_k, rows.begin() + row * kept.top_k);
            });
            r.device->write(r.arena->at(kept.index, j), rows.data(), rows.size() * sizeof rows[0]);
        }
}

// Process 0 writes what all ranks have chosen: by rank layers, micro-batches and rows, one behind the other.
void Trainer::record_routing() const {
    if (options_.record_routing.empty()) return;
    const int count = micro_batches();
    std::vector<std::vector<std::int32_t>> chosen;
    for (const Rank& r : ranks_) {
        std::vector<std::int32_t>& all = chosen.emplace_back();
        for (const passes::KeptRouting& kept : kept_routing_[static_cast<std::size_t>(r.stage)])
            for (int j = 0; j < count; ++j) {
                const auto rows = static_cast<std::size_t>(plan_.tokens_local() * kept.top_k);
                all.resize(all.size() + rows);
                r.device->read(&all[all.size() - rows], r.arena->at(kept.index, j), rows * sizeof all[0]);
            }
    }
    if (transport() != nullptr) chosen = gathered(chosen.front());
    if (transport() != nullptr && transport()->rank() != 0) return;
    RoutedStep routed = routed_step(done_, batch_);
    routed.tokens_crc32c = crc_of(std::span(tokens_).first(static_cast<std::size_t>(batch_ * (plan_.seq + 1))));
    for (std::size_t rank = 0; rank < chosen.size(); ++rank) {
        auto from = chosen[rank].begin();
        const int stage = stage_of_rank(static_cast<int>(rank));
        for (const passes::KeptRouting& kept : kept_routing_[static_cast<std::size_t>(stage)])
            for (int j = 0; j < count; ++j) {
                std::vector<std::int32_t>& index = routed.layers.at(kept.layer).index;
                index.resize(static_cast<std::size_t>(batch_ * plan_.seq * kept.top_k));
                for_each_token(static_cast<int>(rank), j, [&](std::int64_t row, std::int64_t token) {
                    std::copy_n(from + row * kept.top_k, kept.top_k, index.begin() + token * kept.top_k);
                });
                from += plan_.tokens_local() * kept.top_k;
            }
    }
    train::write_routing(options_.record_routing, routed);
}

} // namespace moe::train
