// Random small models with random plans on 1 to 16 ranks, and the way from a case that fails to the smallest that does.
#pragma once

#include "tests/engine/train/samples.hpp"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

// A model, what differs from its configuration, and what differs from a one-rank plan; each line of text() names all.
struct RandomCase {
    std::string model;
    Fields config, plan;
    int ranks = 1;
    std::int64_t gbs = 8;

    std::string text() const;
};

// The plan of a case; Throws Error for what is unsound or what execute does not run.
moe::plan::Plan plan_of(const RandomCase& c);
// A case of the same model and batch on one rank.
RandomCase one_rank_of(const RandomCase& c);

// `count` cases that plan_of() accepts, the same for the same seed on every machine. Cases come in runs of `per_model`
// with one model and batch, so that they share their reference. ranks: of every case, 0: drawn too.
std::vector<RandomCase> random_cases(std::uint64_t seed, std::size_t count, std::size_t per_model, int ranks = 0);

// Drops and halves what can be dropped and halved while `fails` holds.
RandomCase shrunk(RandomCase c, const std::function<bool(const RandomCase&)>& fails);
