// Stands for the splitter in builds without ICU.
#include "engine/data/text/split.hpp"

#include "planner/base/error.hpp"

namespace moe::data {

struct Splitter::Rules {};

bool can_split(std::string& why) {
    why = "this moe-plan was built without ICU (Debian: libicu-dev)";
    return false;
}

std::size_t grapheme_bytes(std::string_view) {
    std::string why;
    can_split(why);
    fail("normalizer Precompiled needs characters' properties: {}", why);
}

Splitter::Splitter(const std::vector<SplitStep>&, bool, const std::string& file) {
    std::string why;
    can_split(why);
    fail("{}: a tokenizer needs regular expressions over Unicode: {}", file, why);
}
Splitter::~Splitter() = default;

bool Splitter::pieces(std::string_view, std::size_t, const Place&, const std::function<void(std::string_view)>&) const {
    return true;
}
std::size_t Splitter::likely_cut(std::string_view text, const Place&) const { return text.size(); }

} // namespace moe::data
