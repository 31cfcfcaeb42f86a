// The page of plans: one HTML document with its style, its modules, the chart library and its data inside.
#pragma once

#include <string>
#include <string_view>

namespace moe::tools {

// title: plain text. data: a JSON document, by whose schema the page decides what it shows (web/main.js). served: it
// may ask the server that it came from, and nobody else; otherwise it may ask nobody. Its content security policy holds
// the browser to that, and to the scripts and styles that were built in, by their hashes.
std::string page(std::string_view title, std::string_view data, bool served);

} // namespace moe::tools
