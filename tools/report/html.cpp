// Writes the HTML report: figures first, then the three walls, then what could be changed.
#include "tools/report/html.hpp"

#include "planner/lower/lower.hpp"
#include "planner/machine/hardware.hpp"
#include "planner/model/model.hpp"
#include "planner/program/program.hpp"
#include "tools/print/table.hpp"
#include "tools/report/front_svg.hpp"
#include "tools/report/memory_svg.hpp"
#include "tools/report/pipeline_svg.hpp"
#include "tools/report/style.hpp"
#include "tools/report/svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace moe::tools {

namespace {

struct Part {
    std::string name;
    double value = 0.0;
    std::string text; // the value as people read it
};

// A table of parts of a whole with a bar each, largest first; parts of nothing are left out.
std::string bars(std::vector<Part> parts, double whole) {
    std::stable_sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.value > b.value; });
    std::string out = "<table>\n";
    for (const Part& part : parts) {
        if (!(part.value > 0.0)) continue;
        const double share = whole > 0.0 ? part.value / whole : 0.0;
        out += fmt::format("<tr><th scope=\"row\">{}</th><td>{}</td><td>{}</td><td class=\"wide\"><span class=\"bar\" "
                           "style=\"width:{:.1f}%\"></span></td></tr>\n",
                           escape(part.name), part.text, percent_text(share), 100.0 * std::min(1.0, share));
    }
    return out + "</table>\n";
}

std::string section(const std::string& title, const std::string& note, const std::string& body) {
    if (body.empty()) return {};
    return fmt::format("<section><h2>{}</h2>{}\n{}</section>\n", title,
                       note.empty() ? std::string() : "<p class=\"note\">" + note + "</p>", body);
}

std::string head_row(const std::vector<const char*>& headings) {
    std::string out = "<tr>";
    for (const char* heading : headings) out += fmt::format("<th scope=\"col\">{}</th>", heading);
    return out + "</tr>\n";
}

std::string row(const std::string& name, const std::vector<std::string>& cells) {
    std::string out = fmt::format("<tr><th scope=\"row\">{}</th>", escape(name));
    for (const std::string& cell : cells) out += fmt::format("<td>{}</td>", cell);
    return out + "</tr>\n";
}

std::string headline(const Explanation& e) {
    const search::Estimate& estimate = e.simulation.estimate;
    std::string out = "<div class=\"cards\">";
    const auto card = [&out](const std::string& value, const std::string& what) {
        out += fmt::format("<div><b>{}</b><span>{}</span></div>", value, what);
    };
    card(fmt::format("{:.4g}", estimate.tflops_per_gpu), "TFLOPS/GPU");
    card(percent_text(e.walls.model_seconds / estimate.step_seconds),
         fmt::format("of {} peak (MFU)", machine::to_string(e.plan.precision)));
    card(seconds_text(estimate.step_seconds), "step");
    card(count_text(estimate.tokens_per_second_per_gpu), "tokens/s/GPU");
    card(fmt::format("{} of {}", gib_text(estimate.memory_bytes), gib_text(e.walls.memory_limit)),
         estimate.fits ? "GiB per GPU" : "GiB per GPU: does not fit");
    return out + "</div>\n<p class=\"note\">" + escape(interval_text(e.interval)) + "</p>\n";
}

std::string plan_section(const plan::Plan& p) {
    std::string out = "<p class=\"plan\">";
    const auto item = [&out](const char* name, const std::string& value) {
        out += fmt::format("<span>{} <b>{}</b></span> ", name, escape(value));
    };
    item("GBS", fmt::format("{}", p.gbs));
    item("tokens", fmt::format("{}", p.seq));
    // A field that stands at its default tells nothing.
    const plan::Plan plain;
    for (const std::string& field : plan::field_names())
        if (plan::field_text(p, field) != plan::field_text(plain, field))
            item(field.c_str(), plan::field_text(p, field));
    item("edp", fmt::format("{}", p.edp));
    item("stack", p.stack);
    return out + "</p>\n";
}

std::string breakdown_section(const Explanation& e) {
    std::vector<Part> parts;
    for (const auto& [name, value] : parts_of(e.simulation.estimate.breakdown))
        parts.push_back({name, value, seconds_text(value)});
    return section(
        "Where the step goes",
        fmt::format("On stage {}, which ends last; communication as far as nothing computes meanwhile.", e.walls.stage),
        bars(std::move(parts), e.simulation.estimate.step_seconds));
}

std::string losses_section(const Explanation& e) {
    std::vector<Part> parts;
    for (const auto& [name, seconds] : losses(e)) parts.push_back({name, seconds, seconds_text(seconds)});
    return section("What keeps it from peak",
                   "Time of that stage beyond what its operations take at the machine's peak.",
                   bars(std::move(parts), e.simulation.estimate.step_seconds));
}

std::string skew_section(const Explanation& e) {
    if (!routing::skewed(e.plan)) return {};
    std::string out = "<table>" + head_row({"over steps", "load", "step", "TFLOPS/GPU", "GiB"});
    for (const auto& [name, value] : {std::pair{"mean", &routing::Quantiles::mean},
                                      {"p50", &routing::Quantiles::p50},
                                      {"p99", &routing::Quantiles::p99}})
        out += row(name, {fmt::format("{:.2f}", e.skew.loads.time.*value), seconds_text(e.skew.step_seconds.*value),
                          fmt::format("{:.4g}", e.skew.tflops_per_gpu.*value), gib_text(e.skew.memory_bytes.*value)});
    std::string note =
        fmt::format("Routing {}; load: of the hottest ranks over the mean rank. Everything else on this page "
                    "is at the mean.",
                    escape(e.plan.routing));
    if (e.plan.capacity > 0.0)
        note += fmt::format(" {} of the steps exceed the capacity {} and are run again.",
                            percent_text(e.skew.loads.overflow), e.plan.capacity);
    out += "</table>\n";
    if (e.skew.replication)
        for (const std::string& line : replication_lines(*e.skew.replication)) out += "<p>" + escape(line) + "</p>\n";
    return section("Routing skew", note, out);
}

std::string communication_section(const Explanation& e) {
    if (e.walls.communication.empty()) return {};
    std::string out = "<table>" + head_row({"axis", "busy", "exposed", "hidden", "GB", "GB/s"});
    for (const replay::CommunicationWall& c : e.walls.communication)
        out += row(c.axis, {seconds_text(c.busy), seconds_text(c.exposed),
                            c.busy > 0.0 ? percent_text(std::max(0.0, 1.0 - c.exposed / c.busy)) : "",
                            fmt::format("{:.1f}", c.bytes / 1e9),
                            c.busy > 0.0 ? fmt::format("{:.4g}", c.bytes / c.busy / 1e9) : ""});
    return section("Communication", "One rank in one step; exposed: nothing computes meanwhile.", out + "</table>\n");
}

std::string compute_section(const Explanation& e) {
    std::string out = "<table>" + head_row({"class", "busy", "at peak", "of peak", "recompute", "ops"});
    for (const replay::ComputeWall& c : e.walls.compute)
        out += row(c.name,
                   {seconds_text(c.busy), seconds_text(c.ideal), c.busy > 0.0 ? percent_text(c.ideal / c.busy) : "",
                    c.repeated > 0.0 ? seconds_text(c.repeated) : "", count_text(static_cast<double>(c.ops))});
    std::string note = "At peak: FLOPs or bytes at the machine's rate, whichever takes longer.";
    if (e.walls.issue_seconds > 0.0) // on CPUs the host is the device
        note += fmt::format(" The host needs {} to issue {} operations; {} of the step waits for it.",
                            seconds_text(e.walls.issue_seconds), count_text(static_cast<double>(e.walls.launches)),
                            seconds_text(e.simulation.estimate.breakdown.host));
    return section("Compute and host", note, out + "</table>\n");
}

std::string kinds_section(const program::Timeline& timeline) {
    std::vector<Part> parts;
    for (const KindTotal& total : totals_by_kind(timeline))
        parts.push_back({program::to_string(total.kind), total.seconds, seconds_text(total.seconds)});
    return section("Busy time by kind of operation",
                   "Mean over ranks; streams overlap, so that shares may add up to more than 100 %.",
                   bars(std::move(parts), timeline.step_seconds));
}

std::string memory_section(const Explanation& e) {
    const replay::Walls& w = e.walls;
    const program::Timeline& timeline = e.simulation.timeline;
    const auto first = std::find(timeline.pipeline_rank.begin(), timeline.pipeline_rank.end(), w.fullest);
    const int rank = timeline.ranks[static_cast<std::size_t>(first - timeline.pipeline_rank.begin())];
    const memory::MemoryPlan& planned = e.simulation.memory[static_cast<std::size_t>(w.fullest)];
    const double rest = w.memory_bytes - static_cast<double>(planned.arena_bytes);
    constexpr int samples = 580; // two pixels each
    std::string body = memory_svg(
        memory::memory_over_time(lower::lower(e.simulation.planned, w.fullest), planned, timeline, rank, samples), rest,
        w.memory_bytes, w.memory_limit);
    std::vector<Part> parts;
    for (const auto& [name, bytes] : w.memory) parts.push_back({name, bytes, gib_text(bytes) + " GiB"});
    return section(fmt::format("Memory of stage {} over the step", w.fullest),
                   "The stage that holds most. Areas: in use at each moment; planned: what is reserved.",
                   body + bars(std::move(parts), w.memory_bytes));
}

std::string delta_row(const search::WhatIf& w, const search::Estimate& base, double widest) {
    const double share = widest > 0.0 ? 50.0 * std::abs(w.gain) / widest : 0.0;
    return fmt::format(
        "<tr{}><th scope=\"row\">{} {} \u2192 {}</th><td>{:.4g}</td><td>{:+.1f}%</td><td "
        "class=\"swing\"><span class=\"{}\" style=\"width:{:.1f}%\"></span></td><td>{}</td><td>{}</td><td>"
        "{}</td><td class=\"text\">{}</td></tr>\n",
        w.estimate.fits ? "" : " class=\"unfit\"", escape(w.change.field), escape(w.change.from), escape(w.change.to),
        w.estimate.tflops_per_gpu, 100.0 * w.gain, w.gain < 0.0 ? "loss" : "gain", share,
        seconds_text(w.estimate.step_seconds), gib_text(w.estimate.memory_bytes),
        signed_gib_text(w.estimate.memory_bytes - base.memory_bytes),
        w.along.empty() ? "" : escape(changes_text(w.along)));
}

std::string sensitivity_section(const Explanation& e) {
    double widest = 0.0;
    for (const search::WhatIf& w : e.deltas)
        if (w.impossible.empty()) widest = std::max(widest, std::abs(w.gain));
    std::string out =
        "<table>" + head_row({"change", "TFLOPS/GPU", "gain", "", "step", "GiB", "\u0394 GiB", "moves along"});
    for (const search::WhatIf& w : e.deltas)
        if (w.impossible.empty()) out += delta_row(w, e.base, widest);
    out += "</table>\n";
    std::string impossible;
    for (const search::WhatIf& w : e.deltas)
        if (!w.impossible.empty())
            impossible += fmt::format("<li>{} {} \u2192 {}: {}</li>\n", w.change.field, escape(w.change.from),
                                      escape(w.change.to), escape(w.impossible));
    if (!impossible.empty()) out += "<p class=\"note\">Not possible:</p><ul>" + impossible + "</ul>\n";
    return section("What each single change would do",
                   fmt::format("By the fast estimate, which gives {:.4g} TFLOPS/GPU and {} GiB for this plan. Struck "
                               "out: does not fit.",
                               e.base.tflops_per_gpu, gib_text(e.base.memory_bytes)),
                   out);
}

} // namespace

std::string html_report(const Explanation& e) {
    const std::string title =
        escape(fmt::format("{} on {} \u00d7 {}", e.plan.model->name, e.plan.gpus, e.plan.hardware->name));
    std::string page =
        fmt::format("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta "
                    "name=\"viewport\" content=\"width=device-width\"><title>{0}</title><style>{1}</style>"
                    "</head><body>\n<h1>{0}</h1>\n",
                    title, style);
    page += plan_section(e.plan) + headline(e);
    page += "<div class=\"pair\">" + breakdown_section(e) + losses_section(e) + "</div>\n";
    page += skew_section(e);
    page +=
        section("One pipeline",
                "Blue: forward, green: backward, orange: gradients and optimizer; shades are chunks. A box holds the "
                "slot from its first operation to its last.",
                pipeline_svg(e.simulation.timeline));
    page += memory_section(e);
    page += section("Memory against throughput, same mapping",
                    "Each point is beaten by no other in both; red: does not fit.",
                    front_svg(e.front, e.base, e.walls.memory_limit));
    page += sensitivity_section(e);
    page += "<div class=\"pair\">" + communication_section(e) + compute_section(e) + "</div>\n";
    page += kinds_section(e.simulation.timeline);
    return page + "</body></html>\n";
}

} // namespace moe::tools
