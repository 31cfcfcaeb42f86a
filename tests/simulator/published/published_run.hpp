// A row of profiles/runs as tests write it: where it stands, what ran on what, and its mapping; the rest is empty.
#pragma once

#include "simulator/published/runs.hpp"

#include <string>

namespace moe::test {

struct RunOrigin {
    std::string source, release;
};
struct RunSubject {
    std::string model, system, precision;
};
struct RunMapping {
    std::int64_t gpus = 0, gbs = 0, seq_len = 0, tp = 1, pp = 1;
};

inline published::Run published_run(const RunOrigin& origin, const RunSubject& subject, const RunMapping& mapping) {
    published::Run run;
    run.source = origin.source;
    run.release = origin.release;
    run.model = subject.model;
    run.system = subject.system;
    run.precision = subject.precision;
    run.gpus = mapping.gpus;
    run.gbs = mapping.gbs;
    run.seq_len = mapping.seq_len;
    run.tp = mapping.tp;
    run.pp = mapping.pp;
    run.status = "current";
    return run;
}

} // namespace moe::test
