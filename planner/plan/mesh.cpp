// Rank order strings turned into strides, and the communication groups that follow from them.
#include "planner/plan/mesh.hpp"

#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/stack_traits.hpp"

#include <algorithm>
#include <array>

namespace moe::plan {
namespace {

// One word of an order string with its degree in each factoring. The words shared by both (tp, dp, pp) name ETP, EDP
// and the same PP in the expert one; cp and ep each exist in one factoring only and have size 1 in the other.
struct Word {
    const char* name;
    std::uint16_t bit;
    int size[2]; // sizes by Domain
};

std::array<Word, 5> words(const Plan& p) {
    return {{{"tp", axis::tensor, {p.tp, p.etp}},
             {"cp", axis::context, {p.cp, 1}},
             {"ep", axis::expert, {1, p.ep}},
             {"dp", axis::data, {p.dp, p.edp}},
             {"pp", axis::pipeline, {p.pp, p.pp}}}};
}

std::vector<std::string> split(const std::string& order) {
    std::vector<std::string> parts;
    std::string::size_type begin = 0;
    for (;;) {
        const auto end = order.find('-', begin);
        parts.push_back(order.substr(begin, end == std::string::npos ? end : end - begin));
        if (end == std::string::npos) return parts;
        begin = end + 1;
    }
}

// The words in the order's sequence. A word that the order leaves out is appended where its degree is 1, as in
// Megatron.
std::vector<Word> sequence(const Plan& plan) {
    const auto known = words(plan);
    std::vector<Word> result;
    std::array<bool, 5> seen{};
    for (const std::string& part : split(plan.rank_order)) {
        const auto it = std::find_if(known.begin(), known.end(), [&](const Word& w) { return part == w.name; });
        if (it == known.end())
            refuse("rank_order \"{}\": unknown axis \"{}\": write tp, cp, ep, dp and pp joined by '-'",
                   shown(plan.rank_order), shown(part));
        const auto position = static_cast<std::size_t>(it - known.begin());
        if (seen[position])
            refuse("rank_order \"{}\": axis \"{}\" appears twice: name it once", shown(plan.rank_order), part);
        seen[position] = true;
        result.push_back(*it);
    }
    for (std::size_t i = 0; i < known.size(); ++i) {
        if (seen[i]) continue;
        const int degree = std::max(known[i].size[0], known[i].size[1]);
        if (degree != 1)
            refuse("rank_order \"{}\": axis \"{}\" is missing though its degree is {}: add it", shown(plan.rank_order),
                   known[i].name, degree);
        result.push_back(known[i]);
    }
    return result;
}

std::int64_t product(const Plan& plan, Domain domain) {
    std::int64_t world = 1;
    for (const Word& word : words(plan)) {
        const int size = word.size[static_cast<int>(domain)];
        if (size < 1) refuse("{} is {}: must be 1 or more", word.name, size);
        world *= size;
        if (world > plan.gpus) break; // This also keeps the product within 64 bits.
    }
    return world;
}

} // namespace

std::string to_string(Group group) {
    static constexpr struct {
        std::uint16_t bit;
        const char* dense;
        const char* expert;
    } names[] = {{axis::tensor, "tp", "etp"},
                 {axis::key_replicas, "tp_key_replicate", ""},
                 {axis::key_parts, "tp_key_shard", ""},
                 {axis::expert, "", "ep"},
                 {axis::expert_inner, "", "ep_inner"},
                 {axis::expert_outer, "", "ep_outer"},
                 {axis::data, "dp", "edp"},
                 {axis::shards, "dp_shard", "edp_shard"},
                 {axis::replicas, "dp_replicate", "edp_replicate"},
                 {axis::context, "cp", ""},
                 {axis::context_inner, "cp_inner", ""},
                 {axis::context_outer, "cp_outer", ""},
                 {axis::pipeline, "pp", "pp"}};
    std::string text;
    for (const auto& name : names) {
        const char* word = group.domain == Domain::dense ? name.dense : name.expert;
        if ((group.axes & name.bit) == 0 || *word == '\0') continue;
        if (!text.empty()) text += '+';
        text += word;
    }
    return text.empty() ? "none" : text;
}

int context_inner(const Plan& plan) {
    if (plan.cp_comm == ContextComm::alltoall) return plan.cp;
    if (plan.cp_comm == ContextComm::ring || plan.hardware == nullptr) return 1;
    const int together = plan.gpus <= plan.hardware->nvlink_domain ? plan.gpus : plan.hardware->nvlink_domain_used;
    int inner = std::max(1, std::min(plan.cp, together / plan.tp));
    while (plan.cp % inner != 0) --inner;
    return inner;
}

int domain_of_job(const machine::Hardware& hardware, int gpus) {
    int domain = std::max(1, std::min(hardware.nvlink_domain_used, gpus));
    if (gpus <= hardware.nvlink_domain) return gpus;
    while (gpus % domain != 0) --domain;
    return domain;
}

int expert_inner(const Plan& plan) {
    if (plan.dispatcher != Dispatcher::hybridep || plan.ep == 1 || plan.etp > 1 || plan.hardware == nullptr ||
        !stack_traits(plan).peer_memory_dispatch)
        return plan.ep;
    // Ranks between neighbours of an EP group: those along the axes that vary faster.
    const std::string& order = plan.rank_order;
    const std::size_t ep = order.find("ep");
    int stride = 1;
    for (const auto& [word, degree] : {std::pair{"dp", plan.edp}, std::pair{"pp", plan.pp}})
        if (order.find(word) < ep) stride *= std::max(1, degree);
    const int domain = domain_of_job(*plan.hardware, plan.gpus);
    int inner = std::min(plan.ep, most_peer_ranks);
    while (inner > 1 && (plan.ep % inner != 0 || domain % (inner * stride) != 0)) --inner;
    return inner;
}

int weight_replicas(const Plan& plan, Domain domain) {
    if (domain == Domain::dense) return plan.fsdp_replicas;
    return plan.edp % plan.fsdp_replicas == 0 ? plan.fsdp_replicas : 1;
}

int key_replicas(const Plan& plan) {
    int replicas = 1;
    if (plan.model == nullptr) return replicas;
    for (const model::LayerKind& kind : plan.model->kinds)
        if (kind.attention.replicates_keys(plan.tp)) replicas = std::max(replicas, plan.tp / kind.attention.kv_heads);
    return replicas;
}

std::int64_t Plan::attention_rows() const { return tokens_gathered() * context_inner(*this); }

bool Plan::passes_states() const {
    return std::any_of(model->kinds.begin(), model->kinds.end(), [](const model::LayerKind& kind) {
        return kind.attention.kind == model::AttentionKind::gated_delta ||
               kind.attention.kind == model::AttentionKind::mamba || kind.attention.has_opaque();
    });
}

int group_size(const Plan& plan, Group group) {
    const bool dense = group.domain == Domain::dense;
    int size = 1;
    if (group.axes & axis::tensor) size *= dense ? plan.tp : plan.etp;
    if ((group.axes & (axis::key_replicas | axis::key_parts)) != 0 && dense) {
        const int copies = key_replicas(plan);
        if (group.axes & axis::key_replicas) size *= copies;
        if (group.axes & axis::key_parts) size *= plan.tp / copies;
    }
    if (group.axes & axis::context) size *= dense ? plan.cp : 1;
    if (group.axes & axis::context_inner) size *= context_inner(plan);
    if (group.axes & axis::context_outer) size *= plan.cp / context_inner(plan);
    if (group.axes & axis::expert) size *= dense ? 1 : plan.ep;
    if ((group.axes & (axis::expert_inner | axis::expert_outer)) != 0 && !dense) {
        const int inner = expert_inner(plan);
        if (group.axes & axis::expert_inner) size *= inner;
        if (group.axes & axis::expert_outer) size *= plan.ep / inner;
    }
    if (group.axes & axis::data) size *= dense ? plan.dp : plan.edp;
    const int replicas = weight_replicas(plan, group.domain);
    if (group.axes & axis::shards) size *= (dense ? plan.dp : plan.edp) / replicas;
    if (group.axes & axis::replicas) size *= replicas;
    if (group.axes & axis::pipeline) size *= plan.pp;
    return size;
}

Mesh::Mesh(const Plan& plan) : world_(plan.gpus) {
    for (const Domain domain : {Domain::dense, Domain::expert}) {
        const std::int64_t world = product(plan, domain);
        if (world != plan.gpus)
            refuse("mesh: {} = {} for {}: make them equal", domain == Domain::dense ? "tp*cp*dp*pp" : "etp*ep*edp*pp",
                   world > plan.gpus ? "more than " + counted(plan.gpus, "rank") : counted(world, "rank"),
                   counted(plan.gpus, "GPU"));
    }
    int pipeline_stride[2] = {1, 1};
    int stride[2] = {1, 1};
    for (const Word& word : sequence(plan)) {
        for (int d = 0; d < 2; ++d) {
            if (word.bit == axis::pipeline) pipeline_stride[d] = stride[d];
            if (const int copies = d == 0 && word.bit == axis::tensor ? key_replicas(plan) : 1; copies > 1) {
                axes_[d].push_back({axis::tensor | axis::key_replicas, copies, stride[d]});
                axes_[d].push_back({axis::tensor | axis::key_parts, plan.tp / copies, stride[d] * copies});
            } else if (word.bit == axis::context && d == 0) {
                const int inner = context_inner(plan);
                axes_[d].push_back({axis::context | axis::context_inner, inner, stride[d]});
                axes_[d].push_back({axis::context | axis::context_outer, plan.cp / inner, stride[d] * inner});
            } else if (word.bit == axis::expert && d == 1) {
                const int inner = expert_inner(plan);
                axes_[d].push_back({axis::expert | axis::expert_inner, inner, stride[d]});
                axes_[d].push_back({axis::expert | axis::expert_outer, plan.ep / inner, stride[d] * inner});
            } else if (const int copies = weight_replicas(plan, static_cast<Domain>(d));
                       word.bit == axis::data && copies > 1) {
                const int shards = word.size[d] / copies;
                axes_[d].push_back({axis::data | axis::shards, shards, stride[d]});
                axes_[d].push_back({axis::data | axis::replicas, copies, stride[d] * shards});
            } else {
                axes_[d].push_back({word.bit, word.size[d], stride[d]});
            }
            stride[d] *= word.size[d];
        }
    }
    // Equal degree and equal stride over the same ranks are the same groups.
    if (plan.pp > 1 && pipeline_stride[0] != pipeline_stride[1])
        refuse("rank_order \"{}\": pipeline neighbours are {} ranks apart in the dense mesh and {} in the expert mesh: "
               "put pp last, or choose degrees that agree",
               plan.rank_order, pipeline_stride[0], pipeline_stride[1]);
}

int Mesh::group_size(Group group) const {
    int size = 1;
    for (const Axis& a : axes_[static_cast<int>(group.domain)])
        if ((a.bit & group.axes) != 0) size *= a.size;
    return size;
}

std::vector<int> Mesh::members(Group group, int rank) const {
    std::vector<int> result{rank};
    for (const Axis& a : axes_[static_cast<int>(group.domain)])
        if ((a.bit & group.axes) != 0) result[0] -= (rank / a.stride) % a.size * a.stride;
    for (const Axis& a : axes_[static_cast<int>(group.domain)]) {
        if ((a.bit & group.axes) == 0) continue;
        const std::size_t inner = result.size(); // members along the axes to the left, which vary faster
        for (int i = 1; i < a.size; ++i)
            for (std::size_t k = 0; k < inner; ++k) result.push_back(result[k] + i * a.stride);
    }
    return result;
}

std::vector<std::pair<int, int>> Mesh::runs(Group group) const {
    std::vector<std::pair<int, int>> runs;
    for (const Axis& a : axes_[static_cast<int>(group.domain)]) {
        if ((a.bit & group.axes) == 0 || a.size == 1) continue;
        if (!runs.empty() && runs.back().first * runs.back().second == a.stride)
            runs.back().second *= a.size;
        else
            runs.emplace_back(a.stride, a.size);
    }
    return runs;
}

bool Mesh::same_members(Group a, Group b) const { return runs(a) == runs(b); }

std::vector<int> Mesh::first_members(Group group, int modulus) const {
    std::vector<bool> found(static_cast<std::size_t>(modulus), false);
    found[0] = true;
    for (const Axis& a : axes_[static_cast<int>(group.domain)]) {
        if ((a.bit & group.axes) != 0) continue;
        const std::vector<bool> before = found;
        for (int i = 1; i < std::min(a.size, modulus); ++i) // More members come round again.
            for (int r = 0; r < modulus; ++r)
                if (before[static_cast<std::size_t>(r)])
                    found[static_cast<std::size_t>((r + std::int64_t{i} * a.stride) % modulus)] = true;
    }
    std::vector<int> remainders;
    for (int r = 0; r < modulus; ++r)
        if (found[static_cast<std::size_t>(r)]) remainders.push_back(r);
    return remainders;
}

int Mesh::index(Group group, int rank) const {
    int position = 0;
    int weight = 1;
    for (const Axis& a : axes_[static_cast<int>(group.domain)]) {
        if ((a.bit & group.axes) == 0) continue;
        position += (rank / a.stride) % a.size * weight;
        weight *= a.size;
    }
    return position;
}

int Mesh::coordinate(Domain domain, std::uint16_t one_axis, int rank) const { return index({domain, one_axis}, rank); }

} // namespace moe::plan
