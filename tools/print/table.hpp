// Tables of plain text, and numbers in the units that people read.
#pragma once

#include <string>
#include <vector>

namespace moe::tools {

class Table {
public:
    // A heading that begins with '<' is left-aligned (the sign is not printed); the others are right-aligned.
    explicit Table(std::vector<std::string> headings);
    void add(std::vector<std::string> cells); // as many as there are headings
    // All lines with the last one's line feed omitted; `indent` blanks before each.
    std::string text(int indent = 0) const;

private:
    std::vector<bool> left_;
    std::vector<std::vector<std::string>> rows_; // the headings are the first
};

double gib(double bytes);                  // bytes -> GiB
std::string gib_text(double bytes);        // "180.8", and "0.019" below 1 GiB
std::string signed_gib_text(double bytes); // "+180.8", "-0.019"
std::string seconds_text(double seconds);  // "1.234 s", "56.78 ms", "9.012 us"
std::string count_text(double count);      // "1,234,567"; rounded to a whole number
std::string percent_text(double fraction); // "12.3%"

} // namespace moe::tools
