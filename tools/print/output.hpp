// The options of every verb that say how much it prints and in which form.
#pragma once

namespace moe::tools {

struct OutputOptions {
    bool json = false;    // one JSON document on stdout, everything else on stderr
    bool verbose = false; // whether every column of tables is shown, and details
    bool quiet = false;   // whether only results, warnings and errors are shown
};

} // namespace moe::tools
