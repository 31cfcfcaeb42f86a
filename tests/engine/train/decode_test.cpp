// Generation token by token: cached keys and values give the logits of a whole forward, and draws follow their options.
#include "engine/data/text/vocabulary.hpp"
#include "engine/train/sampling.hpp"
#include "planner/base/error.hpp"
#include "planner/model/model.hpp"
#include "tests/engine/train/samples.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>

using namespace moe;

namespace {

constexpr std::int64_t length = 24;

double log_of_sum(const std::vector<float>& logits) {
    const double best = static_cast<double>(*std::max_element(logits.begin(), logits.end()));
    double sum = 0.0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x) - best);
    return best + std::log(sum);
}

train::TrainOptions forward(std::int64_t keys) {
    train::TrainOptions options;
    options.forward_only = lower::ForwardOnly{true, keys};
    return options;
}

// Loss of `label` behind the first tokens of a text, by a whole forward: the others have no label.
double whole_loss(train::Trainer& trainer, const std::vector<std::int32_t>& text, std::size_t tokens,
                  std::int32_t label) {
    const auto upto = [&](std::size_t count, std::int32_t last) {
        const train::Evaluation e = trainer.evaluate(
            [&](std::int64_t, std::span<std::int32_t> out) {
                std::fill(out.begin(), out.end(), -1);
                std::copy_n(text.begin(), count, out.begin());
                out[count] = last;
            },
            1);
        return e.loss * static_cast<double>(e.tokens);
    };
    return upto(tokens, label) - (tokens > 1 ? upto(tokens - 1, text[tokens - 1]) : 0.0);
}

} // namespace

TEST_CASE("cached decoding gives the logits of a whole forward, for every kind of attention") {
    for (const char* model :
         {"qwen3",     "qwen2",   "deepseek3", "deepseek2", "gptoss",     "mixtral",  "deepseek3-mtp",
          "llama",     "olmoe",   "afmoe",     "laguna",    "mimo",       "mistral4", "llama4",
          "qwen3next", "qwen3.5", "nemotronh", "nemotron3", "deepseek32", "glm5",     "granite4",
          "gemma4",    "step",    "phimoe",    "erniebias"}) {
        CAPTURE(model);
        std::vector<std::int32_t> text(length + 1);
        made_up_tokens(61)(0, text);
        train::Trainer whole(small_plan(small_model(model), 1, {}, {length, 1}), forward(0));
        train::Trainer cached(small_plan(small_model(model), 1, {}, {1, 1}), forward(length));
        for (std::size_t i = 0; i < length; ++i) {
            CAPTURE(i);
            const std::vector<float> logits = cached.decode(text[i], static_cast<std::int64_t>(i));
            REQUIRE(logits.size() == 61);
            const double sum = log_of_sum(logits);
            for (const std::int32_t label : {text[i + 1], static_cast<std::int32_t>((7 * i + 5) % 61)}) {
                const double want = whole_loss(whole, text, i + 1, label),
                             got = sum - static_cast<double>(logits[static_cast<std::size_t>(label)]);
                CHECK(std::abs(got - want) < 2e-5 * static_cast<double>(length));
            }
        }
        // A text that begins anew forgets the one before.
        const std::vector<float> again = cached.decode(text[0], 0);
        CHECK(log_of_sum(again) - static_cast<double>(again[static_cast<std::size_t>(text[1])]) ==
              nearly(whole_loss(whole, text, 1, text[1])).epsilon(1e-5));
    }
}

TEST_CASE("a position without room, and a plan of more than one token, are refused") {
    train::Trainer cached(small_plan(small_model("qwen3"), 1, {}, {1, 1}), forward(4));
    CHECK_THROWS_AS(cached.decode(1, 4), Error);
    CHECK_THROWS_AS(cached.decode(1, -1), Error);
    train::Trainer longer(small_plan(small_model("qwen3"), 1, {}, {2, 1}), forward(4));
    CHECK_THROWS_AS(longer.decode(1, 0), Error);
}

TEST_CASE("the likeliest token is taken without temperature, and draws keep to top-k and top-p") {
    const std::vector<float> logits{1.0f, 3.0f, 2.0f, 3.0f, -1.0f};
    CHECK(train::choose_token(logits, {}, 0) == 1); // the first of equal ones
    const auto shares = [&](train::Sampling sampling) {
        sampling.temperature = sampling.temperature > 0.0 ? sampling.temperature : 1.0;
        std::map<std::int32_t, double> counts;
        constexpr int draws = 20000;
        for (int n = 0; n < draws; ++n) counts[train::choose_token(logits, sampling, n)] += 1.0 / draws;
        return counts;
    };
    double sum = 0.0;
    for (const float x : logits) sum += std::exp(static_cast<double>(x));
    std::map<std::int32_t, double> all = shares({});
    for (std::size_t i = 0; i < logits.size(); ++i)
        CHECK(std::abs(all[static_cast<std::int32_t>(i)] - std::exp(static_cast<double>(logits[i])) / sum) < 0.015);
    std::map<std::int32_t, double> two = shares({1.0, 2, 1.0, 1});
    CHECK(two.size() == 2);
    CHECK(std::abs(two[1] - 0.5) < 0.015);
    // 1 and 3 hold 0.39 each, 2 the next 0.14: 0.8 takes three.
    CHECK(shares({1.0, 0, 0.3, 1}).size() == 1);
    CHECK(shares({1.0, 0, 0.75, 1}).size() == 2);
    CHECK(shares({1.0, 0, 0.8, 1}).size() == 3);
    CHECK(shares({0.05, 0, 1.0, 1}).size() == 2); // cold: only the two best
    train::Sampling one{1.0, 0, 1.0, 1}, other{1.0, 0, 1.0, 2};
    int same = 0;
    for (int n = 0; n < 200; ++n) {
        CHECK(train::choose_token(logits, one, n) == train::choose_token(logits, one, n));
        same += train::choose_token(logits, one, n) == train::choose_token(logits, other, n) ? 1 : 0;
    }
    CHECK(same < 150);
    CHECK_THROWS_AS(train::check_sampling({-1.0, 0, 1.0, 1}), Error);
    CHECK_THROWS_AS(train::check_sampling({1.0, -1, 1.0, 1}), Error);
    CHECK_THROWS_AS(train::check_sampling({1.0, 0, 0.0, 1}), Error);
}

TEST_CASE("bytes become text that a terminal and a JSON document can show") {
    CHECK(data::printable("plain\tand\n\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80") ==
          "plain\tand\n\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80");
    const std::string unknown = "\xEF\xBF\xBD";
    CHECK(data::printable("\x1b[2J") == unknown + "[2J");
    CHECK(data::printable("a\xC3") == "a" + unknown);
    CHECK(data::printable("\xC0\x80") == unknown + unknown);               // too long a form
    CHECK(data::printable("\xED\xA0\x80") == unknown + unknown + unknown); // a surrogate
    CHECK(data::printable("\xC2\x9B") == unknown);                         // a control character in two bytes
    data::Vocabulary bytes;
    CHECK(bytes.ids("ab", "here") == std::vector<std::int32_t>{97, 98});
    CHECK(bytes.text(std::vector<std::int32_t>{97, 300, 98}) == "ab");
}
