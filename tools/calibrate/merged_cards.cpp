// The calls of several cards as a sum of logarithms: one for each call, one for each card and family.
#include "tools/calibrate/merged_cards.hpp"

#include "planner/base/error.hpp"
#include "planner/program/measured.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string_view>
#include <utility>

namespace moe::tools {

namespace {

// Beyond this a family's calls are of other kernels: cards of a kind differ by some per cent, calls of 2 us by 10.
constexpr double most_apart = 1.25;

using Shape = std::pair<double, std::vector<double>>; // work and sides
struct Seen {
    std::vector<double> logs; // of seconds, by card; NaN where it has no such call
    std::vector<double> clocks;

    bool has(std::size_t card) const { return !std::isnan(logs[card]); }
    std::size_t count() const {
        return logs.size() - static_cast<std::size_t>(
                                 std::count_if(logs.begin(), logs.end(), [](double log) { return std::isnan(log); }));
    }
    // The mean logarithm of the cards that have it, less what those cards take longer.
    double level(const std::vector<double>& longer) const {
        double sum = 0.0;
        for (std::size_t card = 0; card < logs.size(); ++card)
            if (has(card)) sum += logs[card] - longer[card];
        return sum / static_cast<double>(count());
    }
    // 0 where one of the cards does not know it.
    double clock() const {
        double sum = 0.0;
        for (std::size_t card = 0; card < logs.size(); ++card) {
            if (has(card) && clocks[card] == 0.0) return 0.0;
            sum += clocks[card];
        }
        return sum / static_cast<double>(count());
    }
};
using Calls = std::map<Shape, Seen>;

bool in_step(const std::string& family) {
    return std::any_of(program::in_step_keys.begin(), program::in_step_keys.end(),
                       [&family](const char* key) { return family.rfind(key, 0) == 0; });
}

// True for what a card's clock under load decides, rather than its memory.
bool multiplies(const std::string& family) {
    constexpr std::string_view kinds[] = {"gemm", "grouped_gemm", "attention"};
    return std::any_of(std::begin(kinds), std::end(kinds),
                       [&family](std::string_view kind) { return family.rfind(kind, 0) == 0; });
}

Calls calls_of(const std::vector<machine::Hardware>& cards, const std::string& family) {
    Calls calls;
    for (std::size_t card = 0; card < cards.size(); ++card) {
        const auto found = cards[card].measured.find(family);
        if (found == cards[card].measured.end()) continue;
        for (const machine::MeasuredCall& call : found->second) {
            Seen& seen = calls[{call.work, call.sides}];
            seen.logs.resize(cards.size(), NAN);
            seen.clocks.resize(cards.size(), 0.0);
            seen.logs[card] = std::log(call.seconds);
            seen.clocks[card] = call.clock_hz;
        }
    }
    return calls;
}

// By card, how much longer the calls take that it shares with others, as a logarithm; `usual` where it shares none. The
// usual counts as one shared call elsewhere, so that cards that no call connects are levelled by it, and the mean of
// the cards that have such calls is that of their usual ones.
std::vector<double> factors_of(const std::vector<const Calls*>& families, const std::vector<double>& usual) {
    std::vector<const Seen*> shared;
    std::set<std::size_t> having;
    for (const Calls* calls : families)
        for (const auto& [shape, seen] : *calls) {
            if (seen.count() > 1) shared.push_back(&seen);
            for (std::size_t card = 0; card < usual.size(); ++card)
                if (seen.has(card)) having.insert(card);
        }
    std::vector<double> longer = usual;
    constexpr int most_rounds = 10000;
    constexpr double settled = 1e-10;
    for (int round = 0; round < most_rounds; ++round) {
        std::vector<double> sums = usual;
        std::vector<double> counts(usual.size(), 1.0);
        for (const Seen* seen : shared) {
            const double level = seen->level(longer);
            for (std::size_t card = 0; card < usual.size(); ++card)
                if (seen->has(card)) sums[card] += seen->logs[card] - level, counts[card] += 1.0;
        }
        double moved = 0.0, above = 0.0; // above: by how much the cards of these calls came out over the usual
        for (const std::size_t card : having)
            above += (sums[card] / counts[card] - usual[card]) / static_cast<double>(having.size());
        for (const std::size_t card : having) {
            const double next = sums[card] / counts[card] - above;
            moved = std::max(moved, std::abs(next - longer[card]));
            longer[card] = next;
        }
        if (moved < settled) break;
    }
    return longer;
}

template <class Value>
void same(const std::string& path, const char* field, const Value& value, const std::string& first_path,
          const Value& first) {
    if (value != first)
        refuse("{}: {} = {} where {} has {}: cards of one kind can be merged alone", path, field, value, first_path,
               first);
}

// Refuses a profile that is not of one more card of the first one's kind.
void check_kind(const machine::Hardware& card, const std::string& path, const machine::Hardware& first,
                const std::string& first_path) {
    if (card.cpu) refuse("{}: cpu = true: cards are merged, and a CPU is calibrated where it is", path);
    if (!card.cards.empty())
        refuse("{}: cards: is of {} cards already: name the profiles of single ones", path, card.cards.size());
    if (card.measured.empty()) refuse("{}: measured: holds no calls: merge what moe-plan calibrate wrote", path);
    same(path, "name", card.name, first_path, first.name);
    same(path, "vendor", card.vendor, first_path, first.vendor);
    same(path, "compute_capability", card.compute_capability, first_path, first.compute_capability);
    same(path, "sm_count", card.sm_count, first_path, first.sm_count);
    same(path, "memory_bytes", card.memory_bytes, first_path, first.memory_bytes);
    same(path, "memory_bandwidth", card.memory_bandwidth, first_path, first.memory_bandwidth);
    for (std::size_t i = 0; i < machine::precision_count; ++i) {
        const std::string field = std::string("peak_flops: ") + machine::to_string(static_cast<machine::Precision>(i));
        same(path, field.c_str(), card.peak_flops[i], first_path, first.peak_flops[i]);
    }
}

// Refuses families that another version of moe-plan measured.
void check_versions(const machine::Hardware& card, const std::string& path, const machine::Hardware& other,
                    const std::string& other_path) {
    for (const auto& [family, calls] : card.measured) {
        const auto known = other.measured.find(family);
        if (known == other.measured.end() || calls.empty() || known->second.empty()) continue;
        const std::size_t sides = calls.front().sides.size(), others = known->second.front().sides.size();
        if (sides != others)
            refuse("{}: measured: {}: has {} sides a call where {} has {}: calibrate with one version of moe-plan",
                   path, family, sides, other_path, others);
    }
    for (const auto& [family, tiles] : card.product_tiles) {
        const auto known = other.product_tiles.find(family);
        if (known != other.product_tiles.end() && known->second != tiles)
            refuse("{}: product_tiles: {}: are others than those of {}: calibrate with one version of moe-plan", path,
                   family, other_path);
    }
}

// Refuses a family whose calls take longer on one card than on another by more than cards differ by. What the host has
// a part in is a machine's own.
void check_factors(const std::string& family, const std::vector<double>& longer, const Calls& calls,
                   const std::vector<std::string>& paths) {
    if (family.rfind("copy_", 0) == 0) return;
    std::set<std::size_t> sharing;
    for (const auto& [shape, seen] : calls)
        for (std::size_t card = 0; card < paths.size(); ++card)
            if (seen.count() > 1 && seen.has(card)) sharing.insert(card);
    if (sharing.empty()) return;
    const auto less = [&longer](std::size_t a, std::size_t b) { return longer[a] < longer[b]; };
    const std::size_t slow = *std::max_element(sharing.begin(), sharing.end(), less),
                      fast = *std::min_element(sharing.begin(), sharing.end(), less);
    const double apart = std::exp(longer[slow] - longer[fast]);
    if (apart > most_apart)
        refuse("{}: measured: {}: takes {:.2f} times as long as in {}: no two cards of a kind differ so, their kernels "
               "do: calibrate again, or take the family out of the older profile",
               paths[slow], family, apart, paths[fast]);
}

// Keys of what GPUs that train together take have two numbers of one measurement in place of work and seconds.
std::vector<machine::MeasuredCall> mean_in_step(const std::vector<machine::Hardware>& cards,
                                                const std::string& family) {
    machine::MeasuredCall mean;
    double count = 0.0;
    for (const machine::Hardware& card : cards) {
        const auto found = card.measured.find(family);
        if (found == card.measured.end() || found->second.empty()) continue;
        mean.work += found->second.front().work;
        mean.seconds += found->second.front().seconds;
        count += 1.0;
    }
    return {{mean.work / count, mean.seconds / count, {}}};
}

std::vector<machine::Hardware> loaded(const std::vector<std::string>& paths) {
    if (paths.size() < 2) refuse("--merge {}: name the profiles of two cards or more", paths.empty() ? "" : paths[0]);
    std::vector<machine::Hardware> cards;
    for (const std::string& path : paths) {
        cards.push_back(machine::load_hardware(path));
        check_kind(cards.back(), path, cards.front(), paths.front());
        for (std::size_t other = 0; other + 1 < cards.size(); ++other)
            check_versions(cards.back(), path, cards[other], paths[other]);
    }
    return cards;
}

} // namespace

machine::Hardware merged_cards(const std::vector<std::string>& paths) {
    const std::vector<machine::Hardware> cards = loaded(paths);
    machine::Hardware kind = cards.front();
    std::map<std::string, Calls> families;
    for (const machine::Hardware& card : cards) {
        kind.context_bytes = std::max(kind.context_bytes, card.context_bytes);
        kind.product_tiles.insert(card.product_tiles.begin(), card.product_tiles.end());
        kind.cards.push_back({card.measured_by, {}});
        for (const auto& [family, calls] : card.measured)
            if (!in_step(family) && !families.contains(family)) families[family] = calls_of(cards, family);
        for (const auto& [family, calls] : card.measured)
            if (in_step(family)) kind.measured[family] = mean_in_step(cards, family);
    }
    std::vector<const Calls*> products, others;
    for (const auto& [family, calls] : families) (multiplies(family) ? products : others).push_back(&calls);
    const std::vector<double> none(cards.size(), 0.0);
    const std::vector<double> of_products = factors_of(products, none), of_others = factors_of(others, none);
    for (const auto& [family, calls] : families) {
        const std::vector<double> longer = factors_of({&calls}, multiplies(family) ? of_products : of_others);
        check_factors(family, longer, calls, paths);
        std::vector<machine::MeasuredCall>& mean = kind.measured[family];
        mean.clear();
        for (const auto& [shape, seen] : calls) {
            mean.push_back({shape.first, std::exp(seen.level(longer)), shape.second, seen.clock()});
            for (std::size_t card = 0; card < cards.size(); ++card)
                if (seen.has(card)) kind.cards[card].factors[family] = std::exp(longer[card]);
        }
    }
    return kind;
}

} // namespace moe::tools
