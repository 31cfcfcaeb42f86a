// Reads CSV with exact places in its errors, and turns the cells of known columns into the fields of runs.
#include "simulator/published/runs.hpp"

#include "planner/base/error.hpp"
#include "planner/base/files.hpp"
#include "planner/base/names.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <functional>
#include <string_view>
#include <utility>

namespace moe::published {
namespace {

constexpr std::size_t most_columns = 1000;

struct Row {
    int line = 0;
    std::vector<std::string> cells;
};

// Splits text into rows of cells. Blank lines are skipped.
class CsvReader {
public:
    CsvReader(const std::string& text, const std::string& place) : text_(text), place_(place) {
        if (text_.rfind("\xEF\xBB\xBF", 0) == 0) at_ = 3; // byte order mark of spreadsheets
    }

    bool next(Row& row) {
        while (at_ < text_.size() && (text_[at_] == '\n' || text_[at_] == '\r')) skip_line_end();
        if (at_ >= text_.size()) return false;
        row.line = line_;
        row.cells.clear();
        for (;;) {
            if (row.cells.size() >= most_columns)
                refuse("{}:{}: more than {} cells in a row: is this a CSV file?", place_, row.line, most_columns);
            const std::size_t column = row.cells.size() + 1;
            row.cells.push_back(at_ < text_.size() && text_[at_] == '"' ? quoted(column) : plain(column));
            if (at_ >= text_.size()) return true;
            if (text_[at_] == ',') {
                ++at_;
                continue;
            }
            skip_line_end();
            return true;
        }
    }

private:
    void skip_line_end() {
        if (text_[at_] == '\r' && at_ + 1 < text_.size() && text_[at_ + 1] == '\n') ++at_;
        ++at_;
        ++line_;
    }
    std::string plain(std::size_t column) {
        const std::size_t end = std::min(text_.find_first_of(",\r\n", at_), text_.size());
        std::string cell = text_.substr(at_, end - at_);
        if (cell.find('"') != std::string::npos)
            refuse("{}:{}: column {}: a quote inside an unquoted cell: quote the whole cell and double the quote",
                   place_, line_, column);
        at_ = end;
        return cell;
    }
    std::string quoted(std::size_t column) {
        const int begin = line_;
        std::string cell;
        for (++at_; at_ < text_.size(); ++at_) {
            const char c = text_[at_];
            if (c == '"') {
                ++at_;
                if (at_ >= text_.size() || text_[at_] != '"') {
                    if (at_ < text_.size() && text_[at_] != ',' && text_[at_] != '\n' && text_[at_] != '\r')
                        refuse("{}:{}: column {}: text behind the closing quote: put a comma there", place_, line_,
                               column);
                    return cell;
                }
            } else if (c == '\n') {
                ++line_;
            }
            cell += c;
        }
        refuse("{}:{}: column {}: the quote that opens this cell is never closed", place_, begin, column);
    }

    const std::string& text_;
    const std::string& place_;
    std::size_t at_ = 0;
    int line_ = 1;
};

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && (text.front() == ' ' || text.front() == '\t')) text.remove_prefix(1);
    while (!text.empty() && (text.back() == ' ' || text.back() == '\t')) text.remove_suffix(1);
    return text;
}

// The place of a cell, for messages.
struct Cell {
    const std::string& place;
    int line;
    const char* column;
    std::string_view text;
};

[[noreturn]] void refuse_cell(const Cell& cell, const char* wanted) {
    refuse("{}:{}: column {}: '{}' is not {}", cell.place, cell.line, cell.column, shown(cell.text), wanted);
}

using Setter = std::function<void(Run&, const Cell&)>;

Setter text(std::string Run::*field) {
    return [field](Run& run, const Cell& cell) { run.*field = cell.text; };
}

// Spreadsheets write 4096 as 4096.0, which is accepted; zero and less are never a count here.
Setter count(std::optional<std::int64_t> Run::*field, std::int64_t low = 1) {
    return [field, low](Run& run, const Cell& cell) {
        std::string_view digits = cell.text;
        if (digits.size() > 2 && digits.substr(digits.size() - 2) == ".0") digits.remove_suffix(2);
        std::int64_t value = 0;
        const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
        if (error != std::errc{} || end != digits.data() + digits.size() || value < low || value > 1'000'000'000)
            refuse_cell(cell, low == 0 ? "a whole number from 0 to 1e9" : "a whole number from 1 to 1e9");
        run.*field = value;
    };
}

Setter rate(std::optional<double> Run::*field) {
    return [field](Run& run, const Cell& cell) {
        double value = 0.0;
        const auto [end, error] = std::from_chars(cell.text.data(), cell.text.data() + cell.text.size(), value);
        if (error != std::errc{} || end != cell.text.data() + cell.text.size() || !std::isfinite(value) ||
            !(value > 0.0) || value > 1e12)
            refuse_cell(cell, "a positive number up to 1e12");
        run.*field = value;
    };
}

Setter flag(std::optional<bool> Run::*field) {
    return [field](Run& run, const Cell& cell) {
        if (cell.text != "0" && cell.text != "1") refuse_cell(cell, "0, 1 or blank");
        run.*field = cell.text == "1";
    };
}

struct Column {
    const char* name;
    bool required;
    Setter set;
};

// Columns that are not required may be left out of a file: every cell of theirs counts as blank.
const std::vector<Column>& columns() {
    static const std::vector<Column> list{
        {"run_id", true, text(&Run::run_id)},
        {"source", true, text(&Run::source)},
        {"release", true, text(&Run::release)},
        {"model", true, text(&Run::model)},
        {"system", true, text(&Run::system)},
        {"gpus", true, count(&Run::gpus)},
        {"precision", true, text(&Run::precision)},
        {"gbs", true, count(&Run::gbs)},
        {"mbs", false, count(&Run::mbs)},
        {"seq_len", true, count(&Run::seq_len)},
        {"fsdp", false, flag(&Run::fsdp)},
        {"tp", true, count(&Run::tp)},
        {"pp", true, count(&Run::pp)},
        {"vpp", false, count(&Run::vpp)},
        {"cp", false, count(&Run::cp)},
        {"ep", false, count(&Run::ep)},
        {"etp", false, count(&Run::etp)},
        {"tflops_per_gpu", false, rate(&Run::tflops_per_gpu)},
        {"recompute_modules", false, text(&Run::recompute_modules)},
        {"offload_modules", false, text(&Run::offload_modules)},
        {"cuda_graph", false, text(&Run::cuda_graph)},
        {"dispatcher", false, text(&Run::dispatcher)},
        {"cp_comm", false, text(&Run::cp_comm)},
        {"ep_overlap", false, flag(&Run::ep_overlap)},
        {"pipeline_layout", false, text(&Run::pipeline_layout)},
        {"optimizer", false, text(&Run::optimizer)},
        {"mtp_layers", false, count(&Run::mtp_layers, 0)},
        {"moe_balance", false, text(&Run::moe_balance)},
        {"status", true, text(&Run::status)},
        {"tier", false, text(&Run::tier)},
        {"gflop_per_token_std", false, rate(&Run::gflop_per_token_std)},
        {"tflops_std", false, rate(&Run::tflops_std)},
        {"mapping_check", false, text(&Run::mapping_check)},
        {"other_settings", false, text(&Run::other_settings)},
    };
    return list;
}

// The position in the file of every known column, -1 when the file has none.
std::vector<int> positions(const Row& header, const std::string& place) {
    std::vector<std::string> names;
    for (const std::string& cell : header.cells) names.emplace_back(trimmed(cell));
    std::vector<int> result;
    for (const Column& column : columns()) {
        const auto found = std::find(names.begin(), names.end(), column.name);
        if (found != names.end() && std::find(found + 1, names.end(), column.name) != names.end())
            refuse("{}:{}: column {} appears twice", place, header.line, column.name);
        if (found == names.end() && column.required)
            refuse("{}:{}: column {} is missing: the first line must name the columns", place, header.line,
                   column.name);
        result.push_back(found == names.end() ? -1 : static_cast<int>(found - names.begin()));
    }
    return result;
}

} // namespace

std::vector<Run> runs_from_csv(const std::string& text, const std::string& place) {
    CsvReader reader(text, place);
    Row row;
    if (!reader.next(row)) refuse("{}: is empty: the first line must name the columns", place);
    const std::vector<int> where = positions(row, place);
    const std::size_t width = row.cells.size();
    std::vector<Run> runs;
    while (reader.next(row)) {
        if (row.cells.size() != width)
            refuse("{}:{}: {} cells, but the first line names {} columns", place, row.line, row.cells.size(), width);
        Run run;
        run.line = row.line;
        for (std::size_t i = 0; i < where.size(); ++i) {
            if (where[i] < 0) continue;
            const std::string_view cell = trimmed(row.cells[static_cast<std::size_t>(where[i])]);
            if (!cell.empty()) columns()[i].set(run, {place, row.line, columns()[i].name, cell});
        }
        runs.push_back(std::move(run));
    }
    return runs;
}

std::vector<Run> load_runs(const std::string& path) {
    namespace fs = std::filesystem;
    std::error_code error;
    std::vector<std::string> files{path};
    if (fs::is_directory(path, error)) {
        files.clear();
        for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error))
            if (entry->path().extension() == ".csv") files.push_back(entry->path().string());
        if (files.empty()) refuse("{}: holds no .csv file", path);
        std::sort(files.begin(), files.end());
    } else if (!fs::exists(path, error) && path.find('/') == std::string::npos) {
        const std::string named = profiles_folder() + "/runs/" + path + ".csv";
        if (fs::exists(named, error)) files = {named};
    }
    std::vector<Run> runs;
    for (const std::string& file : files) {
        std::vector<Run> some = runs_from_csv(read_file(file), file);
        runs.insert(runs.end(), std::make_move_iterator(some.begin()), std::make_move_iterator(some.end()));
    }
    return runs;
}

} // namespace moe::published
