// Variables of a script, and words with them put in: parameters, arrays, arithmetic. No command is run.
#pragma once

#include "tools/import/readers/setting.hpp"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace moe::tools {

struct Variable {
    std::vector<std::string> values; // value, or the members of an array
    bool array = false, exported = false;
};

class BashValues {
public:
    // follows: whether files that a script reads or starts are read as well.
    explicit BashValues(std::string file, bool follows = true) : follows_(follows) { enter(std::move(file)); }
    bool follows() const { return follows_; }

    // The script that is read from here on, which $0 names; returns the one before.
    std::string enter(std::string file);
    // The words behind a script's or a function's name, $1 and on; nothing: they are not known.
    using Arguments = std::optional<std::vector<std::string>>;
    Arguments set_arguments(Arguments words); // returns those before

    void set(const std::string& name, std::vector<std::string> values, bool array, bool append);
    void unset(const std::string& name) { variables_.erase(name); }
    void export_name(const std::string& name);
    const std::map<std::string, Variable>& variables() const { return variables_; }

    // The words that one raw word becomes: none, or several where an expansion outside of quotes has blanks. Throws
    // Error (bad_input) where texts grow beyond a bound.
    std::vector<std::string> words(const std::string& raw, std::size_t line);
    // The same as one text, without splitting: what assignments and tests take.
    std::string text(const std::string& raw, std::size_t line);

    // Lines behind <<, in which quotes are themselves.
    std::string document(const std::string& lines, std::size_t line);

    // Whole-number arithmetic as in $(( )); nothing where the text has a value that is not known.
    std::optional<long long> arithmetic(const std::string& expression, std::size_t line, int depth = 0);

private:
    struct Fields;
    struct Parameter;
    std::optional<Parameter> parsed(const std::string& inside, std::size_t line, int depth);
    void put(const Parameter& parameter, bool quoted, std::size_t line, Fields& fields);
    void expand(const std::string& raw, std::size_t line, Fields& fields, int depth);
    std::size_t dollar(const std::string& raw, std::size_t at, bool quoted, std::size_t line, Fields& fields,
                       int depth);
    void parameter(const std::string& inside, bool quoted, std::size_t line, Fields& fields, int depth);
    std::string one(const std::string& raw, std::size_t line, int depth);
    const Variable* find(const std::string& name) const;
    void count(std::size_t bytes, std::size_t line);

    bool follows_ = true;
    std::string file_;
    Variable self_; // $0 and BASH_SOURCE
    Arguments arguments_;
    std::map<std::string, Variable> variables_;
    std::size_t bytes_ = 0;
};

} // namespace moe::tools
