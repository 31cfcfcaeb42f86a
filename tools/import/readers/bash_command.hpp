// One command of a bash script as it is written: its words, the assignments before them, the document behind it.
#pragma once

#include "tools/import/readers/bash_tokens.hpp"

#include <cstddef>
#include <initializer_list>
#include <string>
#include <vector>

namespace moe::tools {

// A place among the tokens of a script, which must outlive it. Behind the last token it is at no word and no operator.
struct TokenCursor {
    const std::vector<Token>& tokens;
    std::size_t at = 0;

    bool ended() const { return at >= tokens.size(); }
    const Token& token() const { return tokens[at]; } // token at the cursor, only before the end
    bool word_is(const char* text) const;
    bool op_is(const char* text) const;
    bool any_word(std::initializer_list<const char*> list) const;
    std::size_t line() const { return ended() ? 0 : token().line; }
    bool defines_function() const; // NAME ( )
};

bool name_like(const std::string& text); // whether the text is a name of a variable or a function

struct Assignment {
    std::string name, value; // value: text as written
    bool append = false;     // NAME+=VALUE
};
// False for a word that assigns nothing.
bool assignment(const std::string& raw, Assignment& result);

// Words as written, arrays that it assigns among them. The tokens must outlive it.
struct SimpleCommand {
    std::vector<const Token*> words;
    const Token* document = nullptr; // document behind <<
    std::size_t line = 0;
};
// Moves the cursor to the end of the command; files of redirections are passed over.
SimpleCommand simple_command(TokenCursor& cursor);

} // namespace moe::tools
