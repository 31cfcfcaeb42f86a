// The terminal behind a stream: whether it is one, how wide it is, and whether it takes colours.
#pragma once

#include <string>
#include <string_view>

namespace moe::tools {

bool is_terminal(int descriptor);

// Columns that a table may take: a terminal's width where that is more than 80, else 80, and 80 for files and pipes.
int width_of(int descriptor);

// True where the stream is a terminal that takes colours: never with NO_COLOR in the environment or TERM=dumb.
bool takes_colour(int descriptor);

enum class Ink { strong, faint, warning, error };
// The text in a colour or weight where the stream takes it, else the text as it is.
std::string inked(std::string_view text, Ink ink, int descriptor);

} // namespace moe::tools
