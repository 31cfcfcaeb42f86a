// The start of this process: alone, or as one of several by torchrun, mpirun or srun.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace moe::comm {

// One process per rank; rank 0 listens at host:port and all others call there.
struct Launch {
    int rank = 0, world = 1;
    std::string host = "127.0.0.1";
    int port = 29500;
    int local = 0;           // number of the process on this machine, from 0: the device it uses
    std::string token = {};  // secret of the job, MOE_PLAN_JOB_TOKEN; empty: only addresses of this machine are used
    std::string listen = {}; // address at which rank 0 listens, empty = that of `host`
    std::function<void(const std::string& line)> say = {}; // told of callers that were sent away
};

// Reads the launch from the environment: RANK and WORLD_SIZE (torchrun), OMPI_COMM_WORLD_RANK and _SIZE (Open MPI),
// SLURM_PROCID and SLURM_NTASKS (srun); the place on the machine from LOCAL_RANK, OMPI_COMM_WORLD_LOCAL_RANK or
// SLURM_LOCALID; where to meet from MASTER_ADDR and MASTER_PORT; the token from MOE_PLAN_JOB_TOKEN (16 characters or
// more). Nothing where none of the pairs is set, or for one
// process. Throws Error (bad_input) for half a pair, values out of range, and several nodes without MASTER_ADDR.
std::optional<Launch> launch_of_environment();

} // namespace moe::comm
