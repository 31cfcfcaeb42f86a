// One table says which cells a sibling gives and on which others each of them depends.
#include "simulator/published/sibling.hpp"

#include "planner/base/error.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdint>
#include <optional>
#include <utility>

namespace moe::published {
namespace {

using Count = std::optional<std::int64_t>;
using Same = bool (*)(const Run&, const Run&);

// Degrees that are not stated are 1; what has no default has to be stated on both sides.
template <Count Run::*member>
bool same_degree(const Run& a, const Run& b) {
    return (a.*member).value_or(1) == (b.*member).value_or(1);
}
template <auto member>
bool same_stated(const Run& a, const Run& b) {
    return a.*member == b.*member && a.*member != std::remove_cvref_t<decltype(a.*member)>();
}
bool same_sharding(const Run& a, const Run& b) { return a.fsdp.value_or(false) == b.fsdp.value_or(false); }
bool same_mtp(const Run& a, const Run& b) { return !a.mtp_layers || !b.mtp_layers || *a.mtp_layers == *b.mtp_layers; }

std::string text(const Count& value) { return std::to_string(*value); }
std::string text(const std::optional<bool>& value) { return *value ? "1" : "0"; }
std::string text(const std::string& value) { return value; }

// A cell that a sibling may give.
struct BlankCell {
    const char* name;
    std::vector<Same> needs;
    bool of_stack; // what a release of the software offers or does by itself
    bool (*blank)(const Run&);
    void (*take)(Run&, const Run&);
    std::string (*say)(const Run&);
};

template <auto member>
BlankCell cell(const char* name, bool of_stack, std::vector<Same> needs) {
    using Value = std::remove_cvref_t<decltype(std::declval<Run>().*member)>;
    return {name,
            std::move(needs),
            of_stack,
            [](const Run& run) { return run.*member == Value(); },
            [](Run& run, const Run& from) { run.*member = from.*member; },
            [](const Run& run) { return text(run.*member); }};
}

const std::vector<BlankCell>& cells() {
    constexpr Same tp = same_degree<&Run::tp>, pp = same_degree<&Run::pp>, cp = same_degree<&Run::cp>,
                   ep = same_degree<&Run::ep>, vpp = same_degree<&Run::vpp>, mbs = same_stated<&Run::mbs>,
                   seq = same_stated<&Run::seq_len>, gpus = same_stated<&Run::gpus>, sharding = same_sharding;
    // What a rank holds decides what has to be recomputed or moved away.
    const std::vector<Same> memory{tp, pp, vpp, cp, ep, mbs, seq, sharding};
    static const std::vector<BlankCell> list{
        cell<&Run::ep>("ep", false, {gpus, tp, pp, cp, sharding}),
        cell<&Run::vpp>("vpp", false, {tp, pp}),
        cell<&Run::etp>("etp", false, {tp, ep}),
        cell<&Run::mbs>("mbs", false, {tp, pp, vpp, cp, ep, seq, sharding}),
        cell<&Run::pipeline_layout>("pipeline_layout", false, {pp, vpp, same_mtp}),
        cell<&Run::cp_comm>("cp_comm", false, {tp, cp, seq}),
        cell<&Run::dispatcher>("dispatcher", true, {ep}),
        cell<&Run::cuda_graph>("cuda_graph", true, {pp, ep}),
        cell<&Run::ep_overlap>("ep_overlap", true, {pp, ep}),
        cell<&Run::recompute_modules>("recompute_modules", true, memory),
        cell<&Run::offload_modules>("offload_modules", true, memory),
        cell<&Run::optimizer>("optimizer", true, {}),
    };
    return list;
}

constexpr std::array<Same, 18> likeness{
    same_stated<&Run::release>,
    same_stated<&Run::precision>,
    same_stated<&Run::gpus>,
    same_stated<&Run::gbs>,
    same_stated<&Run::mbs>,
    same_stated<&Run::seq_len>,
    same_sharding,
    same_degree<&Run::tp>,
    same_degree<&Run::pp>,
    same_degree<&Run::cp>,
    same_degree<&Run::ep>,
    same_stated<&Run::vpp>,
    same_stated<&Run::etp>,
    same_stated<&Run::cuda_graph>,
    same_stated<&Run::dispatcher>,
    same_stated<&Run::recompute_modules>,
    same_stated<&Run::ep_overlap>,
    same_stated<&Run::pipeline_layout>,
};

int equal_cells(const Run& a, const Run& b) {
    return static_cast<int>(std::count_if(likeness.begin(), likeness.end(), [&](Same same) { return same(a, b); }));
}

// Bits of a number format by its published name: "BF16", "MXFP8", "FP8-tensor(current)", "NVFP4"; 0 for others.
int bits_of(const std::string& precision) {
    std::string word;
    for (const char c : precision) word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    for (const auto& [part, bits] : {std::pair{"bf16", 16}, std::pair{"fp8", 8}, std::pair{"fp4", 4}})
        if (word.find(part) != std::string::npos) return bits;
    return 0;
}

} // namespace

void forget_misprints(Run& run) {
    if (run.other_settings.find("vpp misprinted") != std::string::npos) run.vpp.reset();
    if (run.other_settings.find("ep misprinted") != std::string::npos) run.ep.reset();
}

Siblings::Siblings(std::vector<Run> recipes, std::function<Origin(const Run&)> origin_of)
    : origin_of_(std::move(origin_of)) {
    for (Run& run : recipes) {
        Origin origin = origin_of_(run);
        forget_misprints(run);
        if (!origin.source.empty()) recipes_.push_back({std::move(run), std::move(origin)});
    }
}

void Siblings::fill(Run& run, std::vector<std::string>& notes) const {
    const Origin origin = origin_of_(run);
    const int bits = bits_of(run.precision);
    std::vector<const Recipe*> siblings;
    for (const Recipe& recipe : recipes_)
        if (recipe.run.model == run.model && recipe.run.system == run.system && recipe.origin.source == origin.source &&
            bits_of(recipe.run.precision) == bits)
            siblings.push_back(&recipe);
    if (siblings.empty()) return;
    const Run printed = run;
    std::stable_sort(siblings.begin(), siblings.end(), [&printed](const Recipe* a, const Recipe* b) {
        return equal_cells(a->run, printed) > equal_cells(b->run, printed);
    });
    std::vector<std::pair<std::string, std::string>> given; // sibling, what it gave
    for (const BlankCell& cell : cells()) {
        if (!cell.blank(run)) continue;
        const auto gives = [&](const Recipe* sibling) {
            return !cell.blank(sibling->run) && (!cell.of_stack || sibling->origin.stack == origin.stack) &&
                   std::all_of(cell.needs.begin(), cell.needs.end(),
                               [&](Same same) { return same(sibling->run, run); });
        };
        const auto found = std::find_if(siblings.begin(), siblings.end(), gives);
        if (found == siblings.end()) continue;
        cell.take(run, (*found)->run);
        const std::string said = fmt::format("{} {}", cell.name, cell.say(run));
        if (given.empty() || given.back().first != (*found)->run.run_id)
            given.emplace_back((*found)->run.run_id, said);
        else
            given.back().second += ", " + said;
    }
    for (const auto& [sibling, said] : given)
        notes.push_back(fmt::format("blank cells are those of {}: {}", sibling, said));
}

} // namespace moe::published
