// Writes the HTML report: headline figures, where the step goes, the pipeline's timeline, op kinds, memory.
#include "tools/report/html.hpp"

#include "tools/comparison.hpp"
#include "tools/report/pipeline_svg.hpp"
#include "tools/table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace moe::tools {

namespace {

constexpr const char* style =
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}"
    "h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}table{border-collapse:collapse}"
    "td,th{padding:.15em .9em;text-align:right;border-bottom:1px solid #eee}td:first-child,th:first-child{text-align:"
    "left}.bar{display:inline-block;height:.8em;background:#3b82c4;vertical-align:middle}"
    "svg{width:100%;font:11px system-ui,sans-serif}.big{font-size:1.3em}";

std::string escape(const std::string& text) {
    std::string out;
    for (const char c : text) switch (c) {
        case '&':
            out += "&amp;";
            break;
        case '<':
            out += "&lt;";
            break;
        case '>':
            out += "&gt;";
            break;
        case '"':
            out += "&quot;";
            break;
        default:
            out += c;
        }
    return out;
}

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
        out += fmt::format("<tr><td>{}</td><td>{}</td><td>{}</td><td style=\"text-align:left\"><span class=\"bar\" "
                           "style=\"width:{:.0f}px\"></span></td></tr>\n",
                           escape(part.name), part.text, percent_text(share), 420.0 * std::min(1.0, share));
    }
    return out + "</table>\n";
}

std::string breakdown_section(const Estimate& e) {
    const Breakdown& b = e.breakdown;
    std::vector<Part> parts;
    for (const auto& [name, value] :
         std::vector<std::pair<const char*, double>>{{"compute", b.compute},
                                                     {"recompute", b.recompute},
                                                     {"tensor-parallel communication, exposed", b.tensor},
                                                     {"context-parallel communication, exposed", b.context},
                                                     {"expert-parallel communication, exposed", b.expert},
                                                     {"pipeline communication, exposed", b.pipeline},
                                                     {"pipeline bubble", b.bubble},
                                                     {"data-parallel communication, exposed", b.data},
                                                     {"optimizer", b.optimizer},
                                                     {"host", b.host}})
        parts.push_back({name, value, seconds_text(value)});
    return "<h2>Where the step goes (slowest stage)</h2>\n" + bars(std::move(parts), e.step_seconds);
}

std::string kinds_section(const Timeline& timeline) {
    std::vector<Part> parts;
    for (const KindTotal& total : totals_by_kind(timeline))
        parts.push_back({to_string(total.kind), total.seconds, seconds_text(total.seconds)});
    return "<h2>Busy time by op kind (mean over ranks; streams overlap, so shares may add up to more than 1)</h2>\n" +
           bars(std::move(parts), timeline.step_seconds);
}

std::string memory_section(const Plan& plan, const Estimate& estimate, const MemoryPlan& memory, int rank) {
    std::vector<Part> parts;
    double planned = 0.0;
    for (int i = 0; i < memory_class_count; ++i) {
        const auto bytes = static_cast<double>(memory.class_bytes[static_cast<std::size_t>(i)]);
        parts.push_back({to_string(static_cast<MemoryClass>(i)), bytes, fmt::format("{:.3f} GiB", gib(bytes))});
        planned += bytes;
    }
    const double rest = estimate.memory_bytes - planned;
    parts.push_back({"context, communicators, alignment", rest, fmt::format("{:.3f} GiB", gib(rest))});
    return fmt::format("<h2>Memory of stage {} (holds most): {:.2f} of {:.2f} GiB</h2>\n", rank,
                       gib(estimate.memory_bytes), gib(plan.hardware->memory_bytes)) +
           bars(std::move(parts), estimate.memory_bytes);
}

std::string plan_line(const Plan& p) {
    return fmt::format("TP {} &middot; CP {} &middot; DP {} &middot; PP {} &middot; VPP {} &middot; EP {} &middot; ETP "
                       "{} &middot; MBS {} &middot; GBS {} &middot; {} tokens &middot; {} &middot; {} &middot; "
                       "recompute {} &middot; dispatcher {} &middot; CUDA graphs {} &middot; stack {}",
                       p.tp, p.cp, p.dp, p.pp, p.vpp, p.ep, p.etp, p.mbs, p.gbs, p.seq, to_string(p.precision),
                       to_string(p.schedule), recompute::to_string(p.recompute), to_string(p.dispatcher),
                       to_string(p.cuda_graph), escape(p.stack));
}

} // namespace

std::string html_report(const Plan& plan, const Estimate& estimate, const Timeline& timeline, const MemoryPlan& memory,
                        int memory_rank) {
    const std::string title = escape(fmt::format("{} on {} x {}", plan.model->name, plan.gpus, plan.hardware->name));
    std::string page = fmt::format("<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{0}</title>"
                                   "<style>{1}</style></head><body>\n<h1>{0}</h1>\n<p>{2}</p>\n",
                                   title, style, plan_line(plan));
    page += fmt::format("<p class=\"big\"><b>{:.4g}</b> TFLOPS/GPU &middot; <b>{}</b> tokens/s/GPU &middot; step "
                        "<b>{}</b> &middot; <b>{:.2f}</b> GiB</p>\n",
                        estimate.tflops_per_gpu, count_text(estimate.tokens_per_second_per_gpu),
                        seconds_text(estimate.step_seconds), gib(estimate.memory_bytes));
    page += breakdown_section(estimate);
    page += "<h2>One pipeline (blue: forward, green: backward, orange: gradients and optimizer; shades: chunks)</h2>\n";
    page += pipeline_svg(timeline);
    page += kinds_section(timeline);
    page += memory_section(plan, estimate, memory, memory_rank);
    return page + "</body></html>\n";
}

} // namespace moe::tools
