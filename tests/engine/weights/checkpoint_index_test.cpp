// Indices with a right checksum and nonsense in them: each ends in one line that names file and field.
#include "engine/base/crc32c.hpp"
#include "engine/weights/checkpoint.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "tests/engine/base/refusals.hpp"
#include "tests/engine/weights/made_snapshot.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <functional>
#include <vector>

using namespace moe;

namespace {

using Json = nlohmann::ordered_json;

struct Change {
    const char* pointer; // of the field that gets `value`
    const char* value;   // JSON; "" removes the field
    const char* words;   // of the message
};

const char* const runs = "/tensors/a/slices/0/runs/0";

// With a history of delayed scaling.
weights::Snapshot snapshot() {
    weights::Snapshot made = made_snapshot(3, "-x");
    made.state.largest = {{"in", {{1, 3.4e38f}, {3, 0.1f}}}};
    return made;
}

// What the reader says when one field of the index is another and the checksum fits it.
std::string refusal(const std::string& path, const Json& index, const Change& change) {
    Json changed = index;
    const Json::json_pointer at(change.pointer);
    if (*change.value != '\0')
        changed[at] = parse_json<Json>(change.value, "the test");
    else
        changed[at.parent_pointer()].erase(at.back());
    const std::string text = json_text(changed);
    write_file(path + "/index.json", fmt::format("{{\"crc32c\":{},\"checkpoint\":{}}}", engine::crc32c(text), text));
    return message([&] { weights::StoredCheckpoint{path}; });
}

} // namespace

TEST_CASE("a checkpoint made by hand comes back, with its place in the data") {
    const Folder folder;
    weights::write_checkpoint(folder / "c", snapshot());
    const weights::StoredCheckpoint stored(folder / "c/step-00000003");
    std::vector<float> values(24);
    stored.read("a", weights::StateKind::exp_avg, 0, values);
    for (int i = 0; i < 24; ++i) CHECK(values[static_cast<std::size_t>(i)] == 100.0f + static_cast<float>(i));
    const data::DataPosition& data = stored.state().data;
    REQUIRE(data.datasets.size() == 1);
    CHECK(data.shuffled);
    CHECK(data.datasets[0].consumed == 96);
    CHECK(data.datasets[0].mark == 7);
    CHECK(stored.state().router_loads.at(2) == std::vector<float>{1.0f, 2.0f});
    const std::vector<weights::Largest>& history = stored.state().largest.at("in");
    REQUIRE(history.size() == 2);
    CHECK(history[0].step == 1);
    CHECK(history[0].value == 3.4e38f);
    CHECK(history[1].step == 3);
    CHECK(history[1].value == 0.1f);
}

TEST_CASE("nonsense under a right checksum is refused by field") {
    const Folder folder;
    weights::write_checkpoint(folder / "c", snapshot());
    const std::string path = folder / "c/step-00000003";
    const Json index = load_json<Json>(path + "/index.json").at("checkpoint");
    const std::vector<Change> changes{
        {"/step", "-5", ": checkpoint: step = -5"},
        {"/step", "4", "is of step 4, its folder's name of step 3"},
        {"/step", "1e300", ": step = "},
        {"/samples", "18446744073709551615", "checkpoint: samples = "},
        {"/samples", "\"many\"", "checkpoint: samples = "},
        {"/seed", "-1", "checkpoint: seed = -1"},
        {"/seed", "", "field \"seed\" is missing"},
        {"/format", "7", "format = 7: must be a string"},
        {"/version", "2", "version 2"},
        {"/config", "[]", "config = "},
        {"/router_loads", R"({"x":[1]})", "router_loads: x = "},
        {"/router_loads", R"({"-1":[1]})", "belongs to no layer"},
        {"/router_loads", R"({"2":[NaN]})", "router_loads: 2 = "},
        {"/shards/1", R"("../../secret")", "../../secret for rank-00001.safetensors"},
        {"/tensors/a/shape", "[4]", "shape = an array of 1 elements: must be 2 whole numbers"},
        {"/tensors/a/shape", "[281474976710656, 4]", "has too many elements"},
        {"/tensors/a/shape", "[5, 6]", "hold 24 of 5 x 6 elements"},
        {"/tensors/a/slices/0/shard", "2", "tensors: a: slices: row 1: shard = 2"},
        {"/tensors/a/slices/0/shard", "1", "a second slice of one shard"},
        {"/tensors/a/slices/0/crc32c", "[1, 2]", "crc32c = an array of 2 elements: must be 3 whole numbers"},
        {"/tensors/a/slices/0/crc32c/1", "5", "it is damaged"},
        {runs, "[-1, 3, 6, 4]", "slices: row 1: runs = an array of "},
        {runs, "[0, 0, 6, 4]", "[0, 0, 6, 4] is an empty run"},
        {runs, "[0, 3, 2, 4]", "[0, 3, 2, 4] is a run that lies over itself"},
        {runs, "[0, 3, 9, 4]", "reaches beyond the tensor's 24 elements"},
        {runs, "[22, 3, 0, 1]", "reaches beyond the tensor's 24 elements"},
        {runs, "[0, 24, 0, 1]", "slices = an array of 2 elements: hold more than the tensor's 24 elements"},
        {runs, "[3, 3, 6, 4]", "element 0 lies in no slice"},
        {runs, "[0, 4, 6, 3]", "element 3 lies in two slices"},
        {runs, "[0, 12, 0, 1]", "element 3 lies in two slices"},
        {"/ema", "0.5", "crc32c = an array of 3 elements: must be 4 whole numbers"},
        {"/ema", "1.5", "checkpoint: ema = 1.5"},
        {"/largest", "7", "checkpoint: largest = 7"},
        {"/largest/in", "[1]", "largest: in = "},
        {"/largest/in/steps", "[1]", "in: steps = an array of 1 elements: must be 2 whole numbers"},
        {"/largest/in/steps", "[3, 3]", "in: steps = an array of 2 elements: are not in order"},
        {"/largest/in/steps/1", "4", "in: steps = "},
        {"/largest/in/values/0", "-1", "in: values = "},
        {"/largest/in/values/0", "1e39", "in: values = "},
        {"/freeze", "\"embed*\"", "checkpoint: freeze = "},
        {"/lr_groups", "[7]", "lr_groups"},
        {"/data", "null", "data = null"},
        {"/data/seq", "0", "checkpoint: data: seq = 0"},
        {"/data/shuffled", "1", "data: shuffled = 1: must be true or false"},
        {"/data/datasets/0/consumed", "1001", "datasets: row 1: consumed = 1001"},
        {"/data/datasets/0/block", "0", "datasets: row 1: block = 0"},
        {"/data/datasets/0/weight", "-Infinity", "datasets: row 1: weight = -Infinity"},
    };
    for (const Change& change : changes) {
        CAPTURE(change.pointer);
        CAPTURE(change.value);
        const std::string said = refusal(path, index, change);
        CAPTURE(said);
        CHECK(mentions(said, change.words));
        CHECK(mentions(said, path));
    }
}

TEST_CASE("a newest index of any nonsense gives way to an older whole one") {
    const Folder folder;
    weights::write_checkpoint(folder / "c", made_snapshot(1, "-x"));
    weights::write_checkpoint(folder / "c", made_snapshot(2, "-x"));
    const std::string deep = std::string(200000, '['), index = folder / "c/step-00000002/index.json";
    for (const std::string& text : {deep, std::string("{}"), std::string("null"), std::string(),
                                    std::string(R"({"crc32c":{},"checkpoint":3})")}) {
        write_file(index, text);
        std::vector<std::string> skipped;
        const auto found = weights::newest_checkpoint(folder / "c", skipped);
        REQUIRE(found);
        CHECK(found->state().step == 1);
        REQUIRE(skipped.size() == 1);
        CHECK(mentions(skipped[0], index));
    }
}
