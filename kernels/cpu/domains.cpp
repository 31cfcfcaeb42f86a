// Tokens on their way between NVLink domains: which go where, and what of their choices concerns the domain they reach.
#include "kernels/cpu/rows.hpp"

namespace moe::cpu {

namespace {

void token_domains(const DomainShape& s, const std::int32_t* index, std::int32_t* counts, std::int32_t* slot_of,
                   float* overflow, void*) {
    const int each = s.experts / s.domains;
    std::fill_n(counts, s.domains, 0);
    std::fill_n(slot_of, s.tokens * s.domains, -1);
    std::int64_t excess = 0;
    for (std::int64_t t = 0; t < s.tokens; ++t)
        for (int k = 0; k < s.top_k; ++k) {
            const std::int32_t expert = index[t * s.top_k + k];
            if (expert < 0) continue;
            const int domain = expert / each;
            // A token goes once, with its first choice there.
            bool first = true;
            for (int before = 0; before < k && first; ++before) {
                const std::int32_t other = index[t * s.top_k + before];
                first = other < 0 || other / each != domain;
            }
            if (!first) continue;
            if (counts[domain] < s.slot_rows)
                slot_of[t * s.domains + domain] = static_cast<std::int32_t>(domain * s.slot_rows + counts[domain]++);
            else
                ++excess;
        }
    if (overflow != nullptr && excess > 0) *overflow += static_cast<float>(excess);
}

void domain_experts(const DomainShape& s, const std::int32_t* index, const std::int32_t* counts, std::int32_t* to,
                    void*) {
    const int each = s.experts / s.domains, first = s.domain * each;
    for (int sender = 0; sender < s.domains; ++sender) {
        const std::int64_t rows = counts[std::int64_t{sender} * s.domains + s.domain];
        const std::int64_t start = sender * s.slot_rows * s.top_k, held = rows * s.top_k;
        for (std::int64_t i = 0; i < s.slot_rows * s.top_k; ++i) {
            const std::int32_t expert = i < held ? index[start + i] : -1;
            to[start + i] = expert >= first && expert < first + each ? expert - first : -1;
        }
    }
}

} // namespace

void add_domains(Kernels& table) {
    table.token_domains = token_domains;
    table.domain_experts = domain_experts;
}

} // namespace moe::cpu
