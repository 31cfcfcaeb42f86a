// Memory in use over the step, stacked by class; the legend switches classes and adds up to what is read.
import { h, colour, onWidth } from "./dom.js";
import { gib, seconds } from "./units.js";
import { term } from "./terms.js";

const axisFont = "12px system-ui, sans-serif";

export function axis(extra) {
    return { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 }, font: axisFont, ...extra };
}

// The sample at which most is in use.
export function fullest(data) {
    let best = 0, most = -1;
    for (let at = 0; at < data.seconds.length; ++at) {
        const sum = data.classes.reduce((total, part) => total + part.gib[at], 0);
        if (sum > most) [best, most] = [at, sum];
    }
    return best;
}

// data: the report's memory_over_time; reserved, limit: GiB.
export function memory(data, reserved, limit) {
    const visible = new Set(data.classes.map((part) => part.class));
    const top = fullest(data), showLimit = limit < 4 * reserved;
    const lines = [{ name: "reserved", value: reserved }, ...(showLimit ? [{ name: "machine", value: limit }] : [])];
    const frame = h("div", { class: "chart" });
    const moment = h("caption");
    const sum = h("td");
    let plot = null;
    const rows = data.classes.map((part, at) => {
        const cell = h("td");
        const press = (event) => {
            visible.has(part.class) ? visible.delete(part.class) : visible.add(part.class);
            event.currentTarget.setAttribute("aria-pressed", String(visible.has(part.class)));
            plot?.setData(stacked(), false);
            read(null);
        };
        const name = h("th", { scope: "row" }, h("button", { type: "button", class: "switch", "aria-pressed": "true", click: press },
            h("i", { class: "swatch m" + at }), part.class));
        return { part, cell, row: h("tr", null, name, cell) };
    });
    const read = (at) => {
        const sample = at ?? top;
        let total = 0;
        for (const { part, cell } of rows) {
            const value = visible.has(part.class) ? part.gib[sample] : 0;
            total += value;
            cell.textContent = visible.has(part.class) ? gib(value) : "off";
        }
        sum.textContent = gib(total);
        moment.textContent = `GiB in use at ${seconds(data.seconds[sample])}${at === null ? ", the fullest moment" : ""}`;
    };
    const stacked = () => {
        const sums = data.seconds.map(() => 0);
        const layers = data.classes.map((part) => {
            if (visible.has(part.class)) part.gib.forEach((value, at) => { sums[at] += value; });
            return [...sums];
        });
        return [data.seconds, ...layers.reverse(), ...lines.map((line) => data.seconds.map(() => line.value))];
    };
    onWidth(frame, (width) => {
        plot?.destroy();
        const layers = data.classes.map((part, at) => ({ label: part.class, stroke: colour("m" + at), fill: colour("m" + at), width: 1, points: { show: false } })).reverse();
        plot = new uPlot({
            width, height: 300, legend: { show: false },
            scales: { x: { time: false }, y: { range: [0, 1.05 * Math.max(...lines.map((line) => line.value))] } },
            axes: [axis({ values: (_, list) => list.map(seconds) }), axis({ values: (_, list) => list.map((value) => `${value} GiB`), size: 70 })],
            series: [{}, ...layers, ...lines.map((line) => ({ label: line.name, stroke: colour("mark"), dash: [6, 4], width: 1.5, points: { show: false } }))],
            bands: layers.slice(1).map((_, at) => ({ series: [at + 1, at + 2] })),
            cursor: { y: false, drag: { x: true, y: false } },
            hooks: { setCursor: [(self) => read(self.cursor.idx ?? null)] },
        }, stacked(), frame);
        plot.root.setAttribute("role", "img");
        plot.root.setAttribute("aria-label", "memory in use over the step by class; the table beside it has the figures");
    });
    read(null);
    const all = () => plot?.setScale("x", { min: data.seconds[0], max: data.seconds.at(-1) });
    return h("div", { class: "beside" },
        h("div", null, frame, h("div", { class: "tools" }, h("button", { type: "button", click: all }, "show the whole step")),
            h("p", { class: "note" }, "Drag over the chart to zoom in. Broken lines: ", term("reserved"), ` ${gib(reserved)} GiB`, showLimit ? `, and the ${gib(limit)} GiB of the machine.` : `; the machine has ${gib(limit)} GiB.`)),
        h("table", { class: "legend" }, moment, h("tbody", null, rows.map((entry) => entry.row).reverse(), h("tr", { class: "sum" }, h("th", { scope: "row" }, "together"), sum))));
}
