// A job of one process per rank, and the files that start it on a cluster.
#pragma once

#include <string>

namespace moe::tools {

struct Job {
    std::string name;      // name of letters, digits and hyphens, as Kubernetes wants it
    std::string plan_path; // path of the plan as given
    std::string plan_json;
    std::string backend;         // back end: cpu or cuda
    std::string data;            // prefix of the dataset where the job runs
    std::string arguments;       // more words for execute, as they are
    std::string image, claim;    // Kubernetes only: container image, and the volume claim that is mounted at /work
    int nodes = 1, per_node = 1; // per_node: processes = ranks = GPUs of a node
    int ranks() const { return nodes * per_node; }
};

// Texts of whole files. Every process finds its rank in the variables that its launcher sets (engine/comm/launch.hpp).
std::string slurm_script(const Job& job);
std::string mpi_script(const Job& job);
std::string kubernetes_manifest(const Job& job);

// A word as a POSIX shell takes it literally.
std::string quoted(const std::string& word);

} // namespace moe::tools
