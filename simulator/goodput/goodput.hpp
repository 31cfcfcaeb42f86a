// Goodput: the share of a job's time that trains, beside checkpoints, failures and the work that failures lose.
//
// Model. Failures come at random, so that times between them are exponential. A segment of training is followed by a
// checkpoint, for which training stops. A failure loses all since the last checkpoint, also in the middle of writing
// one, and a restart goes before the segment is tried again; restarts fail as everything else does.
//
// Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM
// 17(9), 1974. J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future
// Generation Computer Systems 22(3), 2006.
#pragma once

namespace moe::goodput {

// All in seconds and above 0; `restart` may be 0.
struct Failures {
    double mtbf = 0.0;    // mean time between failures of the whole job
    double write = 0.0;   // that training stops for a checkpoint
    double restart = 0.0; // from a failure until training goes on, lost work apart
};

// Any of `gpus` that fails ends the job, and each fails every `per_gpu` on average: in the unit of `per_gpu`.
double job_mtbf(double per_gpu, int gpus);

// Seconds of training between two checkpoints.
// Young 1974: sqrt(2 write mtbf), where both are short against the time between failures.
double young_interval(const Failures& failures);
// Daly 2006: sqrt(2 write mtbf) (1 + x / 3 + x^2 / 9) - write with x = sqrt(write / (2 mtbf)), or mtbf where writing
// takes twice as long as that or longer.
double daly_interval(const Failures& failures);

// Share of the job's time that trains and is not lost, with a checkpoint behind every `interval` seconds of training:
// interval / (mtbf e^(restart / mtbf) (e^((interval + write) / mtbf) - 1)), Daly 2006, which is exact for a long job. 0
// where failures come so fast that nothing gets done.
double goodput(const Failures& failures, double interval);

} // namespace moe::goodput
