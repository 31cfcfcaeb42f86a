// Conditions of a script: what [ ], [[ ]] and test say of words.
#pragma once

#include <string>
#include <vector>

namespace moe::tools {

enum class Truth : unsigned char { no, yes, unknown };
Truth opposite(Truth truth);

// Of expanded words, the brackets left out. Unknown where it asks for files or for what no script says.
Truth test_words(const std::vector<std::string>& words);
// Shell patterns of * and ?, without sets of letters.
bool matches_pattern(const std::string& text, const std::string& pattern);

} // namespace moe::tools
