// The shapes of sparse attention's kernels: which keys there are, the indexer that picks, attention over what it
// picked.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moe {

// Keys that an indexer picks, and the rows that they lie in. Query i of a sequence is at position(i), and sees the keys
// of its sequence up to its own position, from document_start[row] on where that is given. A list of top_k positions
// for each row (int32) has them in order and then -1, and who is given one asks nothing else of what a query sees.
// Query rows are i * batch + sequence; the key at a position lies in row place(position) * batch + sequence. `parts`
// members of CP, of which this is `part`, hold runs r and 2 parts - 1 - r of 2 parts equal ones, and their keys lie one
// member behind the other. `positions`, where given: rows come later than others of one sequence (generation), at these
// positions, and keys are a cache in order.
struct PickedKeys {
    std::int64_t batch = 1, seq_q = 0, seq_k = 0, top_k = 0;
    int part = 0, parts = 1;
    const std::int32_t* document_start = nullptr;
    const std::int32_t* positions = nullptr;

    std::int64_t rows() const { return batch * seq_q; }
    std::int64_t position(std::int64_t i) const {
        if (positions != nullptr) return positions[i];
        if (parts == 1) return i;
        const std::int64_t run = seq_q / 2;
        return i < run ? part * run + i : (2 * parts - 1 - part) * run + i - run;
    }
    std::int64_t place(std::int64_t at) const {
        if (parts == 1) return at;
        const std::int64_t run = seq_q / 2, number = at / run;
        const std::int64_t member = number < parts ? number : 2 * parts - 1 - number;
        return member * seq_q + (number < parts ? 0 : run) + at % run;
    }
};

// The indexer of DeepSeek-V3.2 (arXiv 2512.02556, section 2.1): of queries q[rows, heads * dim], keys k[batch * seq_k,
// dim] and weights w[rows, heads], the score of a key is scale * sum over h of w_h relu(q_h . k). Picked are the top_k
// keys of the largest scores, of equal ones those at lower positions.
struct IndexShape {
    PickedKeys keys;
    int heads = 0, dim = 0;
    double scale = 1.0;
};

// Attention of q[rows, heads * qk_dim] over picked keys: all heads see one key k[batch * seq_k, qk_dim] at a position,
// whose first v_dim columns are the value. lse[h * rows + row] = log of the softmax's sum. `largest`: as AttentionShape
// has it, over the keys that are picked.
struct LatentShape {
    PickedKeys keys;
    int heads = 0, qk_dim = 0, v_dim = 0;
    double scale = 1.0;
    float* largest = nullptr;
};

// factor * sum over queries of KL(p, softmax(scores)): p is the sum over heads of what attention's softmax gives over
// the same keys, divided by all_heads. Those keys are the picked ones or, with all_keys, all that the query sees. Where
// `heads` are a part of all_heads, p is that part of the whole one, and so is the gradient: the parts add up. The loss
// itself needs the whole p: a part has -factor * sum of p log softmax(scores) and leaves its p behind. The kernel xlogx
// adds the rest, from the sum of p over the parts.
struct IndexLossShape {
    IndexShape index;
    LatentShape core;
    int all_heads = 0;
    bool all_keys = false;
    double factor = 1.0;

    // Columns of p: keys that a query may have.
    std::int64_t width() const { return all_keys ? index.keys.seq_k : index.keys.top_k; }
    // Floats of the memory that a call may use.
    std::int64_t work() const { return index.keys.rows() * (std::max<std::int64_t>(core.heads, width()) + 2); }
};

} // namespace moe
