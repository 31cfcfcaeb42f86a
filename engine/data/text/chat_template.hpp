// A tokenizer's chat template: a bounded subset of Jinja that turns messages into a model's text.
#pragma once

#include <nlohmann/json.hpp>

#include <memory>
#include <string>

namespace moe::data {

// Renders as Hugging Face's transformers do, with trim_blocks and lstrip_blocks. Understood are text, {{ }}, {# #},
// {% if %}, {% for %}, {% set %} and {% generation %}; operators, slices, conditional expressions, `namespace`,
// `range`, `raise_exception`; the filters, tests and methods of strings and mappings that published templates use.
// Anything else (macros, imports) is refused by its name. Syntax: https://jinja.palletsprojects.com/templates/.
class ChatTemplate {
public:
    using Json = nlohmann::ordered_json;
    struct Block;

    // `place` is named in errors. Throws Error (bad_input).
    ChatTemplate(const std::string& text, std::string place);
    ~ChatTemplate();

    // The text for these variables. Throws Error (bad_input) for what the template itself refuses, for operands that do
    // not fit, and beyond 2^20 rounds of loops or 64 MiB.
    std::string render(const Json& variables) const;

private:
    std::string place_;
    std::unique_ptr<Block> body_;
};

} // namespace moe::data
