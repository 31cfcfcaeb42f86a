// Published training runs: rows of a CSV file, each with the recipe of a measurement and its figures.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moe::published {

// One row, read but not judged: a blank cell is an empty optional or string. Column names are those of the file.
struct Run {
    int line = 0; // line of the file where the row begins
    std::string run_id, source, release, model, system, precision;
    std::optional<std::int64_t> gpus, gbs, mbs, seq_len; // gbs: sequences per step; mbs: per micro-batch
    std::optional<std::int64_t> tp, pp, vpp, cp, ep, etp;
    std::optional<bool> fsdp, ep_overlap;
    std::optional<std::int64_t> mtp_layers;
    std::string recompute_modules, offload_modules, cuda_graph, dispatcher, cp_comm, pipeline_layout, optimizer;
    std::string moe_balance, other_settings, status, tier, mapping_check;
    std::optional<double> tflops_per_gpu, tflops_std; // TFLOP/s per GPU, as printed and by one rule for all sources
    std::optional<double> gflop_per_token_std;        // training FLOPs per token by that rule, 1e9
};

// Reads CSV text (RFC 4180: quoted cells may hold commas, line feeds and doubled quotes). Columns are found by the
// names in the first line, in any order; columns of other names are ignored. Throws Error (bad_input) with place, line
// and column for a missing or doubled column, a row of another length, an open quote, or a cell that is not its
// column's kind of value.
std::vector<Run> runs_from_csv(const std::string& text, const std::string& place);

// `path`: a CSV file, the name of one in profiles/runs, or a folder, whose CSV files are read in the order of names.
std::vector<Run> load_runs(const std::string& path);

} // namespace moe::published
