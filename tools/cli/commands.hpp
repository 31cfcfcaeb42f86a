// The command line: every verb with its options. Help, completion and documents are made from this definition.
#pragma once

#include <memory>
#include <string>

namespace CLI {
class App;
}

namespace moe::tools {

class Commands {
public:
    Commands();
    ~Commands();
    Commands(const Commands&) = delete;
    Commands& operator=(const Commands&) = delete;

    // Parsing it runs the chosen verb, which throws Error.
    CLI::App& app();
    // The command line as typed, which execute keeps in run.json and replay in its report.
    void remember(const std::string& typed);

private:
    struct Options;
    std::unique_ptr<Options> options_;
    std::unique_ptr<CLI::App> app_;
};

} // namespace moe::tools
