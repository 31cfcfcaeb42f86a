// Expert replication: balances by hand and at random, and the table that UltraEP printed.
#include "simulator/routing/replication.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace {

using namespace moe;

double sum(const std::vector<double>& values) { return std::accumulate(values.begin(), values.end(), 0.0); }
double hottest(const std::vector<double>& loads) { return *std::max_element(loads.begin(), loads.end()); }

// Shares of tokens by expert as UltraEP's tests draw them (tests/utils.py): ranks of popularity r^-alpha, the l-th
// expert of a rank l^-4 of its first, and an expert is among a token's choices with probability 1 - e^(-c weight).
std::vector<double> published_load(int experts, int ranks, int top_k, double alpha) {
    const int local = experts / ranks;
    std::vector<double> weight;
    for (int e = 0; e < experts; ++e) weight.push_back(std::pow(e / local + 1, -alpha) * std::pow(e % local + 1, -4.0));
    const auto chosen = [&weight](double c) {
        std::vector<double> share;
        for (const double w : weight) share.push_back(-std::expm1(-c * w));
        return share;
    };
    double low = 0.0, high = 1e9;
    for (int i = 0; i < 100; ++i) (sum(chosen(0.5 * (low + high))) < top_k ? low : high) = 0.5 * (low + high);
    return chosen(high);
}

double imbalance(const std::vector<double>& share, int ranks) {
    return hottest(routing::replicate(share, ranks, 0, ranks).loads) * ranks / sum(share);
}

} // namespace

TEST_CASE("replication: by hand") {
    // One rank has all the tokens: three copies share them.
    routing::Replicated r = routing::replicate({4.0, 0.0, 0.0, 0.0}, 4, 1, 4);
    CHECK(hottest(r.loads) == nearly(1.01));
    CHECK(r.copies == 3);
    CHECK(r.most_sent == 3);
    // Within pairs of ranks only one copy is near, and it leaves its pair's mean.
    r = routing::replicate({4.0, 0.0, 0.0, 0.0}, 4, 1, 2);
    CHECK(hottest(r.loads) == nearly(2.01).epsilon(1e-3));
    CHECK(r.copies == 1);
    // Two hot experts of one rank go to one rank with two slots, or to two ranks with one.
    CHECK(hottest(routing::replicate({1.0, 1.0, 0.0, 0.0}, 2, 2, 2).loads) == nearly(1.01));
    r = routing::replicate({1.5, 1.5, 0.0, 0.0}, 2, 1, 2);
    CHECK(hottest(r.loads) == nearly(1.515)); // a part of one of them
    CHECK(r.copies == 1);
    // Without slots, and where all is balanced, nothing changes.
    CHECK(routing::replicate({3.0, 1.0}, 2, 0, 2).loads == std::vector<double>{3.0, 1.0});
    CHECK(routing::replicate({2.0, 2.0, 2.0, 2.0}, 2, 2, 2).copies == 0);
    // Of rows 3, 1 and 0, 0 the rank keeps 1.01 and 1: half of a rank's experts are as hot as the other half.
    r = routing::replicate({3.0, 1.0, 0.0, 0.0}, 2, 1, 2);
    CHECK(r.copies == 1);
    CHECK(hottest(r.loads) == nearly(2.02));
    CHECK(r.spread == nearly(0.01 / 1.01).epsilon(0.05));
}

TEST_CASE("replication: tokens are kept, slots not exceeded, and more slots are no worse") {
    std::mt19937 random(5);
    std::exponential_distribution<double> popularity;
    for (int times = 0; times < 40; ++times) {
        std::vector<double> share(64);
        for (double& s : share) s = std::pow(popularity(random), 2.0);
        const double mean = sum(share) / 16.0;
        double before = 1e300;
        for (const int slots : {0, 1, 2, 4}) {
            const routing::Replicated r = routing::replicate(share, 16, slots, 8);
            CHECK(sum(r.loads) == nearly(sum(share)));
            CHECK(r.copies <= 16 * slots);
            CHECK(r.most_sent <= r.copies);
            CHECK(hottest(r.loads) <= before + 0.02 * mean);
            before = hottest(r.loads);
        }
        // No rank of a domain comes below its mean, and four slots of each reach it nearly.
        double floor = 0.0;
        for (const int first : {0, 32})
            floor = std::max(floor, sum({share.begin() + first, share.begin() + first + 32}) / 8);
        CHECK(before >= floor * (1.0 - 1e-9));
        CHECK(before <= floor + 0.03 * mean);
    }
}

TEST_CASE("replication: balance and copies of UltraEP's table") {
    // README of https://github.com/Dots-Infra/UltraEP: 256 experts on 64 ranks, 2 spare slots each, 8 experts a token.
    struct Row {
        double before;
        int most, total;
    };
    for (const Row& row : {Row{1.51, 4, 38}, {2.01, 5, 46}, {3.03, 6, 51}}) {
        double low = 0.0, high = 4.0;
        for (int i = 0; i < 40; ++i)
            (imbalance(published_load(256, 64, 8, 0.5 * (low + high)), 64) < row.before ? low : high) =
                0.5 * (low + high);
        const std::vector<double> share = published_load(256, 64, 8, high);
        CAPTURE(row.before);
        CHECK(imbalance(share, 64) == nearly(row.before).epsilon(0.001));
        const routing::Replicated r = routing::replicate(share, 64, 2, 64);
        CHECK(hottest(r.loads) * 64.0 / sum(share) < 1.015); // printed: 1.01
        CHECK(r.copies >= 0.7 * row.total);
        CHECK(r.copies <= 1.3 * row.total);
        CHECK(std::abs(r.most_sent - row.most) <= 1);
    }
}
