// Context parallelism by a ring, by heads and by both trains what one rank trains.
#include "tests/engine/train/parity.hpp"

#include <doctest/doctest.h>

TEST_CASE("parity: context parallelism by ring and by heads") {
    check_plans("qwen3", {
                             {{"cp", "2"}},
                             {{"cp", "8"}, {"ep", "8"}},
                             {{"cp", "4"}, {"ep", "4"}, {"mbs", "2"}},
                             {{"cp", "2"}, {"tp", "2"}, {"ep", "4"}, {"pp", "2"}},
                             {{"cp", "2"}, {"tp", "2"}, {"ep", "2"}, {"etp", "4"}},
                             {{"cp", "2"}, {"pp", "2"}, {"vpp", "2"}, {"schedule", "interleaved"}, {"ep", "4"}},
                             {{"cp", "4"}, {"cp_comm", "alltoall"}, {"ep", "8"}},
                             {{"cp", "2"}, {"cp_comm", "alltoall"}, {"tp", "2"}, {"ep", "4"}, {"mbs", "2"}},
                             {{"rank_order", "cp-tp-dp-ep-pp"}, {"cp", "4"}, {"tp", "2"}, {"ep", "2"}, {"etp", "2"}},
                         });
    check_plans("qwen2", {
                             {{"cp", "4"}, {"ep", "2"}},
                             {{"cp", "4"}, {"cp_comm", "alltoall"}, {"tp", "2"}, {"ep", "8"}},
                         });
    check_plans("deepseek3", {
                                 {{"cp", "8"}, {"ep", "8"}},
                                 {{"cp", "2"}, {"tp", "2"}, {"pp", "2"}, {"ep", "4"}},
                                 {{"cp", "4"}, {"cp_comm", "alltoall"}, {"tp", "2"}, {"ep", "4"}, {"etp", "2"}},
                             });
    check_plans("llama", {{{"cp", "4"}, {"tp", "2"}}, {{"cp", "2"}, {"cp_comm", "alltoall"}, {"pp", "4"}}});
}

TEST_CASE("parity: context parallelism by heads within a domain and by a ring over the domains") {
    const auto both = [](Fields fields) {
        fields.insert(fields.begin(), {"cp_comm", "alltoall+ring"});
        return fields;
    };
    check_plans("qwen3", {
                             both({{"cp", "4"}, {"ep", "4"}, {"mbs", "2"}}),
                             both({{"cp", "8"}, {"ep", "8"}}),
                             both({{"cp", "4"}, {"tp", "2"}, {"ep", "2"}, {"etp", "2"}}),
                             both({{"cp", "4"}, {"pp", "2"}, {"ep", "4"}, {"recompute", "full"}}),
                             both({{"rank_order", "cp-tp-dp-ep-pp"}, {"cp", "4"}, {"tp", "2"}, {"ep", "2"}}),
                         });
    check_plans("qwen3", {both({{"cp", "4"}, {"ep", "2"}, {"mbs", "2"}})}, {{"documents", "mask"}});
    check_plans("deepseek3", {both({{"cp", "4"}, {"tp", "2"}, {"ep", "4"}})});
    check_plans("gptoss", {both({{"cp", "4"}, {"tp", "2"}, {"ep", "4"}})});  // windows and sinks
    check_plans("qwen3next", {both({{"cp", "4"}, {"ep", "2"}})});            // gated delta nets beside
    check_plans("llama4", {both({{"cp", "4"}, {"ep", "2"}, {"etp", "2"}})}); // chunks
}
