// Pipeline stages: layout strings parsed and written, layers cut evenly, and cut by the FLOPs of layers, MTP and head.
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/schedule.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace moe::plan {
namespace {

// Expands a layout string into its plain symbols E t m L |, e.g. "(tt|)*2" into "tt|tt|". `most`: symbols that the
// model and the stage count can use at all; more are refused while expanding, so that "(t*99999)*99999" costs nothing.
class LayoutParser {
public:
    LayoutParser(const std::string& text, std::size_t most) : text_(text), most_(most) {}

    std::string expand() {
        std::string symbols = sequence(0);
        if (at_ < text_.size())
            refuse("layout \"{}\": unmatched ')' at character {}: remove it", shown(text_), at_ + 1);
        return symbols;
    }

private:
    static bool ignored(char c) { return c == ',' || c == ' '; }

    std::string sequence(int depth) {
        std::string symbols;
        for (skip(); at_ < text_.size() && text_[at_] != ')'; skip()) {
            const std::string item = repeated(item_at(depth));
            if (symbols.size() + item.size() > most_) too_long();
            symbols += item;
        }
        return symbols;
    }

    std::string item_at(int depth) {
        constexpr int deepest = 16;
        const char c = text_[at_];
        const std::size_t place = ++at_;
        if (c != '(') {
            if (std::string("EtmL|").find(c) == std::string::npos)
                refuse("layout \"{}\": unknown symbol '{}' at character {}: use E t m L | ( )*n", shown(text_),
                       shown({&c, 1}), place);
            return std::string(1, c);
        }
        if (depth == deepest) refuse("layout \"{}\": more than {} nested parentheses", shown(text_), deepest);
        std::string symbols = sequence(depth + 1);
        if (at_ >= text_.size()) refuse("layout \"{}\": '(' at character {} is not closed", shown(text_), place);
        ++at_;
        return symbols;
    }

    std::string repeated(const std::string& item) {
        skip();
        if (at_ >= text_.size() || text_[at_] != '*') return item;
        ++at_;
        skip();
        const std::size_t first = at_;
        std::size_t count = 0;
        for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_) {
            count = count * 10 + static_cast<std::size_t>(text_[at_] - '0');
            if (count > most_) too_long();
        }
        if (first == at_ || count == 0)
            refuse("layout \"{}\": '*' at character {} needs a count of 1 or more behind it", shown(text_), first);
        if (item.size() * count > most_) too_long();
        std::string symbols;
        for (std::size_t i = 0; i < count; ++i) symbols += item;
        return symbols;
    }

    void skip() {
        while (at_ < text_.size() && ignored(text_[at_])) ++at_;
    }
    [[noreturn]] void too_long() const {
        refuse("layout \"{}\": expands to more than the {} symbols that the layers and pp*vpp stages have room for",
               text_, most_);
    }

    const std::string& text_;
    std::size_t most_;
    std::size_t at_ = 0;
};

struct Needed {
    int layers, mtp, stages;
};

// Puts plain symbols into stages and checks that they hold the model once, in order.
std::vector<Stage> place_symbols(const std::string& symbols, const std::string& text, const Needed& needed) {
    if (symbols.find('E') != 0 || symbols.rfind('E') != 0)
        refuse("layout \"{}\": one E (embedding) must stand before everything else", text);
    if (symbols.find('L') != symbols.size() - 1) refuse("layout \"{}\": one L (loss) must be the last symbol", text);
    std::vector<Stage> result(1);
    result.front().embedding = true;
    int layers = 0;
    int mtp = 0;
    for (const char c : symbols) {
        Stage& stage = result.back();
        if (c == '|') {
            result.push_back({.first_layer = layers});
        } else if (c == 't') {
            if (mtp > 0) refuse("layout \"{}\": m must stand behind every t", text);
            ++stage.layers;
            ++layers;
        } else if (c == 'm') {
            if (mtp > stage.mtp) refuse("layout \"{}\": all m must be in one stage", text);
            ++stage.mtp;
            ++mtp;
        }
    }
    result.back().loss = true;
    if (layers != needed.layers)
        refuse("layout \"{}\": holds {} (t), the model has {}", text, counted(layers, "decoder layer"), needed.layers);
    if (mtp != needed.mtp)
        refuse("layout \"{}\": holds {} (m), the model has {}", text, counted(mtp, "MTP layer"), needed.mtp);
    if (static_cast<int>(result.size()) != needed.stages)
        refuse("layout \"{}\": has {}, pp*vpp is {}", text, counted(result.size(), "stage"), needed.stages);
    return result;
}

std::vector<Stage> even_stages(const Needed& needed) {
    if (needed.stages > needed.layers)
        refuse("pp*vpp: {} for {}: lower pp or vpp, or give a layout", counted(needed.stages, "stage"),
               counted(needed.layers, "decoder layer"));
    const int base = needed.layers / needed.stages;
    const int longer = needed.layers % needed.stages;
    std::vector<Stage> result(static_cast<std::size_t>(needed.stages));
    int layer = 0;
    for (int k = 0; k < needed.stages; ++k) {
        Stage& stage = result[static_cast<std::size_t>(k)];
        // The longer stages end right before the last one, which has the loss: neighbours lie on different ranks, and
        // late stages hold fewer micro-batches in flight.
        const bool is_longer = k >= needed.stages - 1 - longer && k < needed.stages - 1;
        stage.first_layer = layer;
        stage.layers = base + (is_longer ? 1 : 0);
        layer += stage.layers;
    }
    result.front().embedding = true;
    result.back().mtp = needed.mtp;
    result.back().loss = true;
    return result;
}

std::string stage_text(const Stage& stage) {
    constexpr int longest_run = 4; // "tttt" reads better than "t*4"
    std::string text = stage.embedding ? "E" : "";
    const auto run = [&](char symbol, int count) {
        text += count > longest_run ? fmt::format("{}*{}", symbol, count)
                                    : std::string(static_cast<std::size_t>(count), symbol);
    };
    run('t', stage.layers);
    run('m', stage.mtp);
    return text + (stage.loss ? "L" : "");
}

// Weights of what is cut: every decoder layer, then the MTP layers as one unit, then the head.
struct UnitWeights {
    std::vector<std::int64_t> layer;
    std::int64_t mtp = 0;
    std::int64_t head = 0;
};

UnitWeights unit_weights(const model::Model& model, std::int64_t seq) {
    // Differences of the one FLOPs function, so that the cut follows the same convention as every figure.
    model::Model part = model;
    const auto flops = [&] { return model::model_flops_per_token(part, seq); };
    part.layers.clear();
    const double head_and_mtp = flops();
    part.mtp.clear();
    const double head = flops();
    std::vector<double> kinds;
    double sum = 0.0;
    for (int kind = 0; kind < static_cast<int>(model.kinds.size()); ++kind) {
        part.layers = {kind};
        kinds.push_back(flops() - head);
    }
    for (const int kind : model.layers) sum += kinds[static_cast<std::size_t>(kind)];
    const double unit = sum / (1000.0 * static_cast<double>(std::max<std::size_t>(model.layers.size(), 1)));
    const auto scaled = [&](double value) { return unit > 0.0 ? std::int64_t{std::llround(value / unit)} : 0; };
    UnitWeights weights;
    for (const int kind : model.layers) weights.layer.push_back(scaled(kinds[static_cast<std::size_t>(kind)]));
    weights.mtp = scaled(head_and_mtp - head);
    weights.head = scaled(head);
    return weights;
}

// Runs that a greedy cut needs when none may weigh more than `limit`.
int runs_needed(const std::vector<std::int64_t>& weights, std::int64_t limit) {
    int runs = 1;
    std::int64_t sum = 0;
    for (const std::int64_t weight : weights) {
        if (sum + weight > limit) {
            ++runs;
            sum = 0;
        }
        sum += weight;
    }
    return runs;
}

// The least weight that the heaviest of at most `count` contiguous runs can have, by bisection.
std::int64_t lightest_limit(const std::vector<std::int64_t>& weights, int count) {
    std::int64_t low = *std::max_element(weights.begin(), weights.end());
    std::int64_t high = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
    while (low < high) {
        const std::int64_t middle = low + (high - low) / 2;
        if (runs_needed(weights, middle) <= count)
            high = middle;
        else
            low = middle + 1;
    }
    return high;
}

// Cuts `weights` into `count` non-empty runs, none heavier than need be, with the smallest sum of squares (dynamic
// programming over where the last run begins). Returns the first unit behind each run.
std::vector<int> partition(const std::vector<std::int64_t>& weights, int count) {
    const auto units = weights.size();
    const auto runs = static_cast<std::size_t>(count);
    const std::int64_t limit = lightest_limit(weights, count);
    constexpr std::int64_t none = std::numeric_limits<std::int64_t>::max();
    std::vector<std::int64_t> best(units + 1, none);
    best[0] = 0;
    std::vector<std::vector<int>> begins(runs, std::vector<int>(units + 1, 0));
    for (std::size_t k = 0; k < runs; ++k) {
        std::vector<std::int64_t> next(units + 1, none);
        for (std::size_t to = k + 1; to <= units; ++to) {
            std::int64_t run = 0;
            for (std::size_t from = to; from-- > k;) {
                run += weights[from];
                if (run > limit) break;
                // Ties go to the longer last run: late stages hold fewer micro-batches in flight.
                if (best[from] == none || best[from] + run * run > next[to]) continue;
                next[to] = best[from] + run * run;
                begins[k][to] = static_cast<int>(from);
            }
        }
        best = std::move(next);
    }
    std::vector<int> ends(runs, static_cast<int>(units));
    for (std::size_t k = runs - 1; k > 0; --k) ends[k - 1] = begins[k][static_cast<std::size_t>(ends[k])];
    return ends;
}

} // namespace

std::vector<Stage> stages(const Plan& plan) {
    const std::int64_t count = static_cast<std::int64_t>(plan.pp) * plan.vpp;
    constexpr std::int64_t most = 1 << 20;
    if (count < 1 || count > most)
        refuse("pp*vpp: {} * {} = {} stages is outside 1 to {}", plan.pp, plan.vpp, count, most);
    const Needed needed{static_cast<int>(plan.model->layers.size()), static_cast<int>(plan.model->mtp.size()),
                        static_cast<int>(count)};
    if (plan.layout.empty()) return even_stages(needed);
    const auto room = static_cast<std::size_t>(needed.layers + needed.mtp + needed.stages) + 2;
    return place_symbols(LayoutParser(plan.layout, room).expand(), plan.layout, needed);
}

int layout_stage_count(const Plan& plan) {
    constexpr std::size_t most_stages = 4096; // most stages, far above any pipeline
    const std::size_t room = plan.model->layers.size() + plan.model->mtp.size() + 2 + most_stages;
    const std::string symbols = LayoutParser(plan.layout, room).expand();
    return 1 + static_cast<int>(std::count(symbols.begin(), symbols.end(), '|'));
}

std::string layout_to_string(const std::vector<Stage>& stages) {
    std::string text;
    for (std::size_t k = 0; k < stages.size();) {
        const std::string one = stage_text(stages[k]);
        std::size_t run = 1;
        // The last stage has no '|' behind it and stays outside of a repetition.
        while (k + run + 1 < stages.size() && stage_text(stages[k + run]) == one) ++run;
        const bool last = k + 1 == stages.size();
        if (run > 1)
            text += fmt::format("({}|)*{}", one, run);
        else
            text += last ? one : one + "|";
        k += run;
    }
    return text;
}

std::vector<std::int64_t> stage_weights(const model::Model& model, std::int64_t seq, const std::vector<Stage>& stages) {
    const UnitWeights weights = unit_weights(model, seq);
    std::vector<std::int64_t> result;
    for (const Stage& stage : stages) {
        std::int64_t sum = (stage.mtp > 0 ? weights.mtp : 0) + (stage.loss ? weights.head : 0);
        for (int i = 0; i < stage.layers; ++i)
            sum += weights.layer[static_cast<std::size_t>(stage.first_layer) + static_cast<std::size_t>(i)];
        result.push_back(sum);
    }
    return result;
}

bool may_begin_stage(const model::Model& model, int layer) { return !model.kind_of(layer).attention.shares_index; }

int cut_units(const model::Model& model) {
    int units = (model.mtp.empty() ? 0 : 1) + 1;
    for (int layer = 0; layer < static_cast<int>(model.layers.size()); ++layer) units += may_begin_stage(model, layer);
    return units;
}

std::vector<Stage> balanced_stages(const model::Model& model, std::int64_t seq, int count) {
    const UnitWeights weights = unit_weights(model, seq);
    std::vector<std::int64_t> units;
    std::vector<int> begins; // first layer of each run, and the end
    const int layers = static_cast<int>(weights.layer.size());
    for (int layer = 0; layer < layers; ++layer) {
        const std::int64_t weight = weights.layer[static_cast<std::size_t>(layer)];
        if (may_begin_stage(model, layer)) {
            units.push_back(weight);
            begins.push_back(layer);
        } else {
            units.back() += weight;
        }
    }
    begins.push_back(layers);
    const int runs = static_cast<int>(units.size()), mtp = static_cast<int>(model.mtp.size());
    if (mtp > 0) units.push_back(weights.mtp);
    units.push_back(weights.head);
    if (count < 1 || count > static_cast<int>(units.size()))
        refuse("stages: {} for {} units (layers, MTP, head): lower pp or vpp", count, units.size());
    const std::vector<int> ends = partition(units, count);
    std::vector<Stage> result;
    int from = 0;
    for (const int to : ends) {
        Stage stage;
        stage.first_layer = begins[static_cast<std::size_t>(std::min(from, runs))];
        stage.layers = begins[static_cast<std::size_t>(std::min(to, runs))] - stage.first_layer;
        stage.mtp = mtp > 0 && from <= runs && to > runs ? mtp : 0;
        result.push_back(stage);
        from = to;
    }
    result.front().embedding = true;
    result.back().loss = true;
    return result;
}

} // namespace moe::plan
