// Every family of causal language models that transformers knows, as it saves it: exact counts, or the part we lack.
#include "planner/base/files.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "tests/planner/base/fault_of.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cstdlib>
#include <map>
#include <set>
#include <sstream>
#include <string>

using namespace moe;
using Json = nlohmann::ordered_json;

namespace {

// Default configs of classes that are no model which could be trained, with what the reader says of them.
const std::map<std::string, std::string> incomplete{
    {"deepseek_v2 default", "num_experts_per_tok = null: must be given a value"},
    {"glm4_moe default", "21 rotary columns per head"},
    {"gemma4 default", "hidden_size_per_layer_input = 256: embeddings by layer are not supported"},
    {"gemma4_text default", "hidden_size_per_layer_input = 256: embeddings by layer are not supported"},
};

// The class of LongCat-Flash keeps up projections for experts without weights, too, which the published files lack.
std::int64_t weightless(const Json& config) {
    if (config.value("model_type", "") != "longcat_flash") return 0;
    const std::int64_t h = config["hidden_size"], up = 2 * config["expert_ffn_hidden_size"].get<std::int64_t>() * h;
    return config["num_layers"].get<std::int64_t>() * config["zero_expert_num"].get<std::int64_t>() * (up + h + 1);
}

} // namespace

TEST_CASE("transformers: every family is read with its exact count, or refused naming what we lack") {
    std::istringstream table(read_file(profiles_folder() + "/../tests/planner/model/transformers/configs.jsonl"));
    std::set<std::string> read, refused;
    for (std::string line; std::getline(table, line);) {
        const Json row = Json::parse(line);
        const std::string type = row["model_type"], name = type + " " + row["sizes"].get<std::string>();
        CAPTURE(name);
        std::int64_t counted = 0;
        bool towers = false;
        const std::string fault = fault_of([&] {
            const model::Model model = families::model_from_json(row["config"].dump(), "config.json");
            counted = model::count_parameters(model).total_no_mtp + weightless(row["config"]);
            towers = !model.left_out.empty();
        });
        CAPTURE(fault);
        if (const auto known = incomplete.find(name); known != incomplete.end()) {
            CHECK(fault.find(known->second) != std::string::npos);
        } else if (fault.find("are not supported") != std::string::npos) {
            CHECK(fault.find("unknown architecture") == std::string::npos);
            refused.insert(type);
        } else if (!row["parameters"].is_null()) {
            CHECK(fault.empty());
            const std::int64_t theirs = row["parameters"];
            if (towers && type == "gemma3")
                CHECK(counted < theirs); // which counts them: other classes build the text alone
            else
                CHECK(counted == theirs);
            read.insert(type);
        } else {
            CHECK(fault.find("is missing") != std::string::npos); // transformers builds no model of its defaults
        }
    }
    CHECK(read.size() >= 85);
    CHECK(refused.size() >= 100);
}
