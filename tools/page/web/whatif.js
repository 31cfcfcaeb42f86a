// What each single change of a plan would do; where a server can be asked, a click makes it the plan.
import { h } from "./dom.js";
import { figure, gib, percent, seconds, signed } from "./units.js";
import { changesText } from "./front.js";
import { table } from "./table.js";

export function whatIfs(explained, choose) {
    const widest = Math.max(1e-9, ...explained.deltas.map((delta) => Math.abs(delta.gain)));
    const columns = [
        { head: "change", left: true, sort: (row) => row.field, show: (row) => changesText([row]) },
        { head: "TFLOPS/GPU", sort: (row) => row.tflops_per_gpu, show: (row) => figure(row.tflops_per_gpu) },
        { head: "gain", sort: (row) => row.gain, show: (row) => signed(row.gain, percent) },
        { head: "", show: (row) => h("span", { class: "swing" }, h("span", { class: row.gain < 0 ? "loss" : "gain", style: { width: `${(50 * Math.abs(row.gain)) / widest}%` } })) },
        { head: "sure", sort: (row) => row.certainty ?? 0, show: (row) => (row.certainty === null ? "" : `${Math.round(100 * row.certainty)} %`) },
        { head: "step", sort: (row) => row.step_seconds, show: (row) => seconds(row.step_seconds) },
        { head: "GiB", sort: (row) => row.memory_gib, show: (row) => gib(row.memory_gib) + (row.fits ? "" : " (too much)") },
        { head: "more GiB", sort: (row) => row.memory_gib_delta, show: (row) => signed(row.memory_gib_delta, gib) },
        { head: "moves along", left: true, show: (row) => (row.along.length ? changesText(row.along) : "") },
    ];
    if (choose)
        columns.push({ head: "take it", left: true, show: (row) => h("button", { type: "button", class: "take", "aria-label": `make it the plan: ${changesText([row])}`, click: () => choose([row, ...row.along]) }, "make it the plan") });
    return h("div", null,
        table({ caption: "what each single change would do", columns, rows: explained.deltas, filter: true, classes: (row) => !row.fits && "unfit" }),
        explained.impossible.length > 0 && h("details", null, h("summary", null, `${explained.impossible.length} changes are not possible`),
            h("ul", null, explained.impossible.map((one) => h("li", null, `${changesText([one])}: ${one.reason}`)))));
}
