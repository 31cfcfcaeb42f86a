// Parts of a whole as rows with a bar each, largest first.
import { h } from "./dom.js";
import { percent } from "./units.js";
import { table } from "./table.js";
import { term } from "./terms.js";

// parts: [{name, value}], whole: the value of 100 %, text(value): with its unit.
export function bars(caption, parts, whole, text) {
    const rows = parts.filter((part) => part.value > 0).sort((a, b) => b.value - a.value);
    return table({
        caption,
        rows,
        columns: [
            { head: "part", left: true, show: (row) => term(row.name) },
            { head: "takes", show: (row) => text(row.value) },
            { head: "share", show: (row) => percent(row.value / whole) },
            { head: "", show: (row) => h("span", { class: "bar", style: { width: `${Math.min(100, (100 * row.value) / whole)}%` } }) },
        ],
    });
}
