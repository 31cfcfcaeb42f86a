// How the tokens of a run were spread over the experts of each layer: a field of colour, and its figures.
import { h, svg, onWidth } from "./dom.js";
import { count } from "./units.js";
import { table } from "./table.js";

const nameWidth = 64, fieldTop = 4, scaleHeight = 18, rowHeight = 14; // pixels

export function experts(layers) {
    const rows = layers.map(({ layer, tokens }) => {
        const sum = tokens.reduce((total, value) => total + value, 0), mean = sum / tokens.length || 1;
        const most = Math.max(...tokens), least = Math.min(...tokens);
        return { layer, tokens, sum, fullest: tokens.indexOf(most), most: most / mean, emptiest: tokens.indexOf(least), least: least / mean, shares: tokens.map((value) => value / mean) };
    });
    const widest = Math.max(...rows.map((row) => row.tokens.length)), top_load = Math.max(2, ...rows.map((row) => row.most));
    const height = fieldTop + rows.length * rowHeight + scaleHeight;
    const drawing = svg("svg", { role: "img", class: "experts", "aria-label": "tokens of each expert over the mean, layer by layer; the table below has the figures" });
    const frame = h("div", { class: "chart" }, drawing), said = h("p", { class: "note said", "aria-live": "polite" }, "Point at a field to read it.");
    onWidth(frame, (width) => {
        const wide = (width - nameWidth) / widest, parts = [];
        rows.forEach((row, lane) => {
            const y = fieldTop + lane * rowHeight;
            parts.push(svg("text", { x: 0, y: y + rowHeight - 3 }, `layer ${row.layer}`));
            row.shares.forEach((share, expert) => parts.push(svg("rect", {
                x: nameWidth + expert * wide, y, width: Math.max(0.5, wide - (wide > 4 ? 1 : 0)), height: rowHeight - 1, class: "load",
                "fill-opacity": Math.max(0.03, share / top_load),
                mouseenter: () => { said.textContent = `Layer ${row.layer}, expert ${expert}: ${count(row.tokens[expert])} tokens, ${share.toFixed(2)} times the mean`; },
            })));
        });
        const y = height - 5;
        parts.push(svg("text", { x: nameWidth, y }, "expert 0"), svg("text", { x: width, y, "text-anchor": "end" }, `expert ${widest - 1}`));
        drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
        drawing.replaceChildren(...parts);
    });
    return h("div", null, frame, said,
        h("p", { class: "note" }, `Darker is fuller; full colour is ${top_load.toFixed(1)} times the mean.`),
        table({
            caption: "load of the experts by layer", rows,
            columns: [
                { head: "layer", left: true, sort: (row) => row.layer, show: (row) => String(row.layer) },
                { head: "tokens", sort: (row) => row.sum, show: (row) => count(row.sum) },
                { head: "fullest", sort: (row) => row.most, show: (row) => `${row.most.toFixed(2)} × (expert ${row.fullest})` },
                { head: "emptiest", sort: (row) => row.least, show: (row) => `${row.least.toFixed(2)} × (expert ${row.emptiest})` },
            ],
        }));
}
