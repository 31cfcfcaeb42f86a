// The command moe-plan: hands its words to the verbs.
#include "tools/cli/run.hpp"

#include <string>
#include <vector>

int main(int argc, char** argv) {
    return moe::tools::run_to_status(std::vector<std::string>(argv + (argc > 0 ? 1 : 0), argv + argc));
}
