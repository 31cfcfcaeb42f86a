// Stands for the splitter in builds without ICU.
#include "engine/data/text/split.hpp"

#include "planner/base/error.hpp"

namespace moe::data {

struct Splitter::Rules {};

bool can_split(std::string& why) {
    why = "this moe-plan was built without ICU (Debian: libicu-dev)";
    return false;
}

Splitter::Splitter(const std::vector<SplitStep>&, bool, const std::string& place) {
    std::string why;
    can_split(why);
    fail("{}: a tokenizer needs regular expressions over Unicode: {}", place, why);
}
Splitter::~Splitter() = default;

std::vector<std::string> Splitter::pieces(std::string_view, const std::string&) const { return {}; }

} // namespace moe::data
