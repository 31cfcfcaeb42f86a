// The options of every verb that say how much it prints and in which form.
#pragma once

namespace moe::tools {

struct OutputOptions {
    bool json = false;    // one JSON document on stdout, everything else on stderr
    bool verbose = false; // every column of tables, and details
    bool quiet = false;   // results, warnings and errors alone
};

} // namespace moe::tools
