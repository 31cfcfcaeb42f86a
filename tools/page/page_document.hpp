// The document that embed.py assembled from web/ and the chart library.
#pragma once

#include <string_view>

namespace moe::tools {

// HTML with one mark each for @CONNECT@, @TITLE@ and @DATA@, in this order.
std::string_view page_document();

} // namespace moe::tools
