// Fields of a tokenizer.json that several readers need.
#pragma once

#include "engine/data/text/added_tokens.hpp"

#include <nlohmann/json_fwd.hpp>

#include <cstdint>
#include <string>
#include <utility>

namespace moe::data {

// A field's text or truth; `fallback` where it is none.
std::string word(const nlohmann::json& json, const char* key, const std::string& fallback);
bool flag(const nlohmann::json& json, const char* key, bool fallback);
bool given(const nlohmann::json& json, const char* key); // it is there and not null

// The two halves of an entry of model.merges, in either of its forms; empty ones where it is neither.
std::pair<std::string, std::string> merged_pair(const nlohmann::json& merge);

// Whether a step of this type stands in a pre-tokenizer, itself or in a sequence of them.
bool has_step(const nlohmann::json& pre_tokenizer, const std::string& type);

// The id of a token; `vocabulary` grows to one more. Throws Error (bad_input) naming file, field and token.
std::int32_t id_of(const nlohmann::json& id, const std::string& path, const char* field, const std::string& token,
                   std::int64_t& vocabulary);

// added_tokens of a tokenizer.json. Throws Error (bad_input) where a token takes blanks around it, or whole words only.
AddedTokens read_added_tokens(const nlohmann::json& json, const std::string& path, std::int64_t& vocabulary);

} // namespace moe::data
