// What the kernels of sparse attention share: which keys a query sees, where they lie, an indexer's products with them.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moe::cuda {

// PickedKeys on the device.
struct KeyPlaces {
    PickedKeys s;

    __device__ std::int64_t rows() const { return s.batch * s.seq_q; }
    __device__ std::int64_t position(std::int64_t i) const {
        if (s.positions != nullptr) return s.positions[i];
        if (s.parts == 1) return i;
        const std::int64_t run = s.seq_q / 2;
        return i < run ? s.part * run + i : (2 * s.parts - 1 - s.part) * run + i - run;
    }
    // The row of the key at a position of a sequence.
    __device__ std::int64_t row_of(std::int64_t at, std::int64_t sequence) const {
        if (s.parts == 1) return at * s.batch + sequence;
        const std::int64_t run = s.seq_q / 2, number = at / run;
        const std::int64_t member = number < s.parts ? number : 2 * s.parts - 1 - number;
        return (member * s.seq_q + (number < s.parts ? 0 : run) + at % run) * s.batch + sequence;
    }
    __device__ std::int64_t first(std::int64_t row) const {
        return s.document_start != nullptr ? s.document_start[row] : 0;
    }
};

// The keys of a query, as listed or, without a list, all that it sees.
struct KeyList {
    const std::int32_t* list;
    std::int64_t from, count = 0, sequence;

    __device__ KeyList(const KeyPlaces& z, const std::int32_t* keys, std::int64_t row)
        : list(keys != nullptr ? keys + row * z.s.top_k : nullptr), from(z.first(row)), sequence(row % z.s.batch) {
        if (list == nullptr)
            count = z.position(row / z.s.batch) + 1 - from;
        else
            for (std::int64_t end = z.s.top_k; count < end;) { // of the first that is no key
                const std::int64_t middle = (count + end) / 2;
                if (list[middle] >= 0)
                    count = middle + 1;
                else
                    end = middle;
            }
    }
    __device__ std::int64_t at(std::int64_t j) const { return list != nullptr ? list[j] : from + j; }
    // The number of the first key at this position or behind it.
    __device__ std::int64_t lower(std::int64_t position) const {
        if (list == nullptr) return position < from ? 0 : position < from + count ? position - from : count;
        std::int64_t low = 0, high = count;
        while (low < high) {
            const std::int64_t middle = (low + high) / 2;
            if (list[middle] < position)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
    // Whether the query has the key at a position.
    __device__ bool holds(std::int64_t position) const {
        const std::int64_t low = lower(position);
        return low < count && at(low) == position;
    }
    // Which of 64 positions the query has, a bit each, and the number of the first of those keys.
    struct Within {
        unsigned long long mask;
        std::int64_t low;
    };
    __device__ Within within(std::int64_t first) const {
        constexpr int positions = 64, at_once = 8;
        Within out{0, lower(first)};
        bool inside = true;
        for (std::int64_t j = out.low; inside && j < count; j += at_once) {
#pragma unroll
            for (int i = 0; i < at_once; ++i) {
                const std::int64_t there = j + i < count ? at(j + i) - first : positions;
                inside = there < positions;
                if (inside) out.mask |= 1ull << there;
            }
        }
        return out;
    }
};

// The product of n columns of two rows, of which each lane of a warp takes its share; the same in all lanes.
__device__ inline float warp_dot(Src x, std::int64_t x_at, Src y, std::int64_t y_at, int n) {
    float sum = 0.0f;
    for (int c = static_cast<int>(threadIdx.x) % warp_size; c < n; c += warp_size)
        sum += load(x, x_at + c) * load(y, y_at + c);
    return warp_sum(sum);
}

// The score of the key whose row of k begins at `at`, without the scale; the query and its weights lie in shared
// memory.
__device__ inline float index_score(const IndexShape& s, const float* query, const float* weights, Src k,
                                    std::int64_t at) {
    float score = 0.0f;
    for (int h = 0; h < s.heads; ++h) {
        float product = 0.0f;
        for (int c = 0; c < s.dim; ++c) product += query[h * s.dim + c] * load(k, at + c);
        score += weights[h] * (product > 0.0f ? product : 0.0f);
    }
    return score;
}

// The logarithm of a sum of exponentials as its terms come, and two of them together.
struct LogSum {
    float most = -INFINITY, sum = 0.0f;

    __device__ void add(float x) {
        const float best = fmaxf(most, x);
        sum = (most == -INFINITY ? 0.0f : sum * expf(most - best)) + (x == -INFINITY ? 0.0f : expf(x - best));
        most = best;
    }
    __device__ void add(const LogSum& other) {
        const float best = fmaxf(most, other.most);
        sum = (most == -INFINITY ? 0.0f : sum * expf(most - best)) +
              (other.most == -INFINITY ? 0.0f : other.sum * expf(other.most - best));
        most = best;
    }
    __device__ float log() const { return most + logf(sum); }
};

} // namespace moe::cuda
