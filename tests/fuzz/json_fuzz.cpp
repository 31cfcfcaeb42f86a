// Fuzz target: JSON text, which nlohmann's parser must judge alike, and the readers of models, machines and plans on
// it.
#include "planner/base/json.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/families/load_model.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "tests/fuzz/json_mutator.hpp"
#include "tests/fuzz/refused.hpp"

#include <nlohmann/json.hpp>

#include <cmath>
#include <cstdint>

using namespace moe;
using Json = nlohmann::json;

namespace {

// Ours refuses more (a field twice, depth), and takes NaN and infinities; what both take is the same tree.
void compare_parsers(const std::string& text) {
    const Json other = Json::parse(text, nullptr, false);
    Json ours;
    try {
        ours = parse_json<Json>(text, "input");
    } catch (const Error&) {
        return;
    }
    if (!other.is_discarded() && ours != other) std::abort();
    if (json_text(parse_json<Json>(json_text(ours), "again")) != json_text(ours)) std::abort();
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    const std::string text(reinterpret_cast<const char*>(data), size);
    compare_parsers(text);
    moe::test::accept_or_refuse([&] { static_cast<void>(parse_json<Json>(text, "input")); });
    moe::test::accept_or_refuse([&] {
        const model::Model model = families::model_from_json(text, "input");
        if (model::count_parameters(model).total < 0) std::abort();
        if (!(model::model_flops_per_token(model, 4096) >= 0.0)) std::abort();
    });
    moe::test::accept_or_refuse([&] { machine::hardware_from_json(text, "input"); });
    moe::test::accept_or_refuse([&] { plan::plan_from_json(text, "input"); });
    return 0;
}
