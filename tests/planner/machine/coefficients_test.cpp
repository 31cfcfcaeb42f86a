// Coefficients: read with their priors, written with four digits, and everything wrong with them refused by name.
#include "planner/machine/coefficients.hpp"

#include "planner/base/files.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <cmath>

#include <set>

TEST_CASE("every shipped coefficient states prior, unit and source, and is named by a stack") {
    const moe::machine::Coefficients all = moe::machine::load_coefficients();
    CHECK(all.size() >= 30);
    std::string stacks;
    for (const char* file : {"base/megatron", "bridge-25.09", "bridge-25.11", "bridge-26.08", "mlm-moe-recipes",
                             "nemo-24", "torchtitan", "moe-modelzoo", "mcore-2504.14960"})
        stacks += moe::read_file(moe::profiles_folder() + "/stacks/" + file + ".json");
    for (const auto& [name, c] : all) {
        CAPTURE(name);
        CHECK(c.unit.size() > 3);
        CHECK(c.source.size() > 20);
        CHECK(stacks.find("\"@" + name + "\"") != std::string::npos);
        if (c.spread == 0.0) CHECK(c.value == c.prior);
        // A fit that leaves its prior by more than this has found something that the model lacks.
        if (c.spread > 0.0) CHECK(std::abs(std::log(c.value / c.prior)) < 3.0 * c.spread);
    }
}

TEST_CASE("coefficients survive being written and read") {
    moe::machine::Coefficients one;
    one["a.b"] = {0.123456, 0.1, 0.2, 0.05, "of something", "a test"};
    const Folder folder;
    const std::string path = folder / "coefficients.json";
    moe::machine::save_coefficients(one, path);
    const std::string text = moe::read_file(path);
    CHECK(text.find("\"value\": 0.1235") != std::string::npos);
    CHECK(text.find("\"error\": 0.05") != std::string::npos);
}
