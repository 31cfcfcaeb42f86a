// Reads one command from the tokens of a script.
#include "tools/import/readers/bash_command.hpp"

#include <algorithm>
#include <cctype>

namespace moe::tools {

bool TokenCursor::word_is(const char* text) const {
    return !ended() && token().kind == TokenKind::word && token().text == text;
}

bool TokenCursor::op_is(const char* text) const {
    return !ended() && token().kind == TokenKind::op && token().text == text;
}

bool TokenCursor::any_word(std::initializer_list<const char*> list) const {
    return std::any_of(list.begin(), list.end(), [this](const char* text) { return word_is(text); });
}

bool TokenCursor::defines_function() const {
    const auto op = [this](std::size_t i, const char* text) {
        return tokens[i].kind == TokenKind::op && tokens[i].text == text;
    };
    return at + 2 < tokens.size() && token().kind == TokenKind::word && name_like(token().text) && op(at + 1, "(") &&
           op(at + 2, ")");
}

bool name_like(const std::string& text) {
    if (text.empty() || std::isdigit(static_cast<unsigned char>(text[0])) != 0) return false;
    return std::all_of(text.begin(), text.end(),
                       [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; });
}

bool assignment(const std::string& raw, Assignment& result) {
    const std::size_t equals = raw.find('=');
    if (equals == std::string::npos || equals == 0) return false;
    result.append = raw[equals - 1] == '+';
    result.name = raw.substr(0, equals - (result.append ? 1 : 0));
    result.value = raw.substr(equals + 1);
    return name_like(result.name);
}

SimpleCommand simple_command(TokenCursor& cursor) {
    SimpleCommand command;
    command.line = cursor.line();
    const bool double_brackets = cursor.word_is("[[");
    for (; !cursor.ended(); ++cursor.at) {
        const Token& t = cursor.token();
        if (t.kind == TokenKind::newline) break;
        if (t.kind != TokenKind::op) {
            command.words.push_back(&t);
            if (!double_brackets || t.text != "]]") continue;
            ++cursor.at;
            break;
        }
        if (double_brackets) {
            command.words.push_back(&t);
        } else if (t.text.find_first_of("<>") == std::string::npos) {
            break;
        } else if (t.text.rfind("<<", 0) == 0 && t.text != "<<<") {
            command.document = &t;
        } else if (cursor.at + 1 < cursor.tokens.size() && cursor.tokens[cursor.at + 1].kind == TokenKind::word &&
                   t.text.back() != '-') {
            ++cursor.at; // The cursor passes the file.
        }
    }
    if (cursor.op_is("(") && command.words.empty()) ++cursor.at;
    return command;
}

} // namespace moe::tools
