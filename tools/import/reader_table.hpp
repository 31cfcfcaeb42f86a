// What an engine does that its table of words does not say: defaults, settings without effect, older forms.
#pragma once

#include "planner/stack/condition.hpp"

#include <nlohmann/json.hpp>

#include <map>
#include <string>
#include <vector>

namespace moe::tools {

// Settings that change nothing in plans for which `when` holds.
struct Beside {
    std::vector<std::string> settings; // patterns of settings' names
    stack::Condition when;
};

// Facts of a model where no setting says them, in models whose facts pass the tests.
struct FactDefaults {
    nlohmann::ordered_json when;
    std::map<std::string, std::string> facts;
};

// Facts of a model that a setting of that value tells beside what the table's entries say: they stand over all others,
// in models whose facts pass the tests.
struct FactTold {
    std::string setting, value;
    nlohmann::ordered_json when;
    std::map<std::string, std::string> facts;
};

// A setting that names a tokenizer, and the vocabulary of those that fit the pattern; empty: that of the profile of a
// model that the tokenizer is named after.
struct TokenizerName {
    std::string setting, value, vocab;
};

// A number N in place of a list of layers: "multiples" marks layers 0, N, 2N, ..; "others" all but N - 1, 2N - 1, ..
struct Frequency {
    std::string setting, layers, marks; // layers: the setting with the number of layers
};

// Names of settings by which an engine cuts layers into stages; empty: it has none of that kind.
struct StageNames {
    std::string layers_per_chunk, first, last, embedding, loss;
    std::string pattern; // letters of a hybrid's layers, with a bar between stages
};

// A setting of a value that fits the pattern, and the settings that it is taken for: "on" is a flag that is there,
// "off" one that is not.
struct StandIn {
    std::string setting, value; // value: a pattern
    std::string with;           // what the file must have beside it, in words of SettingsFile::has(); empty: nothing
    std::map<std::string, std::string> as;
    std::string says; // what is lost by that, as a warning; empty: nothing
};

// What a setting of a value that fits the pattern does, and no plan can say.
struct Caution {
    std::string setting, value, says; // setting: a pattern
    std::string with;                 // as in StandIn
};

// A plan field that every run of a program has in plans for which `when` holds, and that no setting says.
struct ProgramField {
    std::string field, value;
    stack::Condition when;
};

// A program that hands settings to the engine, under the names that the engine's program has for them or its own.
struct Program {
    std::vector<Caution> refused, cautions; // as the table's, by the program's names
    std::vector<StandIn> read_as;
    std::vector<std::string> sections;           // sections in which settings have the engine's names
    std::map<std::string, std::string> names;    // settings, and what the engine's program calls them; "no NAME"
    std::map<std::string, std::string> computed; // the engine's settings as "A * B / C" of the program's
    std::map<std::string, std::string> defaults; // by the engine's names, where they are others than the engine's
    std::map<std::string, std::string> own;      // the program's own settings where nobody sets them, by its names
    std::vector<ProgramField> fields;
    std::string nodes, processes;      // settings with the number of nodes, and of processes of each
    std::vector<std::string> harmless; // patterns of harmless settings' names
};

struct ReaderTable {
    std::string format;                                       // "megatron-lm"
    std::string engine;                                       // engine whose table of words it reads: "megatron-core"
    std::string part;                                         // part of that table: "args", "bridge", "config"
    std::map<std::string, std::vector<std::string>> defaults; // default values; $WORD is that of the plan
    std::vector<FactDefaults> facts;
    std::vector<FactTold> told;
    std::vector<TokenizerName> tokenizers; // the first that fits counts, where no setting says the vocabulary
    std::vector<std::string> harmless;     // patterns of harmless settings' names
    std::vector<std::string> read;         // patterns of those among them that are read all the same
    std::vector<Beside> beside;
    // Patterns of settings that are asked for only beside others, in words of SettingsFile::has().
    std::map<std::string, std::string> asked_with;
    std::vector<StandIn> read_as;              // settings without a word in plans
    std::map<std::string, std::string> absent; // patterns of settings, and the value that is as good as not set
    std::map<std::string, std::vector<std::string>> idle_words; // members of lists that change nothing
    std::vector<std::string> weak;                              // settings that decide only where all others agree
    std::vector<std::string> cosmetic;                          // facts that change neither time nor memory
    std::vector<std::vector<std::string>> same;                 // values of one meaning
    std::vector<Frequency> frequencies;
    // Settings by the names that the program's own list of arguments has for them, where those are others than usual;
    // "no SETTING": one that switches off what the name says.
    std::map<std::string, std::string> dumped;
    std::map<std::string, std::string> dumped_defaults; // values that such a list has where nobody set any
    std::map<std::string, Program> programs;
    std::vector<Caution> cautions;
    std::vector<Caution> refused; // settings of models that no plan has
    StageNames stages;
    std::vector<std::string> names;  // settings that name a model as it is published, where no recipe is the model
    std::vector<std::string> recipe; // settings whose values, joined by /, name a model of the engine's table

    bool is_harmless(const std::string& setting) const;
    bool is_weak(const std::string& setting) const;
    bool is_cosmetic(const std::string& fact) const;
};

// Names in profiles/engines/readers, sorted.
std::vector<std::string> reader_formats();
// Reads profiles/engines/readers/FORMAT.json. Throws Error (bad_input) naming the file and the member.
ReaderTable load_reader_table(const std::string& format);

} // namespace moe::tools
