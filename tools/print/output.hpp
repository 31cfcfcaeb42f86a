// How much a verb says and in which form; every verb has these options.
#pragma once

namespace moe::tools {

struct OutputOptions {
    bool json = false;    // one JSON document on stdout, everything else on stderr
    bool verbose = false; // every column of tables, and details
    bool quiet = false;   // results, warnings and errors alone
};

} // namespace moe::tools
