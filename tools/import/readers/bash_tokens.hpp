// Cuts a bash script into words and operators, with quotes and expansions still in them.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace moe::tools {

enum class TokenKind : unsigned char {
    word,  // raw text, quotes included
    array, // NAME=( .. ) or NAME+=( .. ): text is "NAME=" or "NAME+=", items its words
    op,    // ; ;; & && | || ( ) and redirections with < or > in them
    newline,
};

struct Token {
    TokenKind kind = TokenKind::word;
    std::string text;
    std::size_t line = 1;
    std::vector<Token> items; // members of an array
    std::string document;     // lines behind <<
    bool plain = false;       // whether nothing in the document of << is expanded
};

struct Script {
    std::vector<Token> tokens;
    std::vector<std::string> slurm; // words of the lines that begin with #SBATCH, which Slurm reads
};

// Throws Error (bad_input) "FILE:LINE: why" for quotes and brackets that nothing closes, and for nesting beyond a
// bound.
Script bash_tokens(const std::string& text, const std::string& file);

} // namespace moe::tools
