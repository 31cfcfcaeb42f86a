// Reads and writes profiles/coefficients.json.
#include "planner/machine/coefficients.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/json_object.hpp"

#include <nlohmann/json.hpp>

#include <filesystem>

namespace moe::machine {

Coefficients load_coefficients() {
    const std::string path = profiles_folder() + "/coefficients.json";
    if (!std::filesystem::exists(path)) return {}; // stacks that name none need none
    const JsonObject json = JsonObject::parse(read_file(path), path);
    Coefficients result;
    for (const std::string& name : json.keys()) {
        const JsonObject one = json.object(name);
        one.only({"value", "prior", "spread", "error", "unit", "source"});
        Coefficient c;
        c.value = one.number("value", 1e-12, 1e12);
        c.prior = one.number("prior", 1e-12, 1e12);
        c.spread = one.number_or("spread", 0.0, 0.0, 10.0);
        c.error = one.number_or("error", 0.0, 0.0, 1e6);
        c.unit = one.string("unit");
        c.source = one.string("source");
        result[name] = std::move(c);
    }
    return result;
}

void save_coefficients(const Coefficients& coefficients, const std::string& path) {
    nlohmann::ordered_json json = nlohmann::ordered_json::object();
    for (const auto& [name, c] : coefficients) {
        nlohmann::ordered_json one{{"value", rounded_to(c.value, 4)}, {"prior", c.prior}};
        if (c.spread > 0.0) one["spread"] = c.spread;
        if (c.error > 0.0) one["error"] = rounded_to(c.error, 4);
        one["unit"] = c.unit;
        one["source"] = c.source;
        json[name] = std::move(one);
    }
    write_file(path, json.dump(1) + "\n");
}

} // namespace moe::machine
