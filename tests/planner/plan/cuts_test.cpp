// The cuts that published recipes have, by their rules.
#include "planner/plan/cuts.hpp"

#include "planner/model/families/load_model.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

using namespace moe;

namespace {

std::vector<std::string> cuts(const model::Model& model, int count) {
    std::vector<std::string> texts;
    for (const std::vector<plan::Stage>& cut : plan::recipe_cuts(model, count)) {
        CHECK(static_cast<int>(cut.size()) == count);
        texts.push_back(plan::layout_to_string(cut));
    }
    return texts;
}

bool has(const std::vector<std::string>& texts, const std::string& text) {
    return std::find(texts.begin(), texts.end(), text) != texts.end();
}

} // namespace

TEST_CASE("recipe cuts hold what DeepSeek-V3 is published with, and every layer once") {
    model::Model model = families::load_model("DeepSeek-V3");
    REQUIRE(model.mtp.size() == 1);
    CHECK(has(cuts(model, 32), "Et|(tt|)*30mL"));       // every part counts as one
    CHECK(has(cuts(model, 32), "Ettt|(tt|)*29m|L"));    // the first run takes what is over, MTP and head stand alone
    CHECK(has(cuts(model, 16), "Etttt|(tttt|)*14tmL")); // the last one does
    model.mtp.clear();
    CHECK(has(cuts(model, 16), "Etttt|(tttt|)*14tL"));
    for (const int count : {2, 5, 8, 61, 63}) {
        CAPTURE(count);
        for (const std::vector<plan::Stage>& cut : plan::recipe_cuts(model, count)) {
            int layer = 0;
            for (const plan::Stage& stage : cut) {
                CHECK(stage.first_layer == layer);
                layer += stage.layers;
                CHECK(stage.embedding == (&stage == &cut.front()));
                CHECK(stage.loss == (&stage == &cut.back()));
            }
            CHECK(layer == 61);
        }
    }
    CHECK(has(cuts(model, 63), "E|(t|)*61L"));
    CHECK(cuts(model, 1).empty());
    CHECK(cuts(model, 64).empty());
}
