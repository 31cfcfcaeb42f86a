// Text tables and number formats.
#include "tools/print/table.hpp"

#include <doctest/doctest.h>

using namespace moe::tools;

TEST_CASE("tables align their columns") {
    Table table({"<name", "count"});
    table.add({"a", "1"});
    table.add({"longer", "1,000"});
    CHECK(table.text() == "name    count\na           1\nlonger  1,000");
    CHECK(table.text(2) == "  name    count\n  a           1\n  longer  1,000");
    Table ragged({"<x", "<y"});
    ragged.add({"only one"});
    CHECK(ragged.text() == "x         y\nonly one");
}

TEST_CASE("a table that is too wide leaves out columns of the highest rank first, and names them") {
    Table table({"<name", {"first", 2}, {"second", 1}, {"third", 2}, "kept"});
    table.add({"row", "11", "22", "33", "44"});
    CHECK(table.fitted(34).text == "name  first  second  third  kept\nrow      11      22     33    44");
    CHECK(table.fitted(34).dropped.empty());
    const Table::Fitted narrow = table.fitted(31);
    CHECK(narrow.text == "name  first  second  kept\nrow      11      22    44");
    CHECK(narrow.dropped == std::vector<std::string>{"third"});
    CHECK(table.fitted(10).text == "name  kept\nrow     44");
    CHECK(table.fitted(10).dropped == std::vector<std::string>{"third", "first", "second"});
    CHECK(table.fitted(1).text == table.fitted(10).text); // what has no rank stays, whatever the width
}

TEST_CASE("a table wraps its widest text before it leaves out figures") {
    Table table({"<reason", {"count", 1}, "more"});
    table.add({"one two three four five six seven eight nine ten", "7", "8"});
    const Table::Fitted fitted = table.fitted(45);
    CHECK(fitted.dropped.empty());
    const std::string gap(26, ' ');
    CHECK(fitted.text == "reason" + gap +
                             "  count  more\none two three four five six           7     8\n"
                             "seven eight nine ten");
    CHECK(table.fitted(40).dropped == std::vector<std::string>{"count"}); // cells of 32 characters can still be read
    CHECK(wrapped("", 5) == std::vector<std::string>{""});
    CHECK(wrapped("abcdefgh ij", 5) == std::vector<std::string>{"abcde", "fgh", "ij"});
    CHECK(wrapped("abc+de+fgh", 7) == std::vector<std::string>{"abc+de+", "fgh"});
    CHECK(wrapped("ab  cd", 4) == std::vector<std::string>{"ab ", "cd"});
}

TEST_CASE("numbers as people read them") {
    CHECK(count_text(0) == "0");
    CHECK(count_text(999) == "999");
    CHECK(count_text(1000) == "1,000");
    CHECK(count_text(1234567.4) == "1,234,567");
    CHECK(count_text(-1234) == "-1,234");
    CHECK(seconds_text(12.3456) == "12.346 s");
    CHECK(seconds_text(0.012346) == "12.35 ms");
    CHECK(seconds_text(0.0000123) == "12.30 us");
    CHECK(percent_text(0.1234) == "12.3%");
    CHECK(gib(1073741824.0) == 1.0);
}
