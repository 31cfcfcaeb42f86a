// From the commands of a script to the settings of the one that trains, and to how many processes are started.
#include "planner/base/error.hpp"
#include "tools/import/readers/bash_run.hpp"
#include "tools/import/readers/readers.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <iterator>
#include <set>
#include <sstream>

namespace moe::tools {
namespace {

bool flag_like(const std::string& word) {
    return word.size() > 2 && word[0] == '-' && word[1] == '-' &&
           std::isalpha(static_cast<unsigned char>(word[2])) != 0;
}

bool ends_with(const std::string& word, const std::string& end) {
    return word.size() >= end.size() && word.compare(word.size() - end.size(), end.size(), end) == 0;
}

// Programs that start others, whose own options are no settings of an engine.
bool starts_processes(const std::string& word) {
    static const std::set<std::string> known{"torchrun",
                                             "torch.distributed.run",
                                             "torch.distributed.launch",
                                             "srun",
                                             "mpirun",
                                             "torchrun.exe",
                                             "accelerate",
                                             "deepspeed",
                                             "sbatch",
                                             "automodel"};
    return known.count(base_name(word)) > 0;
}

// A module or program of an engine.
bool trains(const std::string& word) {
    return ends_with(word, ".py") || word == "torchtitan.train" || word == "nemo_automodel" ||
           word.starts_with("verl.");
}

std::size_t flags_of(const BashCommand& command) {
    return static_cast<std::size_t>(std::count_if(command.words.begin(), command.words.end(), flag_like));
}

// `megatron sft`, of ms-swift.
bool starts_swift(const std::vector<std::string>& words, std::size_t at) {
    static const std::set<std::string> kinds{"sft", "pt", "rlhf"};
    return base_name(words[at]) == "megatron" && at + 1 < words.size() && kinds.count(words[at + 1]) > 0;
}

// The place behind the program's name, or 0 where the command names none.
std::size_t behind_program(const BashCommand& command) {
    for (std::size_t i = 0; i < command.words.size(); ++i)
        if (trains(command.words[i]) || starts_swift(command.words, i)) return i + 1;
    return 0;
}

int number_in(const std::string& word) {
    // "1:4" is the least and the most of an elastic job.
    const std::string last = word.substr(word.rfind(':') + 1);
    int value = 0;
    const auto [end, error] = std::from_chars(last.data(), last.data() + last.size(), value);
    return error == std::errc{} && end == last.data() + last.size() && value > 0 ? value : 0;
}

// "--nproc_per_node" and "--nproc-per-node" are one option.
std::string option_name(std::string word) {
    word = word.substr(0, word.find('='));
    std::replace(word.begin(), word.end(), '_', '-');
    return word;
}

// Options of torchrun, srun, mpirun and sbatch that say how many processes are started.
void take_launcher_words(SettingsFile& into, const std::vector<std::string>& words, bool slurm) {
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string name = option_name(words[i]);
        const std::size_t equals = words[i].find('=');
        std::string value = equals != std::string::npos ? words[i].substr(equals + 1)
                            : i + 1 < words.size()      ? words[i + 1]
                                                        : "";
        std::string option = name;
        if (slurm && words[i].size() > 2 && words[i][0] == '-' && words[i][1] != '-') { // -N32
            option = words[i].substr(0, 2);
            value = words[i].substr(2);
        }
        const int number = number_in(value);
        if (number == 0) continue;
        if (option == "--nproc-per-node" || option == "--ntasks-per-node" || option == "--gpus-per-node") {
            // torchrun's own number stands over Slurm's: one task a node starts several processes.
            if (option == "--nproc-per-node" || into.processes == 0 || option == "--gpus-per-node")
                into.processes = number;
        } else if (option == "--nnodes" || option == "--nodes" || option == "-N") {
            into.nodes = number;
        } else if (option == "-n" || option == "--ntasks" || option == "-np") {
            into.tasks = number;
        }
    }
}

// slime's options of the program itself, whose processes Ray starts.
void take_ray_words(SettingsFile& into) {
    const auto number = [&into](const char* name) {
        const Setting* setting = into.find(name);
        return setting != nullptr && setting->values.size() == 1 ? number_in(setting->values[0]) : 0;
    };
    into.nodes = std::max(into.nodes, number("--actor-num-nodes"));
    into.processes = number("--actor-num-gpus-per-node");
}

// ms-swift takes its processes from variables, and settings by the names of Megatron-LM's variables, with a value each.
void take_swift(SettingsFile& into) {
    into.program = "ms-swift";
    const auto number = [&into](const char* name) {
        const auto variable = into.environment.find(name);
        return variable == into.environment.end() ? 0 : number_in(variable->second);
    };
    into.processes = number("NPROC_PER_NODE");
    if (into.nodes == 0) into.nodes = into.environment.count("NNODES") > 0 ? number("NNODES") : 1;
    for (Setting& setting : into.settings) {
        if (!flag_like(setting.name)) continue;
        setting.name.erase(0, 2);
        setting.named = true;
    }
}

// Where no command names a program, the file may be the arguments alone: their first word is a flag.
bool arguments_alone(const std::string& text) {
    std::size_t at = 0;
    while (at < text.size()) {
        const std::size_t begin = text.find_first_not_of(" \t\r\n", at);
        if (begin == std::string::npos) return false;
        if (text[begin] != '#') return flag_like(text.substr(begin, 3) + "x");
        at = std::min(text.find('\n', begin), text.size());
    }
    return false;
}

// Line ends become blanks, comments go away.
std::string as_one_line(const std::string& text) {
    std::string line;
    bool comment = false, begun = false;
    char quote = '\0';
    for (std::size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (c == '\n') {
            comment = begun = false;
            line += line.empty() || line.back() != '\\' ? " " : "\n";
        } else if (!comment) {
            comment = c == '#' && !begun;
            begun = c != ' ' && c != '\t';
            if (comment) continue;
            if (quote == '\0' && (c == '"' || c == '\''))
                quote = c;
            else if (c == quote)
                quote = '\0';
            // No shell has read the brackets of ([0]*3+[1]*58).
            if (quote == '\0' && std::string("()<>&;|").find(c) != std::string::npos) line += '\\';
            line += c;
        }
    }
    return line;
}

// Words of verl's command lines, which name what has no section too: strategy=fsdp2.
bool names_section(const std::string& word) {
    return word.starts_with("actor_rollout_ref.") || word.starts_with("model.partial_pretrain=");
}

// Words NAME=VALUE are settings where NAME has a point. `hydra`: where it has none as well.
void add_word(SettingsFile& into, Setting& current, const std::string& word, const std::string& file, std::size_t line,
              bool hydra) {
    const std::size_t equals = word.find('=');
    if (flag_like(word)) {
        if (!current.name.empty()) into.set(current);
        current = {word.substr(0, equals), {}, file, line};
        if (equals != std::string::npos) current.values.push_back(word.substr(equals + 1));
        return;
    }
    // model.x=1 and ++model.x=1 are Hydra's.
    const std::size_t name = word.find_first_not_of('+');
    const bool assigns = equals != std::string::npos && name != std::string::npos && equals > name &&
                         (hydra || word.find('.') < equals) && word.find_first_of("/'\" ", name) >= equals;
    if (assigns && (current.name.empty() || !current.values.empty())) {
        if (!current.name.empty()) into.set(current);
        current = {};
        into.set({word.substr(name, equals - name), {word.substr(equals + 1)}, file, line});
        return;
    }
    if (!current.name.empty()) current.values.push_back(word);
}

// The command that trains: it names a program and has most flags; without one, the command of most flags.
const BashCommand* training_command(const std::vector<BashCommand>& commands) {
    const BashCommand* best = nullptr;
    for (const BashCommand& command : commands) {
        const bool program = behind_program(command) > 0;
        const bool better = best == nullptr || (program && behind_program(*best) == 0) ||
                            (program == (behind_program(*best) > 0) && flags_of(command) >= flags_of(*best));
        if (flags_of(command) + (program ? 1 : 0) > 0 && better) best = &command;
    }
    return best;
}

} // namespace

void add_arguments(SettingsFile& into, const std::vector<std::string>& words, const std::string& file,
                   std::size_t line) {
    Setting current;
    const bool hydra = std::any_of(words.begin(), words.end(), names_section);
    for (const std::string& word : words) add_word(into, current, word, file, line, hydra);
    if (!current.name.empty()) into.set(current);
}

SettingsFile settings_of_variables(const BashValues& values, const std::string& file) {
    SettingsFile result;
    for (const auto& [name, variable] : values.variables()) {
        std::vector<std::string> words = variable.values;
        if (!variable.array && words.size() == 1) {
            std::istringstream text(words[0]);
            words.assign(std::istream_iterator<std::string>(text), {});
        }
        if (!words.empty() && flag_like(words[0])) add_arguments(result, words, file, 0);
    }
    if (!result.settings.empty()) result.format = "megatron-lm";
    return result;
}

SettingsFile read_launch_script(const std::string& text, const std::string& file, BashValues& values) {
    SettingsFile result;
    const bool alone = arguments_alone(text);
    values.enter(file);
    BashRun run = follow_bash(alone ? as_one_line(text) : text, file, values);
    result.unread = std::move(run.unread);
    result.environment = std::move(run.exported);
    take_launcher_words(result, run.slurm, true);
    const BashCommand* command = training_command(run.commands);
    if (command == nullptr) return result; // The variables are for the files behind it.
    for (const auto& [name, value] : command->environment) {
        result.environment[name] = value;
        values.set(name, {value}, false, false); // Files that come after see the variable.
    }
    std::size_t begin = behind_program(*command);
    const std::vector<std::string> before(command->words.begin(),
                                          command->words.begin() + static_cast<std::ptrdiff_t>(begin));
    for (std::size_t i = 0; i < before.size(); ++i) {
        if (!starts_processes(before[i])) continue;
        const bool slurm = base_name(before[i]) != "torchrun" && before[i].rfind("torch.", 0) != 0;
        take_launcher_words(result, {before.begin() + static_cast<std::ptrdiff_t>(i), before.end()}, slurm);
    }
    if (begin == 0 && !alone)
        begin = static_cast<std::size_t>(std::find_if(command->words.begin(), command->words.end(), flag_like) -
                                         command->words.begin());
    const std::vector<std::string> words(command->words.begin() + static_cast<std::ptrdiff_t>(begin),
                                         command->words.end());
    add_arguments(result, words, command->file, command->line);
    if (begin > 0 && starts_swift(command->words, begin - 1)) take_swift(result);
    if (result.processes == 0) take_ray_words(result);
    const auto named = [&](const char* part) {
        return std::any_of(before.begin(), before.end(),
                           [part](const std::string& w) { return w.find(part) != std::string::npos; });
    };
    if (const Setting* recipe = result.find("--recipe"); recipe != nullptr && recipe->values.size() == 1) {
        result.recipe = recipe->values[0];
        result.format = "megatron-bridge";
    } else if (result.program.empty()) {
        take_program_of(result);
    }
    if (!result.format.empty()) return result;
    if (named("torchtitan") || result.find("--job.config_file") != nullptr) {
        result.format = "torchtitan";
    } else {
        result.format = "megatron-lm";
    }
    return result;
}

} // namespace moe::tools
