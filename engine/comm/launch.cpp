// Reads the variables by which launchers tell a process its place.
#include "engine/comm/launch.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace moe::comm {

namespace {

struct Names {
    const char *rank, *world, *local, *nodes; // nodes: number of nodes of the job, where the launcher says so
};
constexpr Names launchers[] = {{"RANK", "WORLD_SIZE", "LOCAL_RANK", nullptr},
                               {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", nullptr},
                               {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NNODES"}};
constexpr int most_processes = 1 << 20;
constexpr std::size_t shortest_token = 16;

int number(const char* name, const char* text, int low, int high) {
    int value = 0;
    const auto [end, error] = std::from_chars(text, text + std::strlen(text), value);
    if (error != std::errc() || *end != '\0' || value < low || value > high)
        refuse("{} = {}: must be a whole number from {} to {}", name, shown(text), low, high);
    return value;
}

const char* variable(const char* name) {
    const char* text = name == nullptr ? nullptr : std::getenv(name);
    return text == nullptr || *text == '\0' ? nullptr : text;
}

// An IPv6 address may come as URLs have it.
std::string_view without_brackets(std::string_view host) {
    const bool bracketed = host.size() > 2 && host.front() == '[' && host.back() == ']';
    return bracketed ? host.substr(1, host.size() - 2) : host;
}

} // namespace

std::optional<Launch> launch_of_environment() {
    for (const Names& names : launchers) {
        const char *rank = variable(names.rank), *world = variable(names.world);
        if (rank == nullptr) continue; // A shell of salloc knows the number of tasks, but is none of them.
        if (world == nullptr) refuse("{} = {}, but {} is not set", names.rank, shown(rank), names.world);
        Launch launch;
        launch.world = number(names.world, world, 1, most_processes);
        launch.rank = number(names.rank, rank, 0, launch.world - 1);
        if (launch.world == 1) return {};
        if (const char* local = variable(names.local)) launch.local = number(names.local, local, 0, launch.world - 1);
        const char *host = variable("MASTER_ADDR"), *port = variable("MASTER_PORT");
        if (const char* nodes = variable(names.nodes);
            nodes != nullptr && host == nullptr && std::string_view(nodes) != "1")
            refuse("{} = {}, but MASTER_ADDR is not set: set it to the node of rank 0", names.nodes, shown(nodes));
        if (host != nullptr) launch.host = without_brackets(host);
        if (const char* token = variable("MOE_PLAN_JOB_TOKEN")) launch.token = token;
        if (!launch.token.empty() && launch.token.size() < shortest_token)
            refuse("MOE_PLAN_JOB_TOKEN: has {} characters, fewer than {}: draw a longer one", launch.token.size(),
                   shortest_token);
        if (port != nullptr) launch.port = number("MASTER_PORT", port, 1, 65535);
        return launch;
    }
    return {};
}

} // namespace moe::comm
