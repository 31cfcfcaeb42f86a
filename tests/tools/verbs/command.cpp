// Runs the command through the shell and collects what it wrote.
#include "tests/tools/verbs/command.hpp"

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <stdexcept>

namespace moe::test {

namespace fs = std::filesystem;

namespace {

std::string content(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// Goes to the folder and runs the command, with the built one before all others in the PATH.
std::string line_of(const std::string& folder, const std::string& command) {
    const char* built = std::getenv("MOE_PLAN");
    if (built == nullptr) throw std::runtime_error("MOE_PLAN is not set: run this through meson test");
    return "PATH='" + fs::path(built).parent_path().string() + "':$PATH; cd '" + folder + "' && { " + command + "\n}";
}

} // namespace

Outcome shell(const std::string& folder, const std::string& command) {
    // Outputs lie beside the folder, so that tests can look at what the command itself left inside.
    const std::string out = folder + ".out", err = folder + ".err";
    const std::string line = line_of(folder, command) + " > '" + out + "' 2> '" + err + "'";
    const int status = std::system(line.c_str());
    Outcome outcome;
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    outcome.out = content(out);
    outcome.err = content(err);
    fs::remove(out);
    fs::remove(err);
    return outcome;
}

Outcome on_terminal(const std::string& folder, const std::string& command, int columns) {
    const std::string line = line_of(folder, command);
    struct winsize size {};
    size.ws_row = 50;
    size.ws_col = static_cast<unsigned short>(columns);
    int terminal = -1;
    const pid_t child = ::forkpty(&terminal, nullptr, nullptr, &size);
    if (child < 0) throw std::runtime_error("cannot make a terminal");
    if (child == 0) {
        ::execl("/bin/sh", "sh", "-c", line.c_str(), nullptr);
        ::_exit(127);
    }
    Outcome outcome;
    std::array<char, 4096> part{};
    // The last read fails once the child has closed its end.
    for (ssize_t size_read = 0; (size_read = ::read(terminal, part.data(), part.size())) > 0;)
        outcome.out.append(part.data(), static_cast<std::size_t>(size_read));
    int status = 0;
    ::waitpid(child, &status, 0);
    ::close(terminal);
    outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return outcome;
}

std::string source_folder() {
    const char* folder = std::getenv("SOURCE");
    if (folder == nullptr) throw std::runtime_error("SOURCE is not set: run this through meson test");
    return folder;
}

Folder::Folder() {
    std::string name = (fs::temp_directory_path() / "moe-plan-test-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make a folder like " + name);
    path_ = name;
}

Folder::~Folder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
}

void Folder::write(const std::string& name, const std::string& text) const {
    std::ofstream(file(name), std::ios::binary) << text;
}

std::string Folder::read(const std::string& name) const { return content(file(name)); }

bool Folder::holds(const std::string& name) const { return fs::exists(file(name)); }

int Folder::entries() const {
    return static_cast<int>(std::distance(fs::directory_iterator(path_), fs::directory_iterator()));
}

void check_line(const Outcome& outcome, int status, const std::string& words) {
    CAPTURE(outcome.err);
    CHECK(outcome.status == status);
    CHECK(outcome.out.empty());
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
    CHECK(outcome.err.rfind("moe-plan", 0) == 0);
    CHECK(outcome.err.find(words) != std::string::npos);
}

void check_width(const std::string& text, std::size_t columns) {
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) CHECK_MESSAGE(line.size() <= columns, line);
}

nlohmann::ordered_json document(const Outcome& outcome) {
    CAPTURE(outcome.err);
    REQUIRE(outcome.status == 0);
    return nlohmann::ordered_json::parse(outcome.out);
}

nlohmann::ordered_json page_data(const std::string& page) {
    const std::string mark = "id=\"data\">";
    const std::size_t at = page.find(mark);
    REQUIRE(at != std::string::npos);
    const std::size_t from = at + mark.size();
    return nlohmann::ordered_json::parse(page.substr(from, page.find("</script>", from) - from));
}

void write_dataset(const Folder& folder, const std::string& line) {
    std::string text;
    for (int i = 0; i < 600; ++i) text += line;
    folder.write("a.txt", text);
    REQUIRE(folder.run("moe-plan tokenize a.txt --out text").status == 0);
}

void write_plan(const Folder& folder, const std::string& fixed, const std::string& file) {
    REQUIRE(folder.run("moe-plan " + small_search + " " + fixed + " --out " + file).status == 0);
}

} // namespace moe::test
