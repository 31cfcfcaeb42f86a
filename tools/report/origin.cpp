// Says where the data of a page comes from.
#include "tools/report/origin.hpp"

#include "engine/base/hmac.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/plan_fields.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <array>
#include <ctime>

namespace moe::tools {

namespace {

using Json = nlohmann::ordered_json;

std::string now_text() {
    const std::time_t now = std::time(nullptr);
    std::tm parts{};
    std::array<char, 32> text{};
    std::strftime(text.data(), text.size(), "%Y-%m-%d %H:%M UTC", gmtime_r(&now, &parts));
    return text.data();
}

std::string hash_of(const std::string& text) {
    std::string out;
    for (const auto byte : engine::sha256(text)) out += fmt::format("{:02x}", static_cast<unsigned>(byte));
    return out;
}

// The content of the model and of the machine as they stand in the plan; equal hashes mean equal profiles.
Json hashes_json(const Json& plan) {
    return {{"model", hash_of(plan.at("model").dump())}, {"hardware", hash_of(plan.at("hardware").dump())}};
}

} // namespace

Json origin_json(const Json& plan, const std::string& command) {
    return {{"version", MOE_PLAN_VERSION}, {"date", now_text()}, {"command", command}, {"sha256", hashes_json(plan)}};
}

Json choices_json(const plan::Plan& plan) {
    Json choices = Json::array();
    for (const std::string& field : plan::field_names())
        if (const std::string text = plan::field_text(plan, field); text != plan::field_text(plan::Plan{}, field))
            choices.push_back({{"field", field}, {"value", text}});
    return choices;
}

} // namespace moe::tools
