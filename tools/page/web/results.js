// The plans that a search found: intervals, plans that cannot be told apart, nearest published runs.
import { h, section } from "./dom.js";
import { count, figure, gib, seconds } from "./units.js";
import { table } from "./table.js";
import { term } from "./terms.js";

const degrees = ["tp", "cp", "dp", "pp", "vpp", "ep", "etp"];

function words(value) {
    return Array.isArray(value) ? value.join("+") || "none" : value;
}

function nearest(plans) {
    const rows = plans.flatMap((plan, at) => plan.nearest_published.map((run) => ({ ...run, plan: at + 1 })));
    if (!rows.length) return null;
    return section("Nearest published runs", "What was measured with plans like these, and what is predicted for those.", table({
        caption: "nearest published runs", rows, filter: true,
        columns: [
            { head: "plan", sort: (row) => row.plan, show: (row) => String(row.plan) },
            { head: "run", left: true, sort: (row) => row.run_id, show: (row) => row.run_id },
            { head: "measured", sort: (row) => row.measured, show: (row) => figure(row.measured) },
            { head: "predicted", sort: (row) => row.predicted, show: (row) => figure(row.predicted) },
            { head: "differs in", left: true, show: (row) => row.differs_in.join(", ") || "nothing" },
        ],
    }));
}

// open(plan): shows one of them.
export function results(found, open) {
    const rows = found.plans.map((plan, at) => ({ ...plan, at: at + 1 }));
    const number = (head, value, show) => ({ head, sort: value, show });
    const columns = [
        { head: "plan", sort: (row) => row.at, show: (row) => h("button", { type: "button", class: "open", "aria-label": `open plan ${row.at}`, click: () => open(row.plan) }, `${row.at}${row.equal_to_first && row.at > 1 ? " =" : ""}`) },
        number("TFLOPS/GPU", (row) => row.tflops_per_gpu, (row) => figure(row.tflops_per_gpu)),
        number("interval", (row) => row.interval?.[0] ?? 0, (row) => (row.interval ? `${figure(row.interval[0])} – ${figure(row.interval[1])}` : "unknown")),
        number("step", (row) => row.step_seconds, (row) => seconds(row.step_seconds)),
        number("GiB", (row) => row.memory_gib, (row) => gib(row.memory_gib)),
        ...(rows.some((row) => row.plan.mesh.gpus !== rows[0].plan.mesh.gpus) ? [number("GPUs", (row) => row.plan.mesh.gpus, (row) => String(row.plan.mesh.gpus))] : []),
        ...degrees.map((degree) => number(degree.toUpperCase(), (row) => row.plan.mesh[degree], (row) => String(row.plan.mesh[degree]))),
        number("MBS", (row) => row.plan.mbs, (row) => String(row.plan.mbs)),
        ...["precision", "recompute", "offload", "dispatcher", "cuda_graph"].map((name) => ({ head: name, left: true, sort: (row) => words(row.plan[name]), show: (row) => words(row.plan[name]) })),
    ];
    const equal = rows.filter((row) => row.equal_to_first && row.at > 1).map((row) => row.at);
    const differently = rows.flatMap((row) => row.trains_differently.map((line) => h("li", null, `Plan ${row.at} trains differently: ${line}`)));
    const excluded = Object.entries(found.pruned).sort((a, b) => b[1] - a[1]);
    return h("div", null,
        section("Plans", `${count(found.evaluated)} plans evaluated in ${seconds(found.seconds)}; each row is the best of its degrees. Open one by its number.`,
            table({ caption: "plans", columns, rows, filter: true, classes: (row) => (row.equal_to_first ? "equal" : null) }),
            equal.length > 0 && h("p", null, "= ", term("cannot be told from plan 1", "equal"), `: plans ${equal.join(", ")}.`),
            differently.length > 0 && h("ul", { class: "note" }, differently),
            h("details", null, h("summary", null, "What was excluded"), h("ul", null, excluded.map(([reason, plans]) => h("li", null, `${reason}: ${count(plans)}`))))),
        nearest(found.plans));
}
