// Tables of plain text, and numbers in the units that people read.
#pragma once

#include <string>
#include <vector>

namespace moe::tools {

// A column of a table. A heading that begins with '<' is left-aligned (the sign is not printed), and its cells may be
// wrapped; the others are right-aligned. Where a table is too wide, the column of the highest `rank` is left out first,
// of equal ones the one further right; rank 0 always stays.
struct Column {
    Column(const char* heading_text, int drop_rank = 0) : Column(std::string(heading_text), drop_rank) {}
    Column(std::string heading_text, int drop_rank = 0);
    std::string heading;
    bool left = false;
    int rank = 0;
};

class Table {
public:
    explicit Table(std::vector<Column> columns);
    void add(std::vector<std::string> cells); // cells: as many as there are columns
    // All lines with the last one's line feed omitted; `indent` blanks before each.
    std::string text(int indent = 0) const;

    struct Fitted {
        std::string text;
        std::vector<std::string> dropped; // headings of the columns that are left out
    };
    // The table in `width` characters a line: leaves out columns by rank, then wraps the widest left-aligned cells.
    Fitted fitted(int width, int indent = 0) const;

private:
    std::size_t width_of(std::size_t column) const;
    std::vector<Column> columns_;
    std::vector<std::vector<std::string>> rows_; // rows, of which the first holds the headings
};

// The text in lines of at most `width` characters, broken at blanks, else behind one of + , | /, else anywhere.
std::vector<std::string> wrapped(const std::string& text, std::size_t width);

double gib(double bytes);                  // bytes in GiB
std::string gib_text(double bytes);        // "180.8", and "0.019" below 1 GiB
std::string signed_gib_text(double bytes); // "+180.8", "-0.019"
std::string seconds_text(double seconds);  // "1.234 s", "56.78 ms", "9.012 us"
std::string count_text(double count);      // "1,234,567"; rounded to a whole number
std::string percent_text(double fraction); // "12.3%"
// Predicted by measured, "0.98"; "-" where nothing was measured.
std::string ratio_text(double predicted, double measured);

} // namespace moe::tools
