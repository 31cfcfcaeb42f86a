// What a reader makes of a file: settings by name with their place, environment, and how many processes are started.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace moe::tools {

// Sections, lists and expansions nest this deep in what readers take.
inline constexpr int max_depth = 40;

// Stands in a text where a part of it cannot be known from the file: a command's output, a variable that is not set.
// The part as written follows up to the next mark.
inline constexpr char unknown_mark = '\x01';
bool has_unknown(const std::string& text);
std::string as_written(const std::string& text); // text without marks

// One setting of an engine by its own name: "--num-layers", or "parallelism.tensor_parallel_degree" of sections.
struct Setting {
    std::string name;
    std::vector<std::string> values; // values, one for each member of a list; none: a flag that is there
    std::string file;
    std::size_t line = 0; // line from 1; 0 = not known
    bool dumped = false;  // one of all that a program has: most have their defaults
    bool named = false;   // in the program's name for it: "num_layers"; a switch that is off has the value "false"

    bool unknown() const;      // whether some value cannot be known from the file
    std::string place() const; // "FILE:LINE"
    std::string text() const;  // values as written
};

// What a file says that no setting holds: a branch that cannot be decided, a variable without a value.
struct Unread {
    std::string text, why;
    std::string file;
    std::size_t line = 0;
};

struct SettingsFile {
    std::string format; // "megatron-lm", "megatron-bridge", "torchtitan" or "automodel"; empty: cannot be told
    std::vector<Setting> settings;
    std::map<std::string, std::string> environment; // environment of the run, as far as the file sets it
    std::vector<Unread> unread;
    std::string program;          // program that hands its settings to the engine: "ms-swift"; empty: none
    std::string recipe;           // recipe that the settings change, empty: none
    int nodes = 0, processes = 0; // processes: number of each node; 0 = not in the file
    int tasks = 0;                // tasks of all nodes, 0 = not in the file

    const Setting* find(const std::string& name) const; // last setting of that name
    void set(Setting setting);                          // replaces an earlier setting of that name
    // "SETTING": whether it is on; "SETTING=WORD": whether it has that word; "!" before either: whether not.
    // Of several with a bar between them one is enough.
    bool has(const std::string& words) const;
};

// The largest file that is read, and how many settings one may have.
inline constexpr std::size_t max_file_bytes = std::size_t{4} << 20, max_settings = 20'000;

} // namespace moe::tools
