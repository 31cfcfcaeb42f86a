// Runs the built command as a user would, in a folder of its own, and holds its output and exit status.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include <string>

namespace moe::test {

struct Outcome {
    int status = -1; // exit status; 128 + signal when a signal ended it
    std::string out, err;
};
// A shell command line in which "moe-plan" names the built command ($MOE_PLAN). Redirections work as in a shell.
Outcome shell(const std::string& folder, const std::string& command);
// Runs it on a terminal of so many columns, which takes stdout and stderr alike: both are in `out`.
Outcome on_terminal(const std::string& folder, const std::string& command, int columns);
// The source folder ($SOURCE).
std::string source_folder();

// A fresh folder that goes away with the object.
class Folder {
public:
    Folder();
    ~Folder();
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;
    const std::string& path() const { return path_; }
    std::string file(const std::string& name) const { return path_ + "/" + name; }
    void write(const std::string& name, const std::string& content) const;
    std::string read(const std::string& name) const;
    bool holds(const std::string& name) const;
    int entries() const;
    Outcome run(const std::string& command) const { return shell(path_, command); }

private:
    std::string path_;
};

// Checks that the command refused or failed as promised: the status, ONE line on stderr that contains `words`, nothing
// on stdout.
void check_line(const Outcome& outcome, int status, const std::string& words);
// Checks that every line has at most so many characters.
void check_width(const std::string& text, std::size_t columns);
// Checks success and parses stdout as one JSON document.
nlohmann::ordered_json document(const Outcome& outcome);

// The document inside a page that a verb wrote.
nlohmann::ordered_json page_data(const std::string& page);

// Writes the line 600 times and tokenizes it to bytes: the dataset "text".
void write_dataset(const Folder& folder, const std::string& line);
// Searches the small model with the fields of `fixed` ("--fix tp=2 ...") and keeps its best plan in `file`.
void write_plan(const Folder& folder, const std::string& fixed, const std::string& file);

// Options of a search that ends at once: the small MoE on 8 CPU ranks.
inline const std::string small_search =
    "search --model tiny-qwen3-moe --hardware cpu-local --gpus 8 --gbs 8 --seq 64 --precision fp32";

// Options of a search of a published model on 16 GPUs, every degree 1 but those of experts and pipeline.
inline const std::string gpu_search =
    "search --model Qwen3-30B-A3B --hardware h100 --gpus 16 --gbs 64 --seq 4096 --fix vpp=1 --fix tp=1 --fix cp=1 "
    "--fix etp=1 ";

// The first line of a CSV file of runs that states a mapping and no recipe.
inline const std::string runs_header = "run_id,source,release,model,system,gpus,precision,gbs,mbs,seq_len,tp,pp,ep,"
                                       "status,tier,tflops_std\n";

} // namespace moe::test
