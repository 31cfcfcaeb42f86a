// Reads CLI11's definition of the command line into plain data.
#include "tools/cli/description.hpp"

#include "planner/machine/hardware.hpp"
#include "planner/plan/plan_fields.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>

namespace moe::tools {

namespace {

std::vector<std::string> parts_of(const std::string& text, char separator) {
    std::vector<std::string> parts(1);
    for (const char c : text)
        if (c == separator)
            parts.emplace_back();
        else
            parts.back() += c;
    return parts;
}

// Sets what a kind of value stands for.
void offer(ArgumentText& argument) {
    const std::string& kind = argument.value;
    const std::pair<const char*, Offer> kinds[] = {{"MODEL", Offer::models},     {"HARDWARE", Offer::hardware},
                                                   {"STACK", Offer::stacks},     {"FILE", Offer::files},
                                                   {"PLAN", Offer::files},       {"PREFIX", Offer::files},
                                                   {"[W] PREFIX", Offer::files}, {"bytes|FILE", Offer::files},
                                                   {"DIR", Offer::folders},      {"NAME", Offer::named}};
    for (const auto& [name, what] : kinds)
        if (kind == name) argument.offer = what;
    if (argument.offer != Offer::nothing) return;
    if (kind == "PRECISION,..")
        for (int i = 0; i < machine::precision_count; ++i)
            argument.words.emplace_back(machine::to_string(static_cast<machine::Precision>(i)));
    else if (kind == "FIELD=VALUE")
        for (const std::string& field : plan::field_names()) argument.words.push_back(field + "=");
    else if (kind.find('|') != std::string::npos) {
        argument.words = parts_of(kind, '|');
        // A part in capitals stands for a value of its kind, as in N|auto.
        std::erase_if(argument.words, [](const std::string& word) {
            return std::none_of(word.begin(), word.end(), [](unsigned char c) { return std::islower(c) != 0; });
        });
    }
    if (!argument.words.empty()) argument.offer = Offer::words;
}

ArgumentText argument_of(const CLI::Option& option) {
    ArgumentText argument;
    argument.positional = option.get_positional();
    argument.name = argument.positional ? option.get_name(true) : "--" + option.get_lnames().front();
    argument.about = option.get_description();
    argument.required = option.get_required();
    argument.repeats = option.get_multi_option_policy() == CLI::MultiOptionPolicy::TakeAll;
    argument.standard = option.get_default_str();
    if (option.get_items_expected_max() > 0) argument.value = option.get_type_name();
    offer(argument);
    return argument;
}

} // namespace

CommandText describe(const CLI::App& app) {
    CommandText command{app.get_name(), app.get_description(), app.version(), app.get_footer(), {}};
    for (const CLI::App* verb : app.get_subcommands([](const CLI::App*) { return true; })) {
        const std::string footer = verb->get_footer();
        VerbText text{verb->get_name(), verb->get_description(), footer.substr(footer.find("moe-plan")), {}};
        for (const CLI::Option* option : verb->get_options())
            if (!option->get_lnames().empty() || option->get_positional())
                text.arguments.push_back(argument_of(*option));
        std::stable_sort(text.arguments.begin(), text.arguments.end(),
                         [](const ArgumentText& a, const ArgumentText& b) { return a.positional > b.positional; });
        command.verbs.push_back(std::move(text));
    }
    return command;
}

std::string usage_of(const ArgumentText& argument) {
    return argument.positional || argument.value.empty() ? argument.name : argument.name + " " + argument.value;
}

} // namespace moe::tools
