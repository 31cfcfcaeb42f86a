// The job files, each the shortest that does it: what a site wants otherwise is edited in the file.
#include "tools/launch/job.hpp"

#include <fmt/format.h>

namespace moe::tools {

namespace {

// The words of execute but for the plan's path, which differs.
std::string execute_words(const Job& job) {
    return fmt::format("--backend {} --data {}{}{}", job.backend, quoted(job.data), job.arguments.empty() ? "" : " ",
                       job.arguments);
}

// A text as a YAML block, every line behind so many spaces.
std::string indented(const std::string& text, int spaces) {
    std::string out;
    for (std::size_t start = 0; start < text.size();) {
        const std::size_t end = std::min(text.find('\n', start), text.size());
        out += std::string(static_cast<std::size_t>(spaces), ' ') + text.substr(start, end - start) + '\n';
        start = end + 1;
    }
    return out;
}

} // namespace

std::string quoted(const std::string& word) {
    const char* plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./=:,+@%";
    if (!word.empty() && word.find_first_not_of(plain) == std::string::npos) return word;
    std::string out = "'";
    for (const char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
    return out + "'";
}

// --kill-on-bad-exit: one rank's failure ends the job even where the others have not heard of it.
std::string slurm_script(const Job& job) {
    return fmt::format(R"(#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={per_node}
{gpus}#SBATCH --exclusive
# Submit with sbatch; account, partition and time limit as the site wants them.
set -euo pipefail
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # whole: a pipe cut short would end the job
MASTER_ADDR=${{hosts%%[[:space:]]*}}
MASTER_PORT=$((15000 + SLURM_JOB_ID % 10000))
MOE_PLAN_JOB_TOKEN=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n') # who does not know it is no rank of this job
export MASTER_ADDR MASTER_PORT MOE_PLAN_JOB_TOKEN
exec srun --kill-on-bad-exit=1 moe-plan execute {plan} {words} "$@"
)",
                       fmt::arg("name", job.name), fmt::arg("nodes", job.nodes), fmt::arg("per_node", job.per_node),
                       fmt::arg("gpus", job.backend == "cuda"
                                            ? fmt::format("#SBATCH --gpus-per-node={}\n", job.per_node)
                                            : std::string{}),
                       fmt::arg("plan", quoted(job.plan_path)), fmt::arg("words", execute_words(job)));
}

// Open MPI's options. Rank 0 is on the first host of the list, which is where mpirun is called in a job, or the only
// one.
std::string mpi_script(const Job& job) {
    return fmt::format(R"(#!/bin/bash
# Run on the first node; several nodes: add --hostfile FILE to MPIRUN_OPTIONS, and set MASTER_ADDR to the first of them.
set -euo pipefail
export MASTER_ADDR=${{MASTER_ADDR:-{master}}} MASTER_PORT=${{MASTER_PORT:-29500}}
MOE_PLAN_JOB_TOKEN=$(od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n') # who does not know it is no rank of this job
export MOE_PLAN_JOB_TOKEN
exec mpirun ${{MPIRUN_OPTIONS:-}} -n {ranks} --map-by ppr:{per_node}:node --bind-to none \
    -x MASTER_ADDR -x MASTER_PORT -x MOE_PLAN_JOB_TOKEN -x PATH -x LD_LIBRARY_PATH \
    moe-plan execute {plan} {words} "$@"
)",
                       fmt::arg("master", job.nodes == 1 ? "127.0.0.1" : "$(hostname -f)"),
                       fmt::arg("ranks", job.ranks()), fmt::arg("per_node", job.per_node),
                       fmt::arg("plan", quoted(job.plan_path)), fmt::arg("words", execute_words(job)));
}

// A pod per node, whose shell starts a process per GPU; the headless service gives the first pod its name.
std::string kubernetes_manifest(const Job& job) {
    const std::string limits =
        job.backend == "cuda" ? fmt::format("          resources: {{limits: {{nvidia.com/gpu: {}}}}}\n", job.per_node)
                              : std::string{};
    return fmt::format(
        R"(# kubectl apply -f THIS; the claim {claim} holds the data and takes what the run writes, at /work.
apiVersion: v1
kind: Service
metadata: {{name: {name}}}
spec: {{clusterIP: None, selector: {{job-name: {name}}}, publishNotReadyAddresses: true}}
---
apiVersion: v1
kind: ConfigMap
metadata: {{name: {name}-plan}}
data:
  plan.json: |
{plan}---
apiVersion: batch/v1
kind: Job
metadata: {{name: {name}}}
spec:
  completionMode: Indexed
  completions: {nodes}
  parallelism: {nodes}
  backoffLimit: 0
  template:
    spec:
      subdomain: {name}
      restartPolicy: Never
      containers:
        - name: ranks
          image: {image}
          workingDir: /work
{limits}          env:
            - {{name: MASTER_ADDR, value: {name}-0.{name}}}
            - {{name: MASTER_PORT, value: "29500"}}
            # Drawn by the cluster for each Job: its own id.
            - name: MOE_PLAN_JOB_TOKEN
              valueFrom: {{fieldRef: {{fieldPath: "metadata.labels['batch.kubernetes.io/controller-uid']"}}}}
          command: [bash, -c]
          args:
            - |
              trap 'kill $(jobs -p) 2> /dev/null' TERM EXIT
              for local in $(seq 0 {last}); do
                RANK=$((JOB_COMPLETION_INDEX * {per_node} + local)) LOCAL_RANK=$local WORLD_SIZE={ranks} \
                  moe-plan execute /plan/plan.json {words} &
              done
              for local in $(seq 0 {last}); do wait -n || exit 1; done
          volumeMounts:
            - {{name: plan, mountPath: /plan}}
            - {{name: work, mountPath: /work}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - {{name: plan, configMap: {{name: {name}-plan}}}}
        - {{name: work, persistentVolumeClaim: {{claimName: {claim}}}}}
        - {{name: shm, emptyDir: {{medium: Memory}}}}
)",
        fmt::arg("name", job.name), fmt::arg("claim", job.claim), fmt::arg("image", job.image),
        fmt::arg("plan", indented(job.plan_json, 4)), fmt::arg("nodes", job.nodes), fmt::arg("limits", limits),
        fmt::arg("last", job.per_node - 1), fmt::arg("per_node", job.per_node), fmt::arg("ranks", job.ranks()),
        fmt::arg("words", execute_words(job)));
}

} // namespace moe::tools
