// Conversations by a tokenizer's chat template, with the answers as labels.
#include "engine/data/text/chat_template.hpp"
#include "engine/data/tokenize.hpp"

#include "engine/base/source_file.hpp"
#include "engine/data/text/tokenizer.hpp"
#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/json.hpp"
#include "planner/base/names.hpp"

#include <cstddef>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

namespace moe::data {

namespace {

using OrderedJson = ChatTemplate::Json;

// The template beside a tokenizer, and the special tokens that it may name.
struct TemplateFile {
    std::string text, place;
    OrderedJson tokens = OrderedJson::object();
};

TemplateFile template_beside(const std::string& tokenizer) {
    const std::filesystem::path folder = std::filesystem::path(tokenizer).parent_path();
    const std::string config = (folder / "tokenizer_config.json").string(),
                      own = (folder / "chat_template.jinja").string();
    TemplateFile found;
    OrderedJson json = OrderedJson::object();
    if (std::filesystem::is_regular_file(config)) json = load_json<OrderedJson>(config);
    if (!json.is_object()) refuse("{}: must be a JSON object", config);
    for (const auto& [key, value] : json.items()) {
        const OrderedJson text = value.is_object() ? value.value("content", OrderedJson()) : value;
        if (key.ends_with("_token") && text.is_string()) found.tokens[key] = text;
    }
    if (std::filesystem::is_regular_file(own)) {
        found.text = read_file(own);
        found.place = own;
        return found;
    }
    found.place = config + ": chat_template";
    OrderedJson text = json.value("chat_template", OrderedJson());
    if (text.is_array()) { // Several by name: the one called default is meant.
        const OrderedJson list = std::move(text);
        text = OrderedJson();
        for (const OrderedJson& entry : list)
            if (entry.is_object() && entry.value("name", OrderedJson()) == "default")
                text = entry.value("template", OrderedJson());
    }
    if (!text.is_string())
        refuse("{}: must be the text of a template, or chat_template.jinja must lie beside it", found.place);
    found.text = text.get<std::string>();
    return found;
}

// Calls visit(line, number) for every line that is not blank.
void for_each_line(const std::string& path, const std::function<void(std::string_view, std::int64_t)>& visit) {
    constexpr std::size_t at_once = 1 << 20, longest = std::size_t{64} << 20;
    engine::SourceFile file(path);
    std::string text;
    std::int64_t number = 0;
    for (bool more = true; more;) {
        more = file.next(text, at_once);
        if (!more && !text.empty()) text += '\n'; // The last line may lack its end.
        std::size_t begin = 0;
        for (std::size_t end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
            const std::string_view line = std::string_view(text).substr(begin, end - begin);
            ++number;
            if (line.find_first_not_of(" \t\r") != std::string_view::npos) visit(line, number);
        }
        text.erase(0, begin);
        if (text.size() > longest) refuse("{}: line {}: is longer than {} bytes", path, number + 1, longest);
    }
}

class ChatWriter {
public:
    ChatWriter(const std::string& tokenizer, const Tokenizer& encoder, DatasetWriter& writer)
        : encoder_(encoder), file_(template_beside(tokenizer)), template_(file_.text, file_.place), writer_(writer) {}

    void add(std::string_view line, const std::string& place) {
        place_ = place;
        const OrderedJson record = parse_json<OrderedJson>(line, place);
        check(record);
        const OrderedJson& messages = record["messages"];
        std::string done; // text of the document so far
        for (std::size_t i = 0; i < messages.size(); ++i) {
            if (messages[i]["role"] != "assistant") continue;
            const std::string prompt = render(record, i, true), with = render(record, i + 1, false);
            if (!with.starts_with(prompt))
                refuse("{}: messages[{}]: {} does not write the answer behind its generation prompt", place, i,
                       file_.place);
            if (!done.empty() && !prompt.starts_with(done)) {
                writer_.end_document();
                done.clear();
            }
            write(prompt.substr(done.size()), false);
            write_answer(with.substr(prompt.size()));
            done = with;
        }
        writer_.end_document();
    }

private:
    void check(const OrderedJson& record) const {
        if (!record.is_object() || !record.contains("messages") || !record["messages"].is_array())
            refuse("{}: messages: must be a list of {{\"role\": .., \"content\": ..}}", place_);
        bool answered = false;
        const OrderedJson& messages = record["messages"];
        for (std::size_t i = 0; i < messages.size(); ++i) {
            const OrderedJson& message = messages[i];
            if (!message.is_object() || !message.contains("role") || !message["role"].is_string())
                refuse("{}: messages[{}].role: must be a text, such as user or assistant", place_, i);
            answered = answered || message["role"] == "assistant";
        }
        if (!answered) refuse("{}: messages: has no message of the assistant to learn", place_);
    }

    // The first messages as the template writes them.
    std::string render(const OrderedJson& record, std::size_t count, bool prompt) const {
        OrderedJson variables{{"tools", nullptr}, {"documents", nullptr}};
        for (const OrderedJson* from : {&file_.tokens, &record})
            for (const auto& [key, value] : from->items()) variables[key] = value;
        OrderedJson messages = OrderedJson::array();
        for (std::size_t i = 0; i < count; ++i) messages.push_back(record["messages"][i]);
        variables["messages"] = std::move(messages);
        variables["add_generation_prompt"] = prompt;
        try {
            return template_.render(variables);
        } catch (const Error& error) {
            refuse("{}: {}", place_, error.what());
        } catch (const OrderedJson::exception& error) {
            refuse("{}: {}: {}", place_, file_.place, error.what());
        }
    }

    std::vector<std::int32_t> ids_of(std::string_view text) {
        std::vector<std::int32_t> ids;
        encoder_.encode(text, text.size(), {place_, 0}, known_, ids);
        return ids;
    }
    void write(std::string_view text, bool counts) { writer_.add(ids_of(text), place_, counts); }
    // White space behind the special token at the answer's end is no label: nobody generates it.
    void write_answer(const std::string& text) {
        const std::size_t end = text.find_last_not_of(" \n\r\t") + 1;
        const std::vector<std::int32_t> body = ids_of(std::string_view(text).substr(0, end));
        const bool special =
            !body.empty() && encoder_.added_token(encoder_.bytes(std::span(body).last(1))) == body.back();
        if (!special) return write(text, true);
        writer_.add(body, place_);
        write(std::string_view(text).substr(end), false);
    }

    const Tokenizer& encoder_;
    TemplateFile file_;
    ChatTemplate template_;
    DatasetWriter& writer_;
    Tokenizer::Known known_;
    std::string place_;
};

} // namespace

TokenizeResult tokenize_chat(const std::vector<std::string>& files, const std::string& tokenizer,
                             const std::string& prefix) {
    if (files.empty()) refuse("no conversations to tokenize");
    const Tokenizer encoder(tokenizer);
    const bool wide = encoder.vocabulary() > std::numeric_limits<std::uint16_t>::max() + 1;
    return write_dataset(prefix, wide, true, [&](DatasetWriter& writer) {
        ChatWriter chat(tokenizer, encoder, writer);
        for (const std::string& path : files) {
            bool any = false;
            for_each_line(path, [&](std::string_view line, std::int64_t number) {
                any = true;
                chat.add(line, fmt::format("{}: line {}", path, number));
            });
            if (!any) refuse("{}: the file is empty; leave it out", path);
        }
    });
}

} // namespace moe::data
