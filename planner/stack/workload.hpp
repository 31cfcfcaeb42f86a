// A workload: what is trained on which machine by which software, without the choices that search makes.
#pragma once

#include <string>
#include <vector>

namespace moe::stack {

// Names as profiles have them. Equal for all plans of a request whose precision is the same.
struct Workload {
    std::string model, family;        // family: the model's architecture
    std::string hardware, generation; // generation: "hopper", or "blackwell" for machines with its number formats
    std::string precision;            // as machine::to_string() spells it
    std::string stack, software;      // stack without its features; software: the source whose releases it stands for
    double gpus = 1.0, seq = 1.0;     // seq: tokens per sequence
};

// A measured run of a workload, and by how much its prediction missed it.
struct MeasuredRun {
    std::string run_id;
    Workload workload;
    double log_error = 0.0; // log(predicted / measured TFLOPS)
    double noise = 0.0;     // standard deviation of log_error that one run has by itself
};

} // namespace moe::stack
