// CSV files of published runs: cells as written, places in errors, and the shipped files as a whole.
#include "planner/base/files.hpp"
#include "simulator/published/runs.hpp"
#include "tests/planner/base/fault_of.hpp"
#include "tests/support/nearly.hpp"

#include <doctest/doctest.h>
#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <string>

namespace {

const std::string header = "run_id,source,release,model,system,gpus,precision,gbs,seq_len,tp,pp,status";
const std::string row = "a,Paper,1.0,Mixtral-8x7B,H100,8,BF16,64,4096,1,1,current";

std::string fault(const std::string& text) {
    return fault_of([&] { moe::published::runs_from_csv(text, "r.csv"); });
}

// The row with one cell replaced.
std::string with(const std::string& column, const std::string& cell) {
    std::string names = header, cells = row, result;
    for (;;) {
        const std::size_t n = std::min(names.find(','), names.size()), c = std::min(cells.find(','), cells.size());
        result += names.substr(0, n) == column ? cell : cells.substr(0, c);
        if (n == names.size()) return fmt::format("{}\n{}\n", header, result);
        result += ',';
        names.erase(0, n + 1);
        cells.erase(0, c + 1);
    }
}

} // namespace

TEST_CASE("cells are read as written, whatever the order of columns and the end of lines") {
    const auto runs = moe::published::runs_from_csv(header + "\n" + row + "\n", "r.csv");
    REQUIRE(runs.size() == 1);
    CHECK(runs[0].line == 2);
    CHECK(runs[0].model == "Mixtral-8x7B");
    CHECK(runs[0].gpus == 8);
    CHECK(runs[0].seq_len == 4096);
    CHECK_FALSE(runs[0].mbs.has_value());
    CHECK_FALSE(runs[0].tflops_std.has_value());

    const auto turned =
        moe::published::runs_from_csv("\xEF\xBB\xBFtflops_std,extra,ep_overlap,mtp_layers," + header +
                                          "\r\n\r\n12.5,\"x, \"\"y\"\"\n z\",1,0," + row + "\r\n1e3,,0,2," + row,
                                      "r.csv");
    REQUIRE(turned.size() == 2);
    CHECK(turned[0].line == 3);
    CHECK(turned[0].tflops_std == nearly(12.5));
    CHECK(turned[0].ep_overlap == true);
    CHECK(turned[0].mtp_layers == 0);
    CHECK(turned[1].line == 5); // the quoted cell above holds a line feed
    CHECK(turned[1].ep_overlap == false);
    CHECK(turned[1].tflops_std == nearly(1000.0));
}

TEST_CASE("quoted cells keep commas, quotes and line feeds") {
    const auto runs = moe::published::runs_from_csv(with("source", "\"Docs, \"\"Table\"\"\n1\""), "r.csv");
    CHECK(runs.at(0).source == "Docs, \"Table\"\n1");
    CHECK(runs.at(0).status == "current");
}

TEST_CASE("spreadsheet numbers and surrounding blanks are understood") {
    CHECK(moe::published::runs_from_csv(with("gbs", " 4096.0 "), "r.csv").at(0).gbs == 4096);
    CHECK_FALSE(moe::published::runs_from_csv(with("gbs", ""), "r.csv").at(0).gbs.has_value());
}

TEST_CASE("bad files are refused with their line and column") {
    CHECK(fault("") == "2: r.csv: is empty: the first line must name the columns");
    CHECK(fault("\n\n").find("is empty") != std::string::npos);
    CHECK(fault("run_id,model\na,b\n").find("r.csv:1: column source is missing") != std::string::npos);
    CHECK(fault(header + ",gbs\n").find("column gbs appears twice") != std::string::npos);
    CHECK(fault(header + "\n" + row + ",x\n") == "2: r.csv:2: 13 cells, but the first line names 12 columns");
    CHECK(fault(header + "\n" + row + "\nshort\n") == "2: r.csv:3: 1 cells, but the first line names 12 columns");
    CHECK(fault(header + "\n\"a") == "2: r.csv:2: column 1: the quote that opens this cell is never closed");
    CHECK(fault(header + "\na,\"b\"c\n").find("r.csv:2: column 2: text behind the closing quote") != std::string::npos);
    CHECK(fault(header + "\na,b\"c\n").find("r.csv:2: column 2: a quote inside") != std::string::npos);
    CHECK(fault(header + "\n" + std::string(100000, ',')).find("more than 1000 cells") != std::string::npos);
}

TEST_CASE("values that are no counts, rates or flags are refused") {
    for (const char* bad : {"0", "-8", "1.5", "8x", "1e3", "99999999999999999999", "nan", "1000000001", "0x10"}) {
        CAPTURE(bad);
        CHECK(fault(with("gpus", bad)).find("2: r.csv:2: column gpus: '") == 0);
    }
    for (const char* bad : {"0", "-1", "inf", "nan", "1e400", "12,5", "fast"}) {
        CAPTURE(bad);
        const std::string text = fmt::format("{},tflops_std\n{},\"{}\"\n", header, row, bad);
        CHECK(fault(text).find("2: r.csv:2: column tflops_std: '") == 0);
    }
    CHECK(fault(header + ",fsdp\n" + row + ",yes\n") == "2: r.csv:2: column fsdp: 'yes' is not 0, 1 or blank");
    CHECK(fault(header + ",mtp_layers\n" + row + ",-1\n").find("column mtp_layers") != std::string::npos);
}

TEST_CASE("a message stays one line whatever the cell holds") {
    const std::string text = fault(with("gpus", "\"1\n2\t" + std::string(5000, 'z') + "\""));
    CHECK(text.find('\n') == std::string::npos);
    CHECK(text.size() < 300);
}

TEST_CASE("the shipped runs are complete: sources, releases and distinct names") {
    const auto runs = moe::published::load_runs(moe::profiles_folder() + "/runs");
    CHECK(runs.size() == 587);
    std::set<std::string> ids;
    int current = 0;
    for (const moe::published::Run& run : runs) {
        CAPTURE(run.run_id);
        ids.insert(run.run_id);
        CHECK_FALSE(run.source.empty());
        CHECK_FALSE(run.release.empty());
        CHECK_FALSE(run.model.empty());
        current += run.status == "current" ? 1 : 0;
    }
    CHECK(ids.size() == runs.size());
    CHECK(current == 506);
    CHECK(moe::published::load_runs("torchtitan").size() == 35); // by its name in profiles/runs
    CHECK(fault_of([] { moe::published::load_runs("no-such-runs"); }).find("2: ") == 0);
}
