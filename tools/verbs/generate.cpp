// The verb generate: text behind a prompt, token by token.
#include "engine/data/text/vocabulary.hpp"
#include "engine/train/sampling.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/json_object.hpp"
#include "planner/model/model.hpp"
#include "tools/print/table.hpp"
#include "tools/report/documents.hpp"
#include "tools/verbs/weights.hpp"

#include <algorithm>
#include <chrono>
#include <filesystem>

namespace moe::tools {
namespace {

constexpr std::int64_t usual_positions = 4096;

data::Vocabulary vocabulary_of(const GenerateOptions& options, const model::Model& model) {
    std::string path = options.tokenizer;
    if (path.empty() && !options.model.empty()) {
        for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
            const std::filesystem::path beside = std::filesystem::path(options.model) / name;
            if (path.empty() && std::filesystem::is_regular_file(beside)) path = beside.string();
        }
    }
    if (!path.empty() && path != "bytes") return data::Vocabulary(path);
    if (path.empty() && model.vocab != data::Vocabulary().size())
        refuse("the model has a vocabulary of {} and no tokenizer.json or tokenizer.model beside it: give --tokenizer "
               "FILE",
               model.vocab);
    return {};
}

// eos_token_id: none, one or several.
std::vector<std::int64_t> ends_of_text(const model::Model& model) {
    const JsonObject config = JsonObject::parse(model.config_json, model.name);
    if (!config.has("eos_token_id")) return {};
    if (config.is_array("eos_token_id")) return config.integers("eos_token_id", 0, model.vocab);
    return {config.integer("eos_token_id", 0, model.vocab)};
}

} // namespace

void generate_verb(const GenerateOptions& options) {
    if (options.tokens < 1) refuse("--tokens {}: must be 1 or more", options.tokens);
    if (options.seed < 0) refuse("--seed {}: must not be negative", options.seed);
    const train::Sampling sampling{options.temperature, options.top_k, options.top_p,
                                   static_cast<std::uint64_t>(options.seed)};
    train::check_sampling(sampling);
    const UsedWeights weights(options);
    const model::Model& model = *weights.model();
    data::Vocabulary vocabulary = vocabulary_of(options, model);
    const std::vector<std::int32_t> prompt = vocabulary.ids(options.prompt, "--prompt");
    if (prompt.empty()) refuse("--prompt '{}': holds no token", options.prompt);
    for (const std::int32_t id : prompt)
        if (id >= model.vocab)
            refuse("--prompt: token {} is outside the model's vocabulary of {}; give its own --tokenizer", id,
                   model.vocab);
    const std::int64_t keys = static_cast<std::int64_t>(prompt.size()) + options.tokens,
                       most = weights.positions(usual_positions);
    if (keys > most)
        refuse("--tokens {}: with {} of the prompt they are {}, the model takes {}", options.tokens, prompt.size(),
               keys, most);
    Console console(options);
    const std::unique_ptr<train::Trainer> rank = weights.ranks(weights.plan(1, 1), {true, keys}, console);
    const std::vector<std::int64_t> ends = ends_of_text(model);
    const auto begin = std::chrono::steady_clock::now();
    std::vector<float> logits;
    for (std::size_t i = 0; i < prompt.size(); ++i) logits = rank->decode(prompt[i], static_cast<std::int64_t>(i));
    std::vector<std::int32_t> tokens;
    while (true) {
        const std::int32_t next = train::choose_token(logits, sampling, static_cast<std::int64_t>(tokens.size()));
        if (std::find(ends.begin(), ends.end(), next) != ends.end()) break;
        tokens.push_back(next);
        if (static_cast<std::int64_t>(tokens.size()) == options.tokens) break;
        logits = rank->decode(next, static_cast<std::int64_t>(prompt.size() + tokens.size()) - 1);
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const std::string text = vocabulary.text(tokens);
    if (options.json) return print(generate_document(text, tokens, prompt.size(), seconds));
    console.say("{}{}", data::printable(options.prompt), text);
    console.note("{} behind {} of the prompt in {}", counted(tokens.size(), "token"), counted(prompt.size()),
                 seconds_text(seconds));
}

} // namespace moe::tools
