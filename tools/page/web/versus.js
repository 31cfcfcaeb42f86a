// Two plans side by side: figures, the fields in which they differ, where time and memory go, both pipelines.
import { h, section } from "./dom.js";
import { figure, gib, seconds, signed } from "./units.js";
import { cards, planTitle } from "./plan.js";
import { pipeline } from "./pipeline.js";
import { table } from "./table.js";
import { term } from "./terms.js";

// The leaves of a plan by their paths, without what describes model and machine.
function leaves(value, path = "", into = new Map()) {
    if (["model", "hardware", "schema", "schema_version"].includes(path)) return into;
    if (value !== null && typeof value === "object" && !Array.isArray(value))
        for (const [key, inner] of Object.entries(value)) leaves(inner, path ? `${path}.${key}` : key, into);
    else into.set(path.replace(/^(mesh|workload)\./, ""), Array.isArray(value) ? value.join("+") || "none" : String(value));
    return into;
}

export function differences(here, there) {
    const a = leaves(here), b = leaves(there), rows = [];
    for (const what of ["model", "hardware"]) if (here[what].name !== there[what].name) rows.push({ field: what, here: here[what].name, there: there[what].name });
    for (const field of new Set([...a.keys(), ...b.keys()]))
        if (a.get(field) !== b.get(field)) rows.push({ field, here: a.get(field) ?? "none", there: b.get(field) ?? "none" });
    return rows;
}

// Both lists lined up by name; the widest difference first.
function joined(here, there, name, value) {
    const all = new Map(here.map((part) => [part[name], { name: part[name], here: part[value], there: 0 }]));
    for (const part of there) {
        if (!all.has(part[name])) all.set(part[name], { name: part[name], here: 0, there: 0 });
        all.get(part[name]).there = part[value];
    }
    return [...all.values()].sort((a, b) => Math.abs(b.there - b.here) - Math.abs(a.there - a.here));
}

function lined(caption, rows, text) {
    return table({
        caption, rows,
        columns: [
            { head: "part", left: true, show: (row) => term(row.name) },
            { head: "left", sort: (row) => row.here, show: (row) => text(row.here) },
            { head: "right", sort: (row) => row.there, show: (row) => text(row.there) },
            { head: "difference", sort: (row) => row.there - row.here, show: (row) => (row.there === row.here ? "same" : signed(row.there - row.here, text)) },
        ],
    });
}

export function versus(left, right) {
    const a = left.explain, b = right.explain, longest = Math.max(a.step_seconds, b.step_seconds);
    const side = (name, report) => h("div", null, h("h2", null, `${name}: ${planTitle(report.explain.plan)}`), cards(report), h("p", { class: "note" }, report.interval_text));
    return h("article", null,
        h("h1", { tabindex: "-1" }, "Two plans side by side"),
        h("p", { class: "note" }, `The right plan makes ${figure(b.tflops_per_gpu)} TFLOPS/GPU, the left ${figure(a.tflops_per_gpu)}: ${signed(100 * (b.tflops_per_gpu / a.tflops_per_gpu - 1), (value) => value.toFixed(1))} %.`),
        h("div", { class: "pair" }, side("Left", left), side("Right", right)),
        section("Fields that differ", null, table({
            caption: "fields that differ", rows: differences(a.plan, b.plan),
            columns: [{ head: "field", left: true, show: (row) => row.field }, { head: "left", left: true, show: (row) => row.here }, { head: "right", left: true, show: (row) => row.there }],
        })),
        h("div", { class: "pair" },
            section("Where the step goes", null, lined("where the step goes", joined(left.breakdown, right.breakdown, "part", "seconds"), seconds)),
            section("Memory of the fullest stage", "GiB by class.", lined("memory by class", joined(a.walls.memory.classes, b.walls.memory.classes, "class", "gib"), gib))),
        section("Both pipelines", "On one scale of time; left above, right below.", pipeline(left.pipeline, longest), pipeline(right.pipeline, longest)),
        section("Busy time by kind of operation", "Mean over ranks.", lined("busy time by kind", joined(left.kinds, right.kinds, "kind", "seconds"), seconds)));
}
