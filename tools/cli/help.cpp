// CLI11's formatter with a narrower column of names and wrapped descriptions.
#include "tools/cli/help.hpp"

#include "tools/print/table.hpp"

#include <CLI/CLI.hpp>

namespace moe::tools {

namespace {

constexpr std::size_t width = 80, names_width = 26;

// The description begins on the line of the name, or on the next one where the name is too long.
std::string entry(const std::string& name, const std::string& about) {
    std::string text = "  " + name;
    if (text.size() + 2 > names_width)
        text += '\n' + std::string(names_width, ' ');
    else
        text.resize(names_width, ' ');
    bool first = true;
    for (const std::string& line : wrapped(about, width - names_width)) {
        if (!first) text += '\n' + std::string(names_width, ' ');
        text += line;
        first = false;
    }
    return text + "\n";
}

class HelpFormatter : public CLI::Formatter {
public:
    HelpFormatter() { label("SUBCOMMAND", "VERB"); }
    std::string make_option(const CLI::Option* option, bool is_positional) const override {
        std::string name = make_option_name(option, is_positional);
        if (!is_positional && option->get_items_expected_max() > 0) name += " " + option->get_type_name();
        if (option->get_required()) name += " (required)";
        std::string about = make_option_desc(option);
        if (!option->get_default_str().empty()) about += " (default: " + option->get_default_str() + ")";
        return entry(name, about);
    }
    std::string make_option_usage(const CLI::Option* option) const override {
        const std::string name = make_option_name(option, true) + (option->get_expected_max() > 1 ? "..." : "");
        return option->get_required() ? name : "[" + name + "]";
    }
    std::string make_subcommand(const CLI::App* verb) const override {
        return entry(verb->get_display_name(), verb->get_description());
    }
};

} // namespace

std::shared_ptr<CLI::FormatterBase> help_formatter() { return std::make_shared<HelpFormatter>(); }

} // namespace moe::tools
