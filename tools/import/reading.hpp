// The settings of a file against an engine's table, read backwards: which plan would be written so.
#pragma once

#include "planner/plan/plan.hpp"
#include "tools/import/phrases.hpp"

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace moe::tools {

// The table's entries as phrases, and what the file says. It keeps references: table, reader and file must outlive it.
class Reading {
public:
    Reading(const EngineTable& table, const ReaderTable& reader, const SettingsFile& file, std::string release);

    // Facts of the model by name ("model.layers"), from the settings that say them; those that none says have the
    // reader's defaults, or are missing.
    std::map<std::string, std::string> facts() const;

    // Sets every field that a setting says, in a plan with model, hardware, stack and gpus. A field takes the value
    // whose settings the file has most of; of two equal ones the one that it has already. Words of other releases are
    // taken where this one has none that fit. `fixed`: fields that stay as they are.
    void set_fields(plan::Plan& plan, const std::vector<std::string>& fixed = {});

    // Of the settings that the plan says in the words that were taken: the values, and the field or fact.
    struct Said {
        std::vector<std::string> values;
        std::string field;
    };
    std::map<std::string, Said> written(const plan::Plan& plan) const;

    // The name of a setting in the file that holds the field's value; empty: there is none.
    std::string said_by(const std::string& field) const;
    // Whether a setting of the fact is in the file with a value that is not.
    bool unclear(const std::string& fact) const;
    bool says_sizes() const { return given("--num-layers") != nullptr || given("model.num_layers") != nullptr; }
    const std::string& release() const { return release_; }
    // The release whose words said a field, where they are not those of release().
    const std::map<std::string, std::string>& dialects() const { return dialects_; }

    // The values of a setting: in the file, or what the engine takes where it is not; nothing where neither is known.
    std::optional<std::vector<std::string>> value(const std::string& name, const plan::Plan& plan) const;
    std::optional<std::vector<std::string>> default_of(const std::string& name, const plan::Plan& plan) const;
    const std::vector<std::string>* given(const std::string& name) const; // values in the file, variables by "$NAME"
    bool known(const std::string& name) const;                            // whether some entry of the table writes it
    // Whether the setting has no effect on a plan that is read: by the reader's lists.
    bool without_effect(const std::string& name, const plan::Plan& plan) const;

private:
    struct Line { // entry with its phrases
        const EngineEntry* entry;
        std::vector<Phrase> phrases;
        std::vector<std::string> fields; // fields that `when` asks for
    };
    struct FactMatch;
    FactMatch match(const Line& line) const;
    std::map<std::string, std::string> denied() const;
    // Values of a field, and of others that the same words say: {"precision", "fp8-tensor"}, {"fp8_scaling",
    // "delayed"}.
    using Choice = std::vector<std::pair<std::string, std::string>>;
    std::vector<Choice> candidates(const plan::Plan& plan, const std::string& field) const;
    void add_captures(const Line& line, const plan::Plan& plan, const std::string& field,
                      std::vector<Choice>& captures) const;
    void add_unions(const plan::Plan& plan, const std::string& field, std::vector<Choice>& all) const;
    static void add_tests(const Line& line, const std::string& field, std::vector<Choice>& tests);
    void drop_strays(const std::string& name, std::vector<std::string>& values) const;
    int disagreement(const plan::Plan& plan, const std::string& field, const std::vector<const Line*>& lines,
                     const std::vector<std::string>& names, const std::string& release) const;
    std::vector<std::string> speaking(const std::vector<std::string>& names,
                                      const std::vector<const Line*>& lines) const;
    bool improve(plan::Plan& plan, const std::string& field);

    const EngineTable& table_;
    const ReaderTable& reader_;
    const SettingsFile& file_;
    std::string release_;
    std::vector<Line> lines_;
    std::vector<std::string> releases_; // releases at which words change, this one first
    std::map<std::string, std::vector<std::string>> given_;
    std::map<std::string, std::string> dialects_;
};

// The fields that set_fields() sets, in its order.
std::vector<std::string> fields_of(const EngineTable& table);

} // namespace moe::tools
