// Chat templates, and conversations as datasets with a loss mask; what is refused names file and line.
#include "engine/data/data.hpp"
#include "engine/data/in_order.hpp"
#include "engine/data/text/chat_template.hpp"
#include "engine/data/tokenize.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "tests/engine/data/made_tokenizer.hpp"
#include "tests/engine/data/write_dataset.hpp"
#include "tests/support/draws.hpp"
#include "tests/support/folder.hpp"

#include <doctest/doctest.h>

#include <filesystem>

using namespace moe;

namespace {

using Json = data::ChatTemplate::Json;

std::string rendered(const std::string& text, const Json& variables = Json::object()) {
    return data::ChatTemplate(text, "t").render(variables);
}

std::string refusal(const std::string& text) {
    try {
        rendered(text, {{"x", 1}, {"list", {1, 2}}});
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
    return "";
}

constexpr const char* plain_template = "{% for m in messages %}{{ m.role + ':' + m.content }}<|end|>\n{% endfor %}"
                                       "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}";

// Writes a tokenizer with that template, and the conversations; returns what tokenize_chat() says or refuses.
std::string tokenized(const Folder& folder, const std::string& chat, const Json& chat_template = plain_template) {
    write_file(folder / "tokenizer.json", made_by_hand().dump());
    write_file(folder / "tokenizer_config.json", Json{{"chat_template", chat_template}}.dump());
    write_file(folder / "chat.jsonl", chat);
    try {
        const data::TokenizeResult r =
            data::tokenize_chat({folder / "chat.jsonl"}, folder / "tokenizer.json", folder / "chat");
        return fmt::format("{} documents, {} tokens", r.documents, r.tokens);
    } catch (const Error& error) {
        CHECK(error.fault() == Fault::bad_input);
        return error.what();
    }
}

} // namespace

TEST_CASE("chat templates: white space, loops and namespaces as Jinja has them") {
    CHECK(rendered("a\n  {% if true %}\nb\n  {% endif %}\nc\n") == "a\nb\nc");
    CHECK(rendered("a {%- if true -%} \n b {%- endif %} c") == "ab c");
    CHECK(rendered("  {%+ if true %}x{% endif +%}\ny") == "  x\ny");
    CHECK(rendered("{% set ns = namespace(n=0) %}{% set n = 0 %}{% for i in [1, 2, 3] if i != 2 %}"
                   "{% set ns.n = ns.n + i %}{% set n = i %}{{ loop.index }}{% endfor %}{{ ns.n }}{{ n }}") == "1240");
    CHECK(rendered("{{ x }}{{ list[::-1] | tojson }}{{ y is defined }}", {{"x", 1}, {"list", {1, 2}}}) ==
          "1[2, 1]False");
}

TEST_CASE("chat templates: what is not known is refused with its line") {
    CHECK(refusal("a\n{% macro f() %}{% endmacro %}") == "t: line 2: the tag macro is not known");
    CHECK(refusal("{{ x | sort }}") == "t: line 1: the filter sort of a number with 0 arguments is not known");
    CHECK(refusal("\n\n{{ strftime_now('%d') }}") ==
          "t: line 3: the function strftime_now of 1 arguments is not known");
    CHECK(refusal("{{ raise_exception('only ' ~ x) }}") == "t: line 1: only 1");
    CHECK(refusal("{% if x %}") == "t: line 1: endif is missing");
    CHECK(refusal("{{ nothing.at_all }}") == "t: line 1: \"at_all\" of what is undefined");
    CHECK(refusal("{{ 'a' + x }}") == "t: line 1: a string + a number");
    CHECK(refusal("{{ 1 < 2 < 3 }}") == "t: line 1: comparisons in a row are not known");
    CHECK(refusal("{{ list }}") == "t: line 1: writes a list as it is: only through tojson");
    if (!sanitized()) // a million rounds
        CHECK(refusal("{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}") ==
              "t: line 1: more than 1048576 rounds of loops");
    CHECK(refusal("{{ " + std::string(200, '(') + "x" + std::string(200, ')') + " }}").find("nested too deep") !=
          std::string::npos);
    std::string sum = "{{ x";
    for (int i = 0; i < 1000; ++i) sum += " + x";
    CHECK(refusal(sum + " }}") == "t: line 1: more than 1000 words in a tag");
}

TEST_CASE("tokenize --chat: answers are labels up to the token that ends them") {
    if (no_icu()) return;
    const Folder folder;
    CHECK(tokenized(folder, R"({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}

{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]})") == "2 documents, 36 tokens");
    data::InOrder data(folder / "chat", 64, 263);
    REQUIRE(data.has_loss_mask());
    std::vector<std::int32_t> tokens(65), counts(65), starts(65);
    data.read(0, tokens);
    data.read_counts(0, counts);
    data.read_documents(0, starts);
    std::string answers;
    for (std::size_t i = 0; i < 65; ++i)
        if (counts[i] != 0) answers += tokens[i] < 256 ? std::string(1, static_cast<char>(tokens[i])) : "<end>";
    CHECK(answers == "yo<end>a<end>");
    CHECK(starts[0] == 0);
    CHECK(starts[23] == 23);
}

TEST_CASE("tokenize --chat: a template that rewrites earlier messages makes a document of each answer") {
    if (no_icu()) return;
    const Folder folder;
    const std::string chat = R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                              {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})";
    std::string line;
    for (const char c : chat)
        if (c != '\n') line += c;
    CHECK(tokenized(folder, line).starts_with("1 documents"));
    CHECK(tokenized(folder, line,
                    "{% for m in messages %}{{ m.role + ('!' if loop.last and not add_generation_prompt else ':') }}{{ "
                    "m.content }}{% endfor %}{{ 'assistant' if add_generation_prompt else '' }}")
              .starts_with("2 documents"));
}

TEST_CASE("tokenize --chat: what is refused names file, line and field") {
    if (no_icu()) return;
    const Folder folder;
    const std::string line = (folder / "chat.jsonl") + ": line 1: ", config = folder / "tokenizer_config.json";
    CHECK(tokenized(folder, "{\"text\": 1}\n") == line + R"(messages: must be a list of {"role": .., "content": ..})");
    CHECK(tokenized(folder, R"({"messages": [{"content": "x"}]})") ==
          line + "messages[0].role: must be a text, such as user or assistant");
    CHECK(tokenized(folder, R"({"messages": [{"role": "user", "content": "x"}]})") ==
          line + "messages: has no message of the assistant to learn");
    CHECK(tokenized(folder, R"({"messages": [{"role": "assistant", "content": null}]})") ==
          line + config + ": chat_template: line 1: a string + none");
    CHECK(tokenized(folder, R"({"messages": [{"role": "assistant", "content": "x"}]})", "{{ messages | length }}") ==
          line + "messages[0]: " + config + ": chat_template does not write the answer behind its generation prompt");
    CHECK(tokenized(folder, "\n\n") == (folder / "chat.jsonl") + ": the file is empty; leave it out");
    CHECK(tokenized(folder, "{}", Json()) ==
          config + ": chat_template: must be the text of a template, or chat_template.jinja must lie beside it");
}

TEST_CASE("a loss mask is of its dataset and goes with another one") {
    const Folder folder;
    write_dataset<std::uint16_t>(folder / "a", 8, {{1, 2, 3}, {4, 5}});
    CHECK_FALSE(data::IndexedDataset(folder / "a").has_loss_mask());
    const std::uint32_t plain = data::IndexedDataset(folder / "a").mark();
    write_dataset<std::uint8_t>(folder / "a.loss", 1, {{0, 1, 1}, {0, 1}});
    const data::IndexedDataset masked(folder / "a");
    REQUIRE(masked.has_loss_mask());
    CHECK(masked.mark() != plain);
    std::vector<std::int32_t> counts(4);
    masked.read_counts(1, counts);
    CHECK(counts == std::vector<std::int32_t>{1, 1, 0, 1});
    write_dataset<std::uint8_t>(folder / "a.loss", 1, {{0, 1, 2}, {0, 1}});
    CHECK_THROWS_WITH_AS(data::IndexedDataset(folder / "a").read_counts(0, counts),
                         doctest::Contains("a.loss.bin: token 2 at position 2"), Error);
    write_dataset<std::uint8_t>(folder / "a.loss", 1, {{0, 1, 1, 1}});
    CHECK_THROWS_WITH_AS(data::IndexedDataset(folder / "a"),
                         doctest::Contains("a.loss.idx: masks 4 tokens of 1 document,"), Error);
    write_file(folder / "text", "plain text");
    data::tokenize_bytes({folder / "text"}, folder / "a");
    CHECK_FALSE(data::IndexedDataset(folder / "a").has_loss_mask());
    CHECK_FALSE(std::filesystem::exists(folder / "a.loss.bin"));
}
