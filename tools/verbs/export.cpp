// The verb export: the newest whole checkpoint of a folder as a Hugging Face folder.
#include "engine/train/huggingface.hpp"
#include "planner/base/counted.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "tools/print/console.hpp"
#include "tools/report/documents.hpp"
#include "tools/verbs/verbs.hpp"

#include <nlohmann/json.hpp>

#include <cstdio>
#include <filesystem>

namespace moe::tools {

namespace {

namespace fs = std::filesystem;

// What transformers reads beside weights; a tokenizer has one of the first two.
constexpr const char* tokenizer_files[] = {
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json",     "merges.txt",      "chat_template.jinja",   "generation_config.json"};

void check_tokenizer(const std::string& folder) {
    const auto holds = [&folder](const char* name) { return fs::is_regular_file(fs::path(folder) / name); };
    if (!folder.empty() && !holds(tokenizer_files[0]) && !holds(tokenizer_files[1]))
        refuse("--tokenizer {}: holds neither {} nor {}", folder, tokenizer_files[0], tokenizer_files[1]);
}

void copy_tokenizer(const std::string& from, const std::string& to) {
    for (const char* name : tokenizer_files) {
        const fs::path file = fs::path(from) / name, copy = fs::path(to) / name;
        std::error_code none;
        if (!from.empty() && fs::is_regular_file(file) && !fs::equivalent(file, copy, none))
            write_file(copy.string(), read_file(file.string()));
    }
}

// Where there is no generation config, with the token ids that the model's config states, if it states any: so
// transformers' generate() ends where the model does.
void write_generation_config(const std::string& config, const std::string& folder) {
    using Json = nlohmann::ordered_json;
    const fs::path path = fs::path(folder) / "generation_config.json";
    if (fs::exists(path)) return;
    const Json model = parse_json<Json>(config, "the model's config", long_json);
    Json ids{{"_from_model_config", true}};
    for (const char* name : {"bos_token_id", "eos_token_id", "pad_token_id"})
        if (model.contains(name) && !model[name].is_null()) ids[name] = model[name];
    if (ids.contains("eos_token_id")) write_file(path.string(), ids.dump(2) + "\n");
}

} // namespace

void export_verb(const ExportVerbOptions& options) {
    if (options.dtype != "fp32" && options.dtype != "bf16") refuse("--dtype {}: must be fp32 or bf16", options.dtype);
    check_tokenizer(options.tokenizer);
    std::vector<std::string> skipped;
    const std::unique_ptr<weights::StoredCheckpoint> checkpoint =
        weights::newest_checkpoint(options.checkpoint, skipped);
    for (const std::string& reason : skipped) std::fprintf(stderr, "skipped: %s\n", reason.c_str());
    if (!checkpoint) refuse("--checkpoint {}: holds no checkpoint of execute --checkpoint", options.checkpoint);
    train::ExportOptions how;
    how.dtype = options.dtype == "bf16" ? program::Dtype::bf16 : program::Dtype::f32;
    how.average = options.ema;
    train::export_weights(*checkpoint, options.out, how);
    const weights::RunState& state = checkpoint->state();
    copy_tokenizer(options.tokenizer, options.out);
    write_generation_config(state.config, options.out);
    if (options.json) return print(export_document(state.step, checkpoint->shapes().size(), options.out));
    Console console(options);
    console.say("{} after step {}: {} in {} as {}", state.model, state.step,
                counted(checkpoint->shapes().size(), "parameter"), options.out, options.dtype);
    console.note("Next: moe-plan execute PLAN --init-from {}", options.out);
}

} // namespace moe::tools
