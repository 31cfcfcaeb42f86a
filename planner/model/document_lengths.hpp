// The lengths of the documents that samples are cut from: a histogram, and how many keys a token sees within them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe::model {

struct DocumentLengths {
    struct Bin {
        std::int64_t length = 0; // tokens of each document
        double documents = 0.0;  // how many there are, in any unit
    };
    std::vector<Bin> bins; // by increasing length; empty: every sample is one document

    double mean() const; // tokens of a document
    // Keys that a token sees on average under the causal mask, `most` of them at most (0: any number), in samples of
    // `seq` tokens that are cut from documents of these lengths in random order, one behind the other. Continuous, as
    // the half of a sequence that the FLOPs of a causal mask count: with x the place in the sample, uniform in [0,
    // seq], and u that in the token's document, uniform in [0, its length], the mean of min(x, u, most).
    double keys_seen(std::int64_t seq, std::int64_t most) const;
};

// Text of a plan: LENGTH:DOCUMENTS joined by '+', "512:10+4096:3"; "none" or empty: no bins. Throws Error (bad_input).
DocumentLengths document_lengths_from_string(const std::string& text);
std::string to_string(const DocumentLengths& lengths);

inline constexpr std::size_t most_document_bins = 64; // of a plan
// Reads a histogram: lines "length,documents", with or without a line of names, or a line with one length for each
// document. More lengths than a plan has bins are merged. Throws Error (bad_input) that names file and line.
DocumentLengths read_document_lengths(const std::string& path);
// At most `most` bins with about the same number of tokens each, of their mean length; documents and tokens stay.
DocumentLengths merged(DocumentLengths lengths, std::size_t most);

} // namespace moe::model
