// Hardware profiles as text: what calibrate writes, and what a plan carries.
#include "planner/base/schema.hpp"
#include "planner/machine/hardware.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace moe::machine {
namespace {

nlohmann::ordered_json by_members_json(const std::map<int, double>& bytes) {
    auto rows = nlohmann::ordered_json::array();
    for (const auto& [members, each] : bytes) rows.push_back({members, each});
    return rows;
}

nlohmann::ordered_json communicators_json(const CommunicatorBytes& bytes) {
    const std::map<int, double> any{{2, bytes.messages}};
    if (bytes.first == 0.0 && bytes.collective == any && bytes.pairwise == any) return bytes.messages;
    return {{"first", bytes.first},
            {"first_pairwise", bytes.first_pairwise},
            {"collective", by_members_json(bytes.collective)},
            {"pairwise", by_members_json(bytes.pairwise)},
            {"messages", bytes.messages}};
}

nlohmann::ordered_json link_json(const Link& link) {
    nlohmann::ordered_json json{{"bandwidth", link.bandwidth}, {"latency", link.latency}};
    if (link.message > 0.0) json["message"] = link.message;
    return json;
}

} // namespace

std::string to_json(const Hardware& hardware) {
    nlohmann::ordered_json json;
    json["schema"] = schema::hardware;
    json["name"] = hardware.name;
    if (hardware.cpu) {
        json["cpu"] = true;
        json["cores"] = hardware.cores;
    } else {
        json["vendor"] = hardware.vendor;
        json["compute_capability"] = hardware.compute_capability;
    }
    if (hardware.sm_count > 0) json["sm_count"] = hardware.sm_count;
    for (std::size_t i = 0; i < precision_count; ++i) {
        if (hardware.peak_flops[i] > 0.0)
            json["peak_flops"][to_string(static_cast<Precision>(i))] = hardware.peak_flops[i];
    }
    json["memory_bytes"] = hardware.memory_bytes;
    json["memory_bandwidth"] = hardware.memory_bandwidth;
    json["nvlink_domain"] = hardware.nvlink_domain;
    json["nvlink_domain_used"] = hardware.nvlink_domain_used;
    json["gpus_per_node"] = hardware.gpus_per_node;
    if (hardware.nvlink.bandwidth > 0.0) json["nvlink"] = link_json(hardware.nvlink);
    if (hardware.pcie.bandwidth > 0.0) json["pcie"] = link_json(hardware.pcie);
    if (hardware.nic.bandwidth > 0.0) json["nic"] = link_json(hardware.nic);
    if (hardware.host.bandwidth > 0.0) json["host"] = link_json(hardware.host);
    if (hardware.host_memory_bytes > 0.0) json["host_memory_bytes"] = hardware.host_memory_bytes;
    json["context_bytes"] = hardware.context_bytes;
    json["communicator_bytes"] = communicators_json(hardware.communicators);
    json["default_stack"] = hardware.default_stack;
    if (!hardware.like.empty()) json["like"] = hardware.like;
    json["source"] = hardware.source;
    for (const auto& [kind, calls] : hardware.measured) {
        auto& rows = json["measured"][kind] = nlohmann::ordered_json::array();
        for (const MeasuredCall& call : calls) {
            auto& row = rows.emplace_back(nlohmann::ordered_json::array({call.work, call.seconds}));
            for (const double side : call.sides) row.push_back(side);
        }
        if (std::none_of(calls.begin(), calls.end(), [](const MeasuredCall& call) { return call.clock_hz > 0.0; }))
            continue;
        auto& clocks = json["measured_clocks"][kind] = nlohmann::ordered_json::array();
        for (const MeasuredCall& call : calls) clocks.push_back(std::round(call.clock_hz / 1e5) / 10.0);
    }
    for (const auto& [family, tiles] : hardware.product_tiles) {
        auto& rows = json["product_tiles"][family] = nlohmann::ordered_json::array();
        for (const ProductTile& t : tiles)
            rows.push_back(
                {t.multiprocessors, t.down, t.across, t.depth, t.step_cycles, t.tile_cycles, t.swapped ? 1 : 0});
    }
    if (!hardware.measured_by.empty()) json["measured_by"] = hardware.measured_by;
    for (const MeasuredCard& card : hardware.cards) {
        auto& of_card = json["cards"].emplace_back(nlohmann::ordered_json{{"measured_by", card.measured_by}});
        for (const auto& [family, factor] : card.factors) of_card["factors"][family] = std::round(1e5 * factor) / 1e5;
    }
    return json.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

} // namespace moe::machine
