// Changes JSON inputs as trees, so that they stay documents and readers come to their fields. Included by one file of a
// target: libFuzzer and driver.cpp call LLVMFuzzerCustomMutator where there is one.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t most_bytes);

namespace moe::test {

class JsonMutator {
public:
    using Json = nlohmann::ordered_json;

    JsonMutator(Json& document, unsigned seed) : document_(document), random_(seed) {}

    void change() {
        nodes_.clear();
        collect(document_);
        Json& node = *nodes_[below(nodes_.size())];
        switch (below(6)) {
        case 0:
            node = strange();
            break;
        case 1: // a part of the document in the place of another
            node = Json(*nodes_[below(nodes_.size())]);
            break;
        case 2:
            change_number(node);
            break;
        case 3:
            lose_part(node);
            break;
        case 4:
            rename(node);
            break;
        default:
            repeat(node);
        }
    }

private:
    std::size_t below(std::size_t limit) { return random_() % limit; }

    void collect(Json& node) {
        nodes_.push_back(&node);
        if (node.is_structured())
            for (Json& part : node) collect(part);
    }

    Json strange() {
        static const std::vector<Json> values{nullptr,
                                              true,
                                              false,
                                              -1,
                                              0,
                                              1,
                                              0.5,
                                              -0.0,
                                              1e308,
                                              -1e-308,
                                              9223372036854775807LL,
                                              18446744073709551615ULL,
                                              "",
                                              "0",
                                              "nan",
                                              "../../x",
                                              std::string(300, 'x'),
                                              "\x1b[31m\n",
                                              Json::array(),
                                              Json::object()};
        return values[below(values.size())];
    }

    void change_number(Json& node) {
        if (node.is_number_integer()) {
            const auto bits = static_cast<std::uint64_t>(node.get<std::int64_t>());
            const std::uint64_t changed[] = {bits + 1, bits - 1, bits * 2, bits / 2, 0 - bits};
            node = static_cast<std::int64_t>(changed[below(std::size(changed))]);
        } else if (node.is_number_float()) {
            node = node.get<double>() * (below(2) == 0 ? 2.0 : -0.5);
        } else if (node.is_boolean()) {
            node = !node.get<bool>();
        } else {
            node = strange();
        }
    }

    void lose_part(Json& node) {
        if (!node.is_structured() || node.empty()) return;
        node.erase(std::next(node.begin(), static_cast<std::ptrdiff_t>(below(node.size()))));
    }

    // Gives a value the key of another, which may exist already.
    void rename(Json& node) {
        std::vector<std::string> keys;
        for (const Json* other : nodes_)
            if (other->is_object())
                for (const auto& [key, value] : other->items()) keys.push_back(key);
        if (!node.is_object() || node.empty() || keys.empty()) return;
        const auto part = std::next(node.begin(), static_cast<std::ptrdiff_t>(below(node.size())));
        Json value = part.value();
        node.erase(part);
        node[keys[below(keys.size())]] = std::move(value);
    }

    void repeat(Json& node) {
        if (!node.is_array() || node.empty()) return;
        const Json part = node[below(node.size())];
        for (std::size_t more = 1 + below(8); more > 0; --more) node.push_back(part);
    }

    Json& document_;
    std::minstd_rand random_;
    std::vector<Json*> nodes_;
};

} // namespace moe::test

// One change in four is of bytes, as is every one of what is no JSON.
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t most_bytes,
                                               unsigned seed) {
    using moe::test::JsonMutator;
    JsonMutator::Json document;
    if (seed % 4 != 0) document = JsonMutator::Json::parse(data, data + size, nullptr, false);
    if (seed % 4 == 0 || document.is_discarded()) return LLVMFuzzerMutate(data, size, most_bytes);
    JsonMutator mutator(document, seed);
    for (unsigned changes = 1 + seed / 4 % 3; changes > 0; --changes) mutator.change();
    const std::string text = document.dump(-1, ' ', false, JsonMutator::Json::error_handler_t::replace);
    if (text.size() > most_bytes) return LLVMFuzzerMutate(data, size, most_bytes);
    std::memcpy(data, text.data(), text.size());
    return text.size();
}
