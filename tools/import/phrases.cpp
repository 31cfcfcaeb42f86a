// Settings are compared by what they mean, since files write one value in several ways.
#include "tools/import/phrases.hpp"

#include "planner/base/names.hpp"
#include "planner/stack/plan_words.hpp"
#include "tools/engines/engine_value.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <charconv>

namespace moe::tools {
namespace {

using Json = nlohmann::ordered_json;

std::vector<std::string> words_of(const Json& value) {
    if (!value.is_array()) return {text_of_json(value)};
    std::vector<std::string> words;
    for (const Json& item : value) words.push_back(text_of_json(item));
    if (words.empty()) words.emplace_back("[]");
    return words;
}

void add_part(std::vector<Phrase>& phrases, const EngineEntry& entry, const std::string& part,
              const std::string& prefix) {
    const auto found = entry.parts.find(part);
    if (found == entry.parts.end()) return;
    for (const auto& [key, value] : found->second.items()) phrases.push_back({prefix + key, words_of(value)});
}

std::string folded(std::string text) {
    text.erase(std::remove_if(text.begin(), text.end(), [](char c) { return c == ' ' || c == '\'' || c == '"'; }),
               text.end());
    if (text.size() > 1 && text.front() == '(' && text.back() == ')') text = text.substr(1, text.size() - 2);
    for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    return text == "none" ? "null" : text;
}

// One spelling for all that mean the same.
std::string plain(const std::string& text, const ReaderTable& table) {
    if (const auto number = number_of(text)) return fmt::format("{}", *number);
    if (const auto list = list_of(text)) return *list;
    std::string word = folded(text);
    for (const std::vector<std::string>& group : table.same)
        if (std::find(group.begin(), group.end(), word) != group.end()) return group.front();
    return word;
}

// Reads sums of lists that are multiplied: [0]*3+[1]*58, in any number of brackets.
class ListReader {
public:
    explicit ListReader(const std::string& text) {
        for (const char c : text)
            if (c != ' ') text_ += c;
    }

    std::optional<std::vector<std::string>> run() {
        auto list = sum(0);
        if (at_ != text_.size()) return std::nullopt;
        return list;
    }

private:
    using List = std::optional<std::vector<std::string>>;
    static constexpr std::size_t most = 1 << 14;
    static constexpr int max_depth = 20;

    bool take(char c) {
        if (at_ >= text_.size() || text_[at_] != c) return false;
        ++at_;
        return true;
    }
    List sum(int depth) {
        List left = times(depth);
        while (left && take('+')) {
            const List right = times(depth);
            if (!right || left->size() + right->size() > most) return std::nullopt;
            left->insert(left->end(), right->begin(), right->end());
        }
        return left;
    }
    List times(int depth) {
        List list = one(depth);
        while (list && take('*')) {
            std::size_t count = 0;
            const auto [last, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), count);
            if (error != std::errc{} || list->size() * std::min(count, most + 1) > most) return std::nullopt;
            at_ = static_cast<std::size_t>(last - text_.data());
            std::vector<std::string> repeated;
            for (std::size_t i = 0; i < count; ++i) repeated.insert(repeated.end(), list->begin(), list->end());
            list = std::move(repeated);
        }
        return list;
    }
    List one(int depth) {
        if (depth > max_depth) return std::nullopt;
        if (take('(')) {
            List list = sum(depth + 1);
            return take(')') ? list : std::nullopt;
        }
        if (!take('[')) return std::nullopt;
        const std::size_t end = text_.find(']', at_);
        if (end == std::string::npos) return std::nullopt;
        std::vector<std::string> members;
        for (std::size_t from = at_; from < end;) {
            const std::size_t comma = std::min(text_.find(',', from), end);
            members.push_back(text_.substr(from, comma - from));
            from = comma + 1;
        }
        at_ = end + 1;
        return members;
    }

    std::string text_;
    std::size_t at_ = 0;
};

// Placeholders that stand for a list as a whole.
bool is_whole(const std::string& word) { return word == "$modules" || word == "$partial" || word.ends_with("_parts"); }

} // namespace

std::optional<std::string> list_of(const std::string& text) {
    if (text.find('[') == std::string::npos) return std::nullopt;
    std::string bare = text; // Names in quotes are the names.
    bare.erase(std::remove_if(bare.begin(), bare.end(), [](char c) { return c == '\'' || c == '"'; }), bare.end());
    const auto members = ListReader(bare).run();
    if (!members) return std::nullopt;
    return fmt::format("[{}]", fmt::join(*members, ","));
}

std::string marks_of(int every, int layers, const std::string& marks) {
    std::string text = "[";
    for (int layer = 0; layer < layers; ++layer) {
        const bool last = (layer + 1) % every == 0; // of its N
        const bool mark = marks == "multiples" ? layer % every == 0 : marks == "last" ? last : !last;
        text += fmt::format("{}{}", layer > 0 ? "," : "", mark ? 1 : 0);
    }
    return text + "]";
}

std::vector<Phrase> phrases_of(const EngineEntry& entry, const std::string& part, bool model) {
    std::vector<Phrase> phrases;
    if (part == "args") {
        for (const std::string& word : entry.args) {
            if (word.rfind("--", 0) == 0)
                phrases.push_back({word, {}});
            else if (!phrases.empty())
                phrases.back().words.push_back(word);
        }
    } else {
        add_part(phrases, entry, part, "");
        if (model && part == "bridge") {
            add_part(phrases, entry, "provider", "");
            if (entry.field.rfind("model.", 0) == 0) add_part(phrases, entry, "kwargs", "model.");
        }
    }
    add_part(phrases, entry, "env", "$");
    return phrases;
}

std::vector<std::string> said(const EngineEntry& entry, const plan::Plan& plan, const Phrase& phrase) {
    std::vector<std::string> values;
    for (const std::string& word : phrase.words) {
        if (word.rfind('$', 0) != 0) {
            values.push_back(word);
            continue;
        }
        std::vector<std::string> given =
            phrase.flag() ? engine_words(entry, plan, word) : words_of(engine_value(entry, plan, word));
        for (std::string& value : given) values.push_back(std::move(value));
    }
    if (values.empty() && !phrase.words.empty()) values.emplace_back("[]");
    return values;
}

Capture captured(const Phrase& phrase, const std::vector<std::string>& values, const ReaderTable& table) {
    Capture capture;
    if (phrase.words.size() == 1 && is_whole(phrase.words[0])) {
        capture.values[phrase.words[0]] = values;
        return capture;
    }
    if (phrase.words.size() == 1 && phrase.words[0].rfind('$', 0) == 0 && values.size() > 1) { // Words list numbers.
        capture.values[phrase.words[0]] = {fmt::format("[{}]", fmt::join(values, ","))};
        return capture;
    }
    capture.literal = phrase.words.size() == values.size();
    for (std::size_t i = 0; i < std::min(phrase.words.size(), values.size()); ++i) {
        const std::string& word = phrase.words[i];
        if (word.rfind('$', 0) != 0) {
            capture.literal = capture.literal && plain(word, table) == plain(values[i], table);
            continue;
        }
        const std::size_t comma = word.find(',');
        std::string value = values[i];
        if (comma != std::string::npos) {
            value = folded(value);
            value = value.substr(0, value.find(','));
        }
        if (const auto list = list_of(value)) value = *list;
        capture.values[word.substr(0, comma)] = {value};
    }
    return capture;
}

bool same_values(const std::vector<std::string>& a, const std::vector<std::string>& b, const ReaderTable& table) {
    if (a.size() != b.size()) return false;
    std::vector<std::string> left, right;
    for (const std::string& value : a) left.push_back(plain(value, table));
    for (const std::string& value : b) right.push_back(plain(value, table));
    std::sort(left.begin(), left.end());
    std::sort(right.begin(), right.end());
    return left == right;
}

} // namespace moe::tools
