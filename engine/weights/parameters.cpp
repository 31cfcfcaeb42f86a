// Counter-based initial weights and the map between flat shards and global tensors.
#include "engine/weights/parameters.hpp"

#include "kernels/bf16.hpp"
#include "kernels/deviate.hpp"
#include "kernels/kernels.hpp"
#include "kernels/mxfp8.hpp"
#include "planner/base/error.hpp"
#include "planner/plan/mesh.hpp"

#include <algorithm>
#include <cmath>
#include <span>
#include <thread>
#include <unordered_map>

namespace moe::weights {

namespace {

std::string global_name(const program::Parameter& p, int expert) {
    const std::size_t at = p.name.find("{}");
    if (at == std::string::npos) return p.name;
    return p.name.substr(0, at) + std::to_string(expert) + p.name.substr(at + 2);
}

// Elements [begin, end) of a local slice as pieces, row by row (whole rows of an uncut width at once).
void add_pieces(LocalParameter& local, const program::Parameter& p, int part, std::int64_t begin, std::int64_t end,
                std::int64_t shard) {
    const std::int64_t row0 = p.shard_dim == 0 ? part * p.local_rows : 0;
    const std::int64_t col0 = p.shard_dim == 1 ? part * p.local_cols : 0;
    const bool contiguous = p.local_cols == p.cols;
    while (begin < end) {
        const std::int64_t row = row0 + begin / p.local_cols, col = begin % p.local_cols;
        if (row >= p.rows) return; // The rest is padding of the vocabulary, always at the end.
        const std::int64_t limit = contiguous ? (p.rows - row) * p.cols - col : p.local_cols - col;
        const std::int64_t count = std::min(end - begin, limit);
        local.pieces.push_back({shard, row * p.cols + col0 + col, count});
        begin += count;
        shard += count;
    }
}

} // namespace

std::uint64_t random_stream(std::uint64_t seed, const std::string& name) {
    std::uint64_t hash = splitmix(seed);
    for (const char c : name) hash = splitmix(hash ^ static_cast<unsigned char>(c));
    return hash;
}

std::vector<LocalParameter> local_parameters(const program::Program& program, const plan::Mesh& mesh, int rank) {
    std::vector<LocalParameter> list;
    std::unordered_map<std::string, int> local_experts; // numbers by name with its placeholder
    for (const program::Parameter& p : program.parameters) {
        int& count = local_experts[p.name];
        count = std::max(count, p.local_expert + 1);
    }
    for (const program::Parameter& p : program.parameters) {
        const program::Bucket& bucket = program.buckets[static_cast<std::size_t>(p.bucket)];
        const int part = mesh.coordinate(p.domain, p.cut, rank);
        const int expert = p.local_expert < 0 ? -1
                                              : mesh.coordinate(plan::Domain::expert, plan::axis::expert, rank) *
                                                        local_experts[p.name] +
                                                    p.local_expert;
        // HSDP's copies of a shard, and frozen weights: the first rank that holds them speaks for all.
        const bool copy = p.copy || (bucket.replicas.axes != 0 && mesh.index(bucket.replicas, rank) > 0);
        LocalParameter local{global_name(p, expert), p.rows, p.cols, p.bucket, p.init, p.init_std, copy,
                             bucket.moments(),       {}};
        const std::int64_t own = bucket.elements / bucket.group_size;
        const std::int64_t first = bucket.group_size > 1 ? mesh.index(bucket.group, rank) * own : 0;
        const std::int64_t begin = std::max(p.offset, first),
                           end = std::min(p.offset + p.local_elements(), first + own);
        if (begin < end) add_pieces(local, p, part, begin - p.offset, end - p.offset, begin - first);
        list.push_back(std::move(local));
    }
    return list;
}

namespace {

Dst stored_weights(const program::Program& program, const program::Bucket& bucket, const device::Arena& arena) {
    const program::Tensor& weights = program.tensors[static_cast<std::size_t>(bucket.weight_shard)];
    return {arena.at(bucket.weight_shard), weights.dtype == program::Dtype::bf16 ? Type::bf16 : Type::f32};
}

} // namespace

void store_weights(const program::Program& program, const program::Bucket& bucket, const device::Arena& arena,
                   std::int64_t first, const float* values, std::int64_t count) {
    device::Device& device = arena.device();
    const auto bytes = static_cast<std::size_t>(count) * sizeof(float);
    if (!bucket.frozen) device.write(arena.as<float>(bucket.kept_master()) + first, values, bytes);
    if (!bucket.matrices.empty()) return; // A step begins by quantizing the masters.
    const Dst target = stored_weights(program, bucket, arena) + first;
    if (target.type == Type::f32) return device.write(target.data, values, bytes);
    std::vector<std::uint16_t> rounded(static_cast<std::size_t>(count));
    cpu_kernels().cast({values, Type::f32}, {rounded.data(), target.type}, count, nullptr);
    device.write(target.data, rounded.data(), rounded.size() * sizeof rounded[0]);
}

const char* to_string(StateKind kind) {
    constexpr const char* names[] = {"weight", "exp_avg", "exp_avg_sq", "average"};
    return names[static_cast<std::size_t>(kind)];
}

namespace {

program::TensorId tensor_of(const program::Bucket& bucket, StateKind kind) {
    const bool away = bucket.host_master != program::no_tensor;
    switch (kind) {
    case StateKind::weight:
        return bucket.kept_master();
    case StateKind::exp_avg:
        return away ? bucket.host_exp_avg : bucket.exp_avg;
    case StateKind::exp_avg_sq:
        return away ? bucket.host_exp_avg_sq : bucket.exp_avg_sq;
    case StateKind::average:
        break;
    }
    fail("the {} of a weight lies in no bucket", to_string(kind));
}

// Values of an MXFP8 tensor, in whole blocks around [first, first + count).
struct Blocks {
    std::int64_t first, count;
    std::uint8_t *code, *scale; // where the arena has them
    Blocks(const program::Program& program, program::TensorId id, const device::Arena& arena, std::int64_t from,
           std::int64_t n)
        : first(from / mxfp8_block * mxfp8_block),
          count((from + n + mxfp8_block - 1) / mxfp8_block * mxfp8_block - first),
          code(arena.as<std::uint8_t>(id) + first),
          scale(arena.as<std::uint8_t>(id) + program.tensors[static_cast<std::size_t>(id)].elements() +
                first / mxfp8_block) {}

    std::vector<float> read(device::Device& device) const {
        std::vector<std::uint8_t> codes(static_cast<std::size_t>(count)), scales(codes.size() / mxfp8_block);
        device.read(codes.data(), code, codes.size());
        device.read(scales.data(), scale, scales.size());
        std::vector<float> values(codes.size());
        decode_mxfp8(codes.data(), scales.data(), count, values.data());
        return values;
    }
    void write(device::Device& device, const std::vector<float>& values) const {
        std::vector<std::uint8_t> codes(values.size()), scales(values.size() / mxfp8_block);
        encode_mxfp8(values.data(), count, codes.data(), scales.data());
        device.write(code, codes.data(), codes.size());
        device.write(scale, scales.data(), scales.size());
    }
};

bool is_mxfp8(const program::Program& program, program::TensorId id) {
    return program.tensors[static_cast<std::size_t>(id)].dtype == program::Dtype::mxfp8;
}

bool is_bf16(const program::Program& program, program::TensorId id) {
    return program.tensors[static_cast<std::size_t>(id)].dtype == program::Dtype::bf16;
}

} // namespace

void load_state(const program::Program& program, const program::Bucket& bucket, const device::Arena& arena,
                StateKind kind, std::int64_t first, float* values, std::int64_t count) {
    const program::TensorId id = tensor_of(bucket, kind);
    const auto n = static_cast<std::size_t>(count);
    if (is_mxfp8(program, id)) {
        const Blocks blocks(program, id, arena, first, count);
        const std::vector<float> held = blocks.read(arena.device());
        std::copy_n(held.begin() + (first - blocks.first), count, values);
        return;
    }
    if (!is_bf16(program, id)) return arena.device().read(values, arena.as<float>(id) + first, n * sizeof(float));
    std::vector<std::uint16_t> stored(n);
    arena.device().read(stored.data(), arena.as<std::uint16_t>(id) + first, n * sizeof stored[0]);
    std::transform(stored.begin(), stored.end(), values, float_of_bf16);
}

void store_state(const program::Program& program, const program::Bucket& bucket, const device::Arena& arena,
                 StateKind kind, std::int64_t first, const float* values, std::int64_t count) {
    if (kind == StateKind::weight) return store_weights(program, bucket, arena, first, values, count);
    const program::TensorId id = tensor_of(bucket, kind);
    const auto n = static_cast<std::size_t>(count);
    if (is_mxfp8(program, id)) { // Neighbours in the same block keep their values.
        const Blocks blocks(program, id, arena, first, count);
        std::vector<float> held = blocks.read(arena.device());
        std::copy_n(values, count, held.begin() + (first - blocks.first));
        blocks.write(arena.device(), held);
        return;
    }
    if (!is_bf16(program, id)) return arena.device().write(arena.as<float>(id) + first, values, n * sizeof(float));
    std::vector<std::uint16_t> rounded(n);
    std::transform(values, values + n, rounded.begin(), bf16_of_float);
    arena.device().write(arena.as<std::uint16_t>(id) + first, rounded.data(), n * sizeof rounded[0]);
}

void clear_blocks(const program::Program& program, const device::Arena& arena) {
    for (const program::Bucket& bucket : program.buckets) {
        const program::TensorId id = bucket.frozen ? program::no_tensor : tensor_of(bucket, StateKind::exp_avg);
        if (id == program::no_tensor || !is_mxfp8(program, id)) continue;
        const program::Tensor& tensor = program.tensors[static_cast<std::size_t>(id)];
        arena.device().fill(arena.at(id), 0, static_cast<std::size_t>(tensor.bytes()));
    }
}

namespace {

// Elements [first, first + values.size()) of a parameter as it starts.
void draw(const LocalParameter& p, std::uint64_t stream, std::int64_t first, std::span<float> values) {
    const auto deviates = [&](double std) {
        cpu_kernels().draw_normal(stream, first, std, values.data(), static_cast<std::int64_t>(values.size()), nullptr);
    };
    switch (p.init) {
    case program::Init::normal:
        return deviates(p.init_std);
    case program::Init::ones:
        return std::fill(values.begin(), values.end(), 1.0f);
    case program::Init::log_counts:
        for (std::size_t i = 0; i < values.size(); ++i)
            values[i] = std::log(static_cast<float>(first + static_cast<std::int64_t>(i) + 1));
        return;
    case program::Init::steps:
        deviates(1.0);
        for (float& value : values) {
            const double even = 0.5 * std::erfc(-static_cast<double>(value) / std::sqrt(2.0)); // in [0, 1]
            const double step = std::pow(10.0, 2.0 * even - 3.0);
            value = static_cast<float>(step + std::log(-std::expm1(-step)));
        }
        return;
    }
}

void draw_by_threads(const LocalParameter& p, std::uint64_t stream, std::int64_t first, std::span<float> values,
                     int threads) {
    constexpr std::size_t worthwhile = std::size_t{1} << 17; // elements that take longer than starting a thread
    const std::size_t parts = std::clamp<std::size_t>(values.size() / worthwhile, 1, static_cast<std::size_t>(threads));
    std::vector<std::jthread> helpers;
    for (std::size_t part = 0; part < parts; ++part) {
        const std::size_t begin = values.size() * part / parts, end = values.size() * (part + 1) / parts;
        const auto job = [&p, stream, at = first + static_cast<std::int64_t>(begin),
                          own = values.subspan(begin, end - begin)] { draw(p, stream, at, own); };
        if (part + 1 == parts)
            job();
        else
            helpers.emplace_back(job);
    }
}

// Draws on a device that has the masters, where they lie.
void draw_there(const LocalParameter& p, std::uint64_t stream, const Piece& piece, const program::Program& program,
                const device::Arena& arena, const Kernels& kernels) {
    const program::Bucket& bucket = program.buckets[static_cast<std::size_t>(p.bucket)];
    void* queue = arena.device().queue()->stream();
    float* master = arena.as<float>(bucket.kept_master()) + piece.shard;
    kernels.draw_normal(stream, piece.global, p.init_std, master, piece.count, queue);
    if (!bucket.matrices.empty()) return; // A step begins by quantizing the masters.
    kernels.cast({master, Type::f32}, stored_weights(program, bucket, arena) + piece.shard, piece.count, queue);
}

} // namespace

void initialize_parameters(const program::Program& program, const std::vector<LocalParameter>& parameters,
                           const device::Arena& arena, const Kernels& kernels, std::uint64_t seed, int threads) {
    for (const program::Bucket& bucket : program.buckets)
        for (const program::TensorId id :
             {bucket.weights, bucket.gradients, tensor_of(bucket, StateKind::weight),
              tensor_of(bucket, StateKind::exp_avg), tensor_of(bucket, StateKind::exp_avg_sq)}) {
            if (id == program::no_tensor) continue;
            const program::Tensor& tensor = program.tensors[static_cast<std::size_t>(id)];
            arena.device().fill(arena.at(id), 0, static_cast<std::size_t>(tensor.bytes()));
        }
    constexpr std::int64_t most = std::int64_t{1} << 24; // elements drawn at once; large weights need little host RAM
    std::vector<float> values;
    for (const LocalParameter& p : parameters) {
        if (p.init == program::Init::normal && p.init_std == 0.0) continue;
        const std::uint64_t stream = random_stream(seed, p.name);
        const program::Bucket& bucket = program.buckets[static_cast<std::size_t>(p.bucket)];
        const bool there = arena.device().queue() != nullptr && bucket.host_master == program::no_tensor &&
                           !bucket.frozen && p.init == program::Init::normal;
        for (const Piece& piece : p.pieces) {
            if (there) {
                draw_there(p, stream, piece, program, arena, kernels);
                continue;
            }
            for (std::int64_t done = 0; done < piece.count; done += most) {
                values.resize(static_cast<std::size_t>(std::min(most, piece.count - done)));
                draw_by_threads(p, stream, piece.global + done, values, threads);
                store_weights(program, bucket, arena, piece.shard + done, values.data(),
                              static_cast<std::int64_t>(values.size()));
            }
        }
    }
    if (arena.device().queue() != nullptr) arena.device().queue()->wait();
}

} // namespace moe::weights
