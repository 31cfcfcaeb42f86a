// Blank cells of a published row, filled from the recipes that are most like it.
#pragma once

#include "simulator/published/runs.hpp"

#include <functional>
#include <string>
#include <vector>

namespace moe::published {

// What published a row: the word of its source by which stacks know it, and the stack of its release. Both are empty
// where no stack stands for the source.
struct Origin {
    std::string source, stack;
};

// Cells that `other_settings` says are misprinted ("vpp misprinted", "ep misprinted") become blank.
void forget_misprints(Run& run);

// Recipes and rows from which blank cells are filled. A sibling of a row has its model, system, family of precisions
// (16, 8 or 4 bits) and source. It may give a cell where it agrees with the row in everything that the cell depends on:
// a layout in pp and vpp, say, or a dispatcher in ep and the stack. Of several the one with the most equal cells gives
// it, then the first.
class Siblings {
public:
    Siblings(std::vector<Run> recipes, std::function<Origin(const Run&)> origin_of);

    // Fills vpp, etp, mbs, pipeline layout and the words of a recipe that are blank. One note for each sibling that
    // gave something says what.
    void fill(Run& run, std::vector<std::string>& notes) const;

private:
    struct Recipe {
        Run run;
        Origin origin;
    };
    std::vector<Recipe> recipes_;
    std::function<Origin(const Run&)> origin_of_;
};

} // namespace moe::published
