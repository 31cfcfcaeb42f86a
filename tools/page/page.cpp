// Puts title and data into the document that embed.py assembled at build time.
#include "tools/page/page.hpp"

#include "tools/page/page_document.hpp"

namespace moe::tools {

namespace {

std::string escaped(std::string_view text) {
    std::string out;
    for (const char c : text)
        if (c == '<')
            out += "&lt;";
        else if (c == '&')
            out += "&amp;";
        else
            out += c;
    return out;
}

// Within a script element no "<" may end it: JSON has another spelling for it, and needs it in strings alone.
std::string harmless(std::string_view json) {
    std::string out;
    out.reserve(json.size());
    for (const char c : json)
        if (c == '<')
            out += "\\u003c";
        else
            out += c;
    return out;
}

} // namespace

std::string page(std::string_view title, std::string_view data, bool served) {
    std::string out;
    std::string_view rest = page_document();
    const auto put = [&](std::string_view mark, const std::string& value) {
        const std::size_t at = rest.find(mark);
        out.append(rest.substr(0, at)).append(value);
        rest.remove_prefix(at + mark.size());
    };
    put("@CONNECT@", served ? "'self'" : "'none'");
    put("@TITLE@", escaped(title));
    put("@DATA@", harmless(data));
    return out.append(rest);
}

} // namespace moe::tools
