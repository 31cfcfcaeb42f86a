// NCCL's library as this process has opened it, for those who call more of it than the collectives.
#pragma once

#include "engine/comm/collectives.hpp"

#include <string>

namespace moe::backends {

void* nccl_symbol(const char* name);                        // null where the library has no such function
int nccl_version();                                         // as NCCL_VERSION_CODE has it
std::string nccl_words(int status, void* member = nullptr); // an ncclResult_t in NCCL's words

// CollectiveLibrary::slot_window by NCCL's device API (2.28 and later).
std::unique_ptr<comm::SlotWindow> nccl_slot_window(void* member, std::int64_t slots_bytes, int blocks,
                                                   std::string& why);

} // namespace moe::backends
