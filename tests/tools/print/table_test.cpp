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
