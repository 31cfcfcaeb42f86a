// Memory against throughput: the plans of one mapping that none beats in both.
import { h, colour, onWidth } from "./dom.js";
import { figure, gib, seconds } from "./units.js";
import { axis } from "./memory.js";
import { table } from "./table.js";

export function changesText(changes) {
    return changes.length ? changes.map((change) => `${change.field} ${change.from} → ${change.to}`).join(", ") : "this plan";
}

// points: explain's front; choose(changes): makes a point the plan, none where nothing can be asked.
export function front(points, limit, choose) {
    const sorted = [...points].sort((a, b) => a.memory_gib - b.memory_gib);
    const frame = h("div", { class: "chart" });
    let plot = null;
    if (sorted.length > 1)
        onWidth(frame, (width) => {
            plot?.destroy();
            const memory = sorted.map((point) => point.memory_gib), rates = sorted.map((point) => point.tflops_per_gpu);
            const dots = { show: true, size: 9, stroke: colour("bar"), fill: colour("bar") };
            const pad = (low, high) => { const room = 0.08 * (high - low || high); return [low - room, high + room]; };
            plot = new uPlot({
                width, height: 260, legend: { show: false },
                scales: { x: { time: false, range: (_, low, high) => pad(low, high) }, y: { range: (_, low, high) => pad(low, high) } },
                axes: [axis({ values: (_, list) => list.map((value) => `${Number(value.toPrecision(4))} GiB`) }), axis({ size: 70, values: (_, list) => list.map(figure), label: "TFLOPS/GPU", labelSize: 18, labelFont: "12px system-ui, sans-serif" })],
                series: [{}, { label: "TFLOPS/GPU", stroke: colour("soft"), dash: [3, 3], points: dots, paths: uPlot.paths.stepped({ align: 1 }) }],
                cursor: { drag: { x: true, y: false } },
            }, [memory, rates], frame);
            plot.root.setAttribute("role", "img");
            plot.root.setAttribute("aria-label", "memory against throughput; the table below has the figures");
        });
    const columns = [
        { head: "GiB", sort: (point) => point.memory_gib, show: (point) => gib(point.memory_gib) + (point.memory_gib > limit ? " (too much)" : "") },
        { head: "TFLOPS/GPU", sort: (point) => point.tflops_per_gpu, show: (point) => figure(point.tflops_per_gpu) },
        { head: "step", sort: (point) => point.step_seconds, show: (point) => seconds(point.step_seconds) },
        { head: "changes", left: true, show: (point) => changesText(point.changes) },
    ];
    if (choose)
        columns.push({ head: "take it", left: true, show: (point) => point.changes.length > 0 && h("button", { type: "button", class: "take", click: () => choose(point.changes) }, "make it the plan") });
    return h("div", null, sorted.length > 1 && frame, table({ caption: "plans of the same mapping", columns, rows: sorted }));
}
