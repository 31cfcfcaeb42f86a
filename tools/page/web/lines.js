// Figures over the steps of a run: lines with zoom, and a legend that switches them and reads them out.
import { h, colour, onWidth } from "./dom.js";
import { axis } from "./memory.js";
import { term } from "./terms.js";

// xs: numbers of steps. series: [{name, values: with null for gaps, text(value), colour: of the style sheet, dash, points}].
// label: what the chart is of; unit: of the axis.
export function lines({ xs, series, label, unit = "" }) {
    const visible = new Set(series);
    const frame = h("div", { class: "chart" }), moment = h("caption");
    let plot = null;
    const last = xs.length - 1;
    const rows = series.map((one, at) => {
        const cell = h("td");
        const press = (event) => {
            visible.has(one) ? visible.delete(one) : visible.add(one);
            event.currentTarget.setAttribute("aria-pressed", String(visible.has(one)));
            plot?.setSeries(at + 1, { show: visible.has(one) });
            read(null);
        };
        const name = h("th", { scope: "row" }, h("button", { type: "button", class: "switch", "aria-pressed": "true", click: press },
            h("i", { class: "swatch c-" + one.colour }), one.name));
        return { one, cell, row: h("tr", null, name, cell) };
    });
    // A series with gaps, such as one of evaluations, is read where it was last known.
    const known = (values, at) => {
        while (at >= 0 && (values[at] === null || values[at] === undefined)) --at;
        return at < 0 ? null : values[at];
    };
    const read = (at) => {
        const index = at ?? last;
        for (const { one, cell } of rows) {
            const value = known(one.values, index);
            cell.textContent = !visible.has(one) ? "off" : value === null ? "none" : one.text(value);
        }
        moment.textContent = `step ${xs[index]}${at === null ? ", the last" : ""}`;
    };
    onWidth(frame, (width) => {
        plot?.destroy();
        const rank = (one) => ({ label: one.name, show: visible.has(one), stroke: colour(one.colour), width: 1.5, dash: one.dash, spanGaps: true,
            points: { show: Boolean(one.points) || xs.length < 3, size: 6, stroke: colour(one.colour), fill: colour(one.colour) } });
        plot = new uPlot({
            width, height: 240, legend: { show: false }, scales: { x: { time: false } },
            axes: [axis({ values: (_, list) => list.map((value) => (Number.isInteger(value) ? String(value) : "")) }),
                axis({ size: 70, values: (_, list) => list.map((value) => `${Number(value.toPrecision(4))}${unit}`) })],
            series: [{}, ...series.map(rank)],
            cursor: { y: false, drag: { x: true, y: false } },
            hooks: { setCursor: [(self) => read(self.cursor.idx ?? null)] },
        }, [xs, ...series.map((one) => one.values)], frame);
        plot.root.setAttribute("role", "img");
        plot.root.setAttribute("aria-label", `${label} by step; the table beside it has the figures`);
    });
    read(null);
    const all = () => plot?.setScale("x", { min: xs[0], max: xs[last] });
    return h("div", { class: "beside" },
        h("div", null, frame, last > 0 && h("div", { class: "tools" }, h("button", { type: "button", click: all }, "show all steps"))),
        h("table", { class: "legend" }, moment, h("tbody", null, rows.map((entry) => entry.row))));
}
