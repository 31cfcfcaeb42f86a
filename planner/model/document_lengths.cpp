// Reads histograms of document lengths and integrates the causal mask over them.
#include "planner/model/document_lengths.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

namespace moe::model {
namespace {

constexpr double longest = 1e12; // tokens of a document, and documents of a bin

// A number from 0 to `longest`; false where the text is none.
bool read_number(std::string_view text, double& value) {
    while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
    while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return !text.empty() && error == std::errc() && end == text.data() + text.size() && value >= 0.0 &&
           value <= longest;
}

bool read_bin(std::string_view text, char separator, DocumentLengths::Bin& bin) {
    const std::size_t at = text.find(separator);
    double length = 0.0;
    bin.documents = 1.0;
    if (!read_number(text.substr(0, at), length) || length < 1.0 || length != std::floor(length)) return false;
    bin.length = static_cast<std::int64_t>(length);
    return at == std::string_view::npos || read_number(text.substr(at + 1), bin.documents);
}

// Bins by length, equal ones as one, without those that hold nothing.
DocumentLengths ordered(const std::vector<DocumentLengths::Bin>& bins) {
    std::map<std::int64_t, double> sums;
    for (const DocumentLengths::Bin& bin : bins) sums[bin.length] += bin.documents;
    DocumentLengths lengths;
    for (const auto& [length, documents] : sums)
        if (documents > 0.0) lengths.bins.push_back({length, documents});
    return lengths;
}

double tokens_of(const DocumentLengths::Bin& bin) { return static_cast<double>(bin.length) * bin.documents; }

double all_tokens(const DocumentLengths& lengths) {
    double tokens = 0.0;
    for (const DocumentLengths::Bin& bin : lengths.bins) tokens += tokens_of(bin);
    return tokens;
}

} // namespace

double DocumentLengths::mean() const {
    double documents = 0.0;
    for (const Bin& bin : bins) documents += bin.documents;
    return documents > 0.0 ? all_tokens(*this) / documents : 0.0;
}

double DocumentLengths::keys_seen(std::int64_t seq, std::int64_t most) const {
    const auto s = static_cast<double>(seq);
    double keys = 0.0;
    for (const Bin& bin : bins) {
        const auto l = static_cast<double>(bin.length);
        // Up to x = c the mean over u of min(x, u) grows as x - x^2 / 2l; then it stays.
        const double c = std::min({s, l, most > 0 ? static_cast<double>(most) : s});
        const double rising = c * c / 2.0 - c * c * c / (6.0 * l);
        keys += tokens_of(bin) * (rising + (s - c) * (c - c * c / (2.0 * l))) / s;
    }
    return keys / all_tokens(*this);
}

DocumentLengths document_lengths_from_string(const std::string& text) {
    std::vector<DocumentLengths::Bin> bins;
    if (text.empty() || text == "none") return {};
    for (std::size_t at = 0; at <= text.size();) {
        const std::size_t plus = std::min(text.find('+', at), text.size());
        DocumentLengths::Bin bin;
        if (!read_bin(std::string_view(text).substr(at, plus - at), ':', bin))
            refuse("lengths={}: must be LENGTH:DOCUMENTS joined by '+', for example 512:10+4096:3, or none",
                   shown(text));
        bins.push_back(bin);
        at = plus + 1;
    }
    DocumentLengths lengths = ordered(bins);
    if (lengths.bins.empty()) refuse("lengths={}: holds no documents", shown(text));
    if (lengths.bins.size() > most_document_bins)
        refuse("lengths={}: {} lengths are more than the {} of a plan", shown(text), lengths.bins.size(),
               most_document_bins);
    return lengths;
}

std::string to_string(const DocumentLengths& lengths) {
    std::string text;
    for (const DocumentLengths::Bin& bin : lengths.bins)
        text += fmt::format("{}{}:{}", text.empty() ? "" : "+", bin.length, bin.documents);
    return text.empty() ? "none" : text;
}

DocumentLengths merged(DocumentLengths lengths, std::size_t most) {
    if (lengths.bins.size() <= most) return lengths;
    const double share = all_tokens(lengths) / static_cast<double>(most);
    std::vector<DocumentLengths::Bin> bins;
    double tokens = 0.0, documents = 0.0, before = 0.0;
    for (const DocumentLengths::Bin& bin : lengths.bins) {
        tokens += tokens_of(bin), documents += bin.documents;
        const bool last = bin.length == lengths.bins.back().length;
        if (!last && before + tokens < share * static_cast<double>(bins.size() + 1)) continue;
        const auto length = static_cast<std::int64_t>(std::llround(tokens / documents));
        bins.push_back({std::max<std::int64_t>(1, length), documents});
        before += tokens;
        tokens = documents = 0.0;
    }
    return ordered(bins);
}

DocumentLengths read_document_lengths(const std::string& path) {
    const std::string text = read_file(path);
    std::vector<DocumentLengths::Bin> bins;
    int number = 0;
    for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = std::min(text.find('\n', at), text.size());
        std::string line = text.substr(at, end - at);
        at = end + 1;
        ++number;
        if (!line.empty() && line.back() == '\r') line.pop_back();
        if (line.empty()) continue;
        DocumentLengths::Bin bin;
        if (read_bin(line, ',', bin))
            bins.push_back(bin);
        else if (number > 1)
            refuse("{}: line {}: must be length,documents in whole tokens: {}", path, number, shown(line));
    }
    DocumentLengths lengths = ordered(bins);
    if (lengths.bins.empty()) refuse("{}: holds no document lengths", path);
    return merged(std::move(lengths), most_document_bins);
}

} // namespace moe::model
