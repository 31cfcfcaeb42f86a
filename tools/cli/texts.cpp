// The verbs completion and man.
#include "tools/cli/texts.hpp"

#include "planner/base/error.hpp"
#include "planner/base/names.hpp"
#include "planner/base/schema.hpp"
#include "tools/print/console.hpp"
#include "tools/report/stamp.hpp"

#include <nlohmann/json.hpp>

namespace moe::tools {

namespace {

void print_text(const OutputOptions& options, const char* name, const char* form, const std::string& kind,
                const std::string& text) {
    if (!options.json) return print(text);
    print(stamped(name, {{form, kind}, {"text", text}}));
}

} // namespace

void print_completion(const TextOptions& options, const CommandText& command) {
    const std::string& shell = options.kind;
    if (shell != "bash" && shell != "zsh" && shell != "fish")
        refuse("completion {}: must be bash, zsh or fish", shown(shell));
    print_text(options, schema::completion, "shell", shell,
               shell == "bash"  ? bash_completion(command)
               : shell == "zsh" ? zsh_completion(command)
                                : fish_completion(command));
}

void print_manual(const ManOptions& options, const CommandText& command) {
    print_text(options, schema::man, "format", options.markdown ? "markdown" : "roff",
               options.markdown ? reference_of_verbs(command) : manual_page(command));
}

} // namespace moe::tools
