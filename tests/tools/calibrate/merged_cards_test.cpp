// The profile of a kind of card: calibrate --merge, on profiles whose calls are known, through the command.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <cmath>
#include <string>
#include <vector>

using moe::test::check_line;
using moe::test::document;
using moe::test::Folder;
using Json = nlohmann::ordered_json;

namespace {

using Rows = std::vector<std::vector<double>>;

// A card of one kind with a few measured calls.
Json card(const std::string& measured_by) {
    return {{"name", "card-measured"},
            {"sm_count", 100},
            {"peak_flops", {{"bf16", 1e15}, {"fp8-blockwise", 2e15}}},
            {"memory_bytes", 8e10},
            {"memory_bandwidth", 3e12},
            {"context_bytes", 5e8},
            {"default_stack", "moe-plan"},
            {"measured_by", measured_by},
            {"measured",
             {{"gemm.nt.bf16", Rows{{2e9, 4e-6, 1e3, 1e3, 1e3}, {4e9, 8e-6, 2e3, 1e3, 1e3}}},
              {"rmsnorm.bf16", Rows{{1e6, 2e-6, 512.0, 1024.0}, {2e6, 4e-6, 1024.0, 1024.0}}}}}};
}

// Another one whose products take 1.21 times as long and other ops as long.
Json slower_card() {
    Json slower = card("the slower");
    for (Json& row : slower["measured"]["gemm.nt.bf16"]) row[1] = 1.21 * row[1].get<double>();
    return slower;
}

double seconds(const Json& profile, const std::string& family, std::size_t row) {
    return profile["measured"][family][row][1];
}

void check_refused(const Folder& folder, const std::string& field, const Json& second, const std::string& words) {
    CAPTURE(field);
    folder.write("second.json", second.dump());
    check_line(folder.run("moe-plan calibrate --merge first.json second.json --out kind.json"), 2, words);
    CHECK_FALSE(folder.holds("kind.json"));
}

} // namespace

TEST_CASE("calibrate --merge: calls are geometric means, and calls of single cards are levelled by those they share") {
    const Folder folder;
    Json fast = card("the faster"), slow = slower_card();
    // A newer grid: the slower card alone has this product, and this family.
    slow["measured"]["gemm.nt.bf16"].push_back({8e9, 16e-6, 4e3, 1e3, 1e3});
    slow["measured"]["attention.bf16"] = Rows{{1e9, 11e-6, 64.0, 1024.0}};
    fast["measured"]["adamw"] = Rows{{3e6, 5e-6}};
    slow["context_bytes"] = 6e8;
    fast["measured"]["large_products.x2"] = Rows{{1.0, 1.1}};
    slow["measured"]["large_products.x2"] = Rows{{3.0, 3.5}};
    folder.write("fast.json", fast.dump());
    folder.write("slow.json", slow.dump());
    const Json kind = document(folder.run("moe-plan calibrate --merge fast.json slow.json --out kind.json --json"));
    CHECK(kind == Json::parse(folder.read("kind.json")));

    CHECK(seconds(kind, "gemm.nt.bf16", 0) == doctest::Approx(1.1 * 4e-6));
    CHECK(seconds(kind, "gemm.nt.bf16", 1) == doctest::Approx(1.1 * 8e-6));
    CHECK(seconds(kind, "rmsnorm.bf16", 0) == doctest::Approx(2e-6));
    // Levelled: the usual factor, 0 as a logarithm, counts as a third shared product.
    const double factor = std::exp(std::log(1.1) * 2.0 / 3.0);
    CHECK(kind["cards"][1]["factors"]["gemm.nt.bf16"].get<double>() > factor);
    CHECK(seconds(kind, "gemm.nt.bf16", 2) ==
          doctest::Approx(16e-6 / kind["cards"][1]["factors"]["gemm.nt.bf16"].get<double>()).epsilon(1e-4));
    CHECK(seconds(kind, "attention.bf16", 0) ==
          doctest::Approx(11e-6 / kind["cards"][1]["factors"]["attention.bf16"].get<double>()).epsilon(1e-4));
    CHECK(kind["cards"][1]["factors"]["attention.bf16"].get<double>() == doctest::Approx(factor).epsilon(0.01));
    CHECK(seconds(kind, "adamw", 0) == doctest::Approx(5e-6));
    CHECK_FALSE(kind["cards"][1]["factors"].contains("adamw"));

    CHECK(kind["context_bytes"] == 6e8);
    CHECK(kind["measured"]["large_products.x2"][0][0].get<double>() == doctest::Approx(2.0));
    CHECK(kind["measured"]["large_products.x2"][0][1].get<double>() == doctest::Approx(2.3));
    CHECK(kind["cards"][0]["measured_by"] == "the faster");
    CHECK(kind["cards"][1]["measured_by"] == "the slower");
    CHECK(kind["measured_by"].get<std::string>().find("the mean of 2 cards") != std::string::npos);
    const moe::test::Outcome shown = folder.run("moe-plan show hardware kind.json");
    CHECK(shown.status == 0);
    CHECK(shown.out.find("the mean of 2 cards") != std::string::npos);
}

TEST_CASE("calibrate --merge: three cards that share no call are connected by their products") {
    const Folder folder;
    for (int i = 0; i < 3; ++i) {
        Json one = card("card " + std::to_string(i));
        one["measured"].erase("gemm.nt.bf16");
        const double longer = std::exp(0.02 * (i - 1));
        Rows shared;
        for (int row = 1; row <= 40; ++row) shared.push_back({1e9 * row, 2e-6 * row * longer, 64.0 * row});
        one["measured"]["gemm.nn.bf16"] = shared;
        one["measured"]["grouped_gemm.forward.bf16"] = Rows{{1e9 * (i + 1), 3e-6 * (i + 1) * longer, 64.0}};
        folder.write("card" + std::to_string(i) + ".json", one.dump());
    }
    const Json kind =
        document(folder.run("moe-plan calibrate --merge card0.json card1.json card2.json --out kind.json --json"));
    for (std::size_t row = 0; row < 3; ++row)
        CHECK(seconds(kind, "grouped_gemm.forward.bf16", row) ==
              doctest::Approx(3e-6 * static_cast<double>(row + 1)).epsilon(1e-3));
}

TEST_CASE("calibrate --merge: other cards and other kernels are refused by file and field") {
    const Folder folder;
    folder.write("first.json", card("the first").dump());
    const auto with = [](const std::string& field, const Json& value) {
        Json other = card("another");
        other[field] = value;
        return other;
    };
    check_refused(folder, "name", with("name", "b200-measured"), "second.json: name = b200-measured");
    check_refused(folder, "sm_count", with("sm_count", 132), "second.json: sm_count = 132 where first.json has 100");
    check_refused(folder, "memory", with("memory_bytes", 9e10), "second.json: memory_bytes = ");
    check_refused(folder, "peaks", with("peak_flops", {{"bf16", 2e15}, {"fp8-blockwise", 2e15}}),
                  "second.json: peak_flops: bf16 = ");
    Json none = card("none");
    none.erase("measured");
    check_refused(folder, "measured", none, "second.json: measured: holds no calls");
    Json sides = card("sides");
    for (Json& row : sides["measured"]["rmsnorm.bf16"]) row.erase(3);
    check_refused(folder, "sides", sides, "second.json: measured: rmsnorm.bf16: has 1 sides a call");
    Json kernels = card("kernels");
    for (Json& row : kernels["measured"]["rmsnorm.bf16"]) row[1] = 3.0 * row[1].get<double>();
    check_refused(folder, "kernels", kernels, "second.json: measured: rmsnorm.bf16: takes ");
    Json tiles = card("tiles"), first = card("the first");
    for (Json* profile : {&tiles, &first})
        (*profile)["measured"]["grouped_gemm.forward.bf16"] = Rows{{1e9, 1e-6, 64.0, 64.0, 64.0, 8.0}};
    first["product_tiles"]["grouped_gemm.forward.bf16"] = Rows{{1, 128, 128, 64, 512, 0, 0}};
    tiles["product_tiles"]["grouped_gemm.forward.bf16"] = Rows{{2, 256, 128, 64, 512, 0, 0}};
    folder.write("first.json", first.dump());
    check_refused(folder, "tiles", tiles, "second.json: product_tiles: grouped_gemm.forward.bf16: ");

    folder.write("second.json", slower_card().dump());
    REQUIRE(folder.run("moe-plan calibrate --merge first.json second.json --out of_two.json").status == 0);
    check_refused(folder, "cards", Json::parse(folder.read("of_two.json")),
                  "second.json: cards: is of 2 cards already");
    check_line(folder.run("moe-plan calibrate --merge first.json --out kind.json"), 2, "two cards or more");
    check_line(folder.run("moe-plan calibrate --merge first.json first.json --gpus 2 --out kind.json"), 2,
               "--merge: measures nothing: leave --gpus out");
    Json broken = Json::parse(folder.read("of_two.json"));
    broken["cards"].erase(1);
    folder.write("broken.json", broken.dump());
    check_line(folder.run("moe-plan show hardware broken.json"), 2,
               "broken.json: cards = an array of 1 elements: must hold two cards or more");
}
