// Schedules: every slot once, no deadlock across pipeline ranks, and the in-flight counts of the published formulas.
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "planner/plan/plan.hpp"
#include "planner/plan/schedule.hpp"

#include <doctest/doctest.h>

#include <algorithm>

namespace {

using namespace moe;

struct Case {
    plan::ScheduleKind kind;
    int pp, vpp, micro_batches;
    bool ep_overlap = false;
};

std::vector<Case> cases() {
    std::vector<Case> result;
    for (const bool overlap : {false, true}) {
        for (const int pp : {1, 2, 3, 4, 8})
            for (const int m : {1, 2, 3, 7, 8, 24})
                result.push_back({plan::ScheduleKind::one_f_one_b, pp, 1, m, overlap});
        for (const int pp : {2, 3, 4, 8})
            for (const int vpp : {1, 2, 3, 5})
                for (const int groups : {1, 2, 3, 6})
                    result.push_back({plan::ScheduleKind::interleaved, pp, vpp, pp * groups, overlap});
    }
    return result;
}

using Orders = std::vector<std::vector<plan::Turn>>;

Orders orders(const Case& c) {
    Orders result;
    for (int rank = 0; rank < c.pp; ++rank)
        result.push_back(plan::order(c.kind, c.pp, c.vpp, c.micro_batches, rank, c.ep_overlap));
    return result;
}

// Every (chunk, micro-batch) once forward, then once backward; micro-batches of a chunk leave in the order they came.
void check_complete(const std::vector<plan::Turn>& turns, const Case& c) {
    std::vector<int> forward(static_cast<std::size_t>(c.vpp), 0);
    std::vector<int> backward = forward;
    for (const plan::Turn& turn : turns) {
        REQUIRE(turn.chunk >= 0);
        REQUIRE(turn.chunk < c.vpp);
        const auto chunk = static_cast<std::size_t>(turn.chunk);
        REQUIRE(turn.micro_batch == (turn.forward() ? forward : backward)[chunk]++);
        REQUIRE(backward[chunk] <= forward[chunk]);
    }
    for (int chunk = 0; chunk < c.vpp; ++chunk) {
        CHECK(forward[static_cast<std::size_t>(chunk)] == c.micro_batches);
        CHECK(backward[static_cast<std::size_t>(chunk)] == c.micro_batches);
    }
}

// Plays the ranks against each other: a turn runs when the neighbouring virtual stage has produced its input. Returns
// the number of turns that could run; fewer than all of them is a deadlock.
std::size_t play(const Orders& all, const Case& c) {
    const int stages = c.pp * c.vpp;
    const auto place = [&](int stage, int micro_batch) {
        return static_cast<std::size_t>(stage) * static_cast<std::size_t>(c.micro_batches) +
               static_cast<std::size_t>(micro_batch);
    };
    const std::size_t slots = place(stages, 0);
    std::vector<bool> forward(slots, false);
    std::vector<bool> backward(slots, false);
    std::vector<std::size_t> next(all.size(), 0);
    std::size_t done = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (std::size_t rank = 0; rank < all.size(); ++rank) {
            for (; next[rank] < all[rank].size(); ++next[rank], ++done, moved = true) {
                const plan::Turn& turn = all[rank][next[rank]];
                const int stage = turn.chunk * c.pp + static_cast<int>(rank);
                const int mb = turn.micro_batch;
                const bool ready = turn.forward() ? stage == 0 || forward[place(stage - 1, mb)]
                                                  : forward[place(stage, mb)] &&
                                                        (stage == stages - 1 || backward[place(stage + 1, mb)]);
                if (!ready) break;
                (turn.forward() ? forward : backward)[place(stage, mb)] = true;
            }
        }
    }
    return done;
}

int most_in_flight(const std::vector<plan::Turn>& turns) {
    int now = 0;
    int most = 0;
    for (const plan::Turn& turn : turns) most = std::max(most, now += turn.forward() ? 1 : -1);
    return most;
}

plan::Plan plan_with(int layers, int mtp, int pp, int vpp, const std::string& layout = "") {
    auto model = std::make_shared<model::Model>();
    model->hidden = 64;
    model->vocab = 512;
    model->kinds.resize(1);
    model->kinds[0].attention.heads = 4;
    model->kinds[0].attention.kv_heads = 4;
    model->kinds[0].attention.qk_dim = 16;
    model->kinds[0].attention.v_dim = 16;
    model->kinds[0].dense_ffn = 256;
    model->layers.assign(static_cast<std::size_t>(layers), 0);
    model->mtp.assign(static_cast<std::size_t>(mtp), 0);
    plan::Plan plan;
    plan.model = model;
    plan.pp = pp;
    plan.vpp = vpp;
    plan.layout = layout;
    return plan;
}

std::vector<int> layer_counts(const std::vector<plan::Stage>& all) {
    std::vector<int> counts;
    for (const plan::Stage& stage : all) counts.push_back(stage.layers);
    return counts;
}

// Checks what every cut must satisfy: embedding first, loss last, layers contiguous and complete, MTP once.
void check_stages(const std::vector<plan::Stage>& all, int layers, int mtp) {
    int next = 0;
    int found = 0;
    for (std::size_t k = 0; k < all.size(); ++k) {
        CHECK(all[k].embedding == (k == 0));
        CHECK(all[k].loss == (k + 1 == all.size()));
        CHECK(all[k].first_layer == next);
        next += all[k].layers;
        found += all[k].mtp;
    }
    CHECK(next == layers);
    CHECK(found == mtp);
}

std::string refusal(const plan::Plan& plan) {
    try {
        plan::stages(plan);
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "";
}

bool refused_with(const std::string& layout, const std::string& words) {
    const std::string why = refusal(plan_with(4, 1, 2, 1, layout));
    CAPTURE(layout);
    CAPTURE(why);
    return why.find(words) != std::string::npos;
}

} // namespace

TEST_CASE("schedule: every slot runs once and no rank waits for ever") {
    for (const Case& c : cases()) {
        CAPTURE(c.pp);
        CAPTURE(c.vpp);
        CAPTURE(c.micro_batches);
        CAPTURE(c.ep_overlap);
        const Orders all = orders(c);
        std::size_t total = 0;
        for (const auto& turns : all) {
            check_complete(turns, c);
            total += turns.size();
        }
        CHECK(play(all, c) == total);
    }
}

TEST_CASE("schedule: in-flight chunks are min(m, PP-r) for 1F1B and 2(PP-r-1)+(VPP-1)PP+1 for what is interleaved or "
          "merged") {
    for (const Case& c : cases()) {
        if (c.kind == plan::ScheduleKind::interleaved && c.vpp == 1) continue; // its warm-up is not the 1F1B one
        const Orders all = orders(c);
        for (int rank = 0; rank < c.pp; ++rank) {
            const int more = c.ep_overlap ? 1 : 0;
            const int formula = c.kind == plan::ScheduleKind::one_f_one_b && !c.ep_overlap
                                    ? c.pp - rank
                                    : 2 * (c.pp - rank - 1) + (c.vpp - 1) * c.pp + 1 + more;
            CHECK(most_in_flight(all[static_cast<std::size_t>(rank)]) == std::min(formula, c.micro_batches * c.vpp));
        }
    }
}

TEST_CASE(
    "schedule: warm-up forwards come before the first backward's partner, and with EP overlap no other is alone") {
    for (const Case& c : cases())
        for (int rank = 0; rank < c.pp; ++rank) {
            const std::vector<plan::Turn> turns = plan::order(c.kind, c.pp, c.vpp, c.micro_batches, rank, c.ep_overlap);
            const int warm_up = plan::warm_up_forwards(c.kind, c.pp, c.vpp, c.micro_batches, rank, c.ep_overlap);
            const auto first =
                std::find_if(turns.begin(), turns.end(), [](const plan::Turn& t) { return !t.forward(); });
            const auto before = static_cast<int>(first - turns.begin());
            CHECK(before == std::min(warm_up + 1, c.micro_batches * c.vpp));
            if (!c.ep_overlap) continue;
            const auto alone =
                std::count_if(turns.begin(), turns.end(), [](const plan::Turn& t) { return t.forward() && !t.merged; });
            CHECK(alone >= warm_up); // a last one stays alone where its own backward follows
            for (int i = 0; i < warm_up; ++i) CHECK(!turns[static_cast<std::size_t>(i)].merged);
        }
}

TEST_CASE("schedule: micro-batch modulo in_flight never names an instance that is still in use") {
    for (const Case& c : cases()) {
        for (const auto& turns : orders(c)) {
            const std::vector<int> instances = plan::in_flight(turns, c.vpp);
            std::vector<std::vector<bool>> used;
            for (const int count : instances) used.emplace_back(static_cast<std::size_t>(count), false);
            for (const plan::Turn& turn : turns) {
                auto& chunk = used[static_cast<std::size_t>(turn.chunk)];
                const auto instance = static_cast<std::size_t>(turn.micro_batch) % chunk.size();
                REQUIRE(chunk[instance] != turn.forward());
                chunk[instance] = turn.forward();
            }
        }
    }
}

TEST_CASE("schedule: what is kept together is the fullest of what comes before backwards") {
    for (const Case& c : cases()) {
        for (const auto& turns : orders(c)) {
            const std::vector<plan::Kept> states = plan::kept_together(turns, c.vpp);
            std::vector<int> now(static_cast<std::size_t>(c.vpp), 0);
            std::vector<bool> met(states.size(), false);
            const auto before = [&](int forward, int backward) {
                bool covered = false;
                for (std::size_t i = 0; i < states.size(); ++i) {
                    if (states[i].forward != forward || states[i].backward != backward) continue;
                    const std::vector<int>& kept = states[i].micro_batches;
                    met[i] = met[i] || kept == now;
                    covered = covered ||
                              std::equal(kept.begin(), kept.end(), now.begin(), [](int x, int y) { return x >= y; });
                }
                REQUIRE(covered);
            };
            for (std::size_t i = 0; i < turns.size(); ++i) {
                const bool pair = turns[i].merged;
                if (pair)
                    before(turns[i].chunk, turns[i + 1].chunk);
                else if (!turns[i].forward())
                    before(-1, -1);
                now[static_cast<std::size_t>(turns[i].chunk)] += turns[i].forward() ? 1 : -1;
                if (pair) --now[static_cast<std::size_t>(turns[++i].chunk)];
            }
            CHECK(std::all_of(met.begin(), met.end(), [](bool seen) { return seen; }));
        }
    }
}

TEST_CASE("schedule: the interleaved order of rank 0 of PP2 VPP2 with 4 micro-batches, written out") {
    // Warm-up of 2(2-0-1) + (2-1)2 = 4 forwards, then one forward and one backward in turn.
    std::string text;
    for (const plan::Turn& turn : plan::order(plan::ScheduleKind::interleaved, 2, 2, 4, 0))
        text += fmt::format("{}{}.{} ", turn.forward() ? 'F' : 'B', turn.chunk, turn.micro_batch);
    CHECK(text == "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3 ");
}

TEST_CASE("schedule: impossible requests are refused") {
    CHECK_THROWS_AS(plan::order(plan::ScheduleKind::interleaved, 4, 2, 6, 0), Error);
    CHECK_THROWS_AS(plan::order(plan::ScheduleKind::one_f_one_b, 4, 2, 8, 0), Error);
    CHECK_THROWS_AS(plan::order(plan::ScheduleKind::one_f_one_b, 4, 1, 0, 0), Error);
    CHECK_THROWS_AS(plan::order(plan::ScheduleKind::one_f_one_b, 4, 1, 8, 4), Error);
}

TEST_CASE("stages: an even cut keeps the longer stages away from the loss and, where it can, from the embedding") {
    const auto v3 = plan::stages(plan_with(61, 1, 4, 4));
    check_stages(v3, 61, 1);
    CHECK(layer_counts(v3) == std::vector<int>{3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3});
    CHECK(v3.back().mtp == 1);
    CHECK(layer_counts(plan::stages(plan_with(7, 0, 4, 1))) == std::vector<int>{2, 2, 2, 1});
    CHECK(layer_counts(plan::stages(plan_with(8, 0, 4, 1))) == std::vector<int>{2, 2, 2, 2});
    CHECK(layer_counts(plan::stages(plan_with(5, 2, 1, 1))) == std::vector<int>{5});
    CHECK(refusal(plan_with(3, 0, 4, 1)).find("4 stages for 3 decoder layers") != std::string::npos);
    CHECK(refusal(plan_with(3, 0, 2000000000, 2000000000)) != "");
}

TEST_CASE("stages: published DeepSeek-V3 layout strings") {
    const auto h100 = plan::stages(plan_with(61, 1, 8, 4, "Et*3|(tt|)*29m|L"));
    check_stages(h100, 61, 1);
    CHECK(h100.size() == 32);
    CHECK(h100[0].layers == 3);
    CHECK(h100[29].layers == 2);
    CHECK(h100[30].mtp == 1);
    CHECK(h100[30].layers == 0);
    CHECK(h100[31].layers == 0);

    const auto gb200 = plan::stages(plan_with(61, 1, 4, 4, "Et*4|(tttt|)*14tmL"));
    check_stages(gb200, 61, 1);
    CHECK(gb200.size() == 16);
    CHECK(gb200[15].layers == 1);
    CHECK(gb200[15].mtp == 1);

    const std::string written = "Etttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tttt|tmL";
    const auto plain = plan::stages(plan_with(61, 1, 4, 4, written));
    CHECK(layer_counts(plain) == layer_counts(gb200));
    CHECK(layer_counts(plan::stages(plan_with(61, 1, 4, 4, "E t*4 | (t*4|)*14, t m L"))) == layer_counts(gb200));
    CHECK(layer_counts(plan::stages(plan_with(61, 0, 8, 4, "Et|(tt|)*30L"))) ==
          layer_counts(plan::stages(plan_with(61, 0, 8, 4, "E,t|((tt|)*15)*2L"))));
}

TEST_CASE("stages: layout strings are written as they are read") {
    for (const char* layout : {"Ettt|(tt|)*29m|L", "Etttt|(tttt|)*14tmL", "Et|(tt|)*30mL"}) {
        const int count = std::string(layout).find("14") != std::string::npos ? 16 : 32;
        const auto read = plan::stages(plan_with(61, 1, count, 1, layout));
        CHECK(plan::layout_to_string(read) == layout);
    }
    CHECK(plan::layout_to_string(plan::stages(plan_with(61, 1, 1, 1))) == "Et*61mL");
    CHECK(plan::layout_to_string(plan::stages(plan_with(5, 0, 5, 1, "Et||tt|tt|L"))) == "Et||(tt|)*2L");
}

TEST_CASE("stages: bad layout strings are refused with the place") {
    CHECK(refused_with("E", "one L (loss)"));
    CHECK(refused_with("tttt|mL", "one E (embedding)"));
    CHECK(refused_with("tE|tttmL", "one E (embedding)"));
    CHECK(refused_with("Ett|EttmL", "one E (embedding)"));
    CHECK(refused_with("Ett|ttLm", "one L (loss)"));
    CHECK(refused_with("EttL|ttmL", "one L (loss)"));
    CHECK(refused_with("Ett|tmtL", "m must stand behind every t"));
    CHECK(refused_with("Ett|ttL", "holds 0 MTP layers (m), the model has 1"));
    CHECK(refused_with("Ett|tmL", "holds 3 decoder layers (t), the model has 4"));
    CHECK(refused_with("Ett|tt|mL", "has 3 stages, pp*vpp is 2"));
    CHECK(refused_with("Ett|ttxL", "unknown symbol 'x' at character 7"));
    CHECK(refused_with("Ett|(ttmL", "'(' at character 5 is not closed"));
    CHECK(refused_with("Ett)|ttmL", "unmatched ')' at character 4"));
    CHECK(refused_with("Et*|ttmL", "needs a count of 1 or more"));
    CHECK(refused_with("Et*0|ttmL", "needs a count of 1 or more"));
    CHECK(refused_with("Et*-2|ttmL", "needs a count of 1 or more"));
    CHECK(refused_with("E(((t*99999)*99999)*99999)*99999|mL", "expands to more than"));
    CHECK(refused_with("E" + std::string(10000, '(') + "t", "nested parentheses"));
    CHECK(refused_with("E((()*8)*8)*8tttttttttttttttttttttttt", "expands to more than"));
    CHECK(refusal(plan_with(4, 2, 2, 1, "Ettttm|mL")).find("all m must be in one stage") != std::string::npos);
}

TEST_CASE("stages: the balanced cut has the lightest possible heaviest stage") {
    for (const int layers : {3, 5, 8, 13})
        for (const int mtp : {0, 1})
            for (int count = 1; count <= 4; ++count) {
                const plan::Plan plan = plan_with(layers, mtp, count, 1);
                const model::Model& model = *plan.model;
                const auto cut = plan::balanced_stages(model, 128, count);
                check_stages(cut, layers, mtp);
                const auto weights = plan::stage_weights(model, 128, cut);
                const auto heaviest = *std::max_element(weights.begin(), weights.end());
                // Every other cut, by brute force over layouts, is at least as heavy somewhere.
                const int units = layers + (mtp > 0 ? 1 : 0) + 1;
                for (unsigned set = 0; set < (1U << static_cast<unsigned>(units - 1)); ++set) {
                    std::string layout = "E";
                    int pieces = 1;
                    for (int u = 0; u < units; ++u) {
                        layout += u < layers ? 't' : u == units - 1 ? 'L' : 'm';
                        if (u < units - 1 && (set >> static_cast<unsigned>(u) & 1U) != 0) {
                            layout += '|';
                            ++pieces;
                        }
                    }
                    if (pieces != count) continue;
                    plan::Plan other = plan;
                    other.layout = layout;
                    const auto w = plan::stage_weights(model, 128, plan::stages(other));
                    REQUIRE(*std::max_element(w.begin(), w.end()) >= heaviest);
                }
            }
    CHECK_THROWS_AS(plan::balanced_stages(*plan_with(2, 0, 1, 1).model, 128, 4), Error);
}
