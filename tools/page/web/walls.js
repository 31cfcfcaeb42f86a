// What bounds a step: memory by class, communication by axis, compute by class of operations.
import { h } from "./dom.js";
import { count, figure, gib, percent, seconds } from "./units.js";
import { fullest } from "./memory.js";
import { table } from "./table.js";
import { term } from "./terms.js";

// Reserved bytes by class beside what is in use at the fullest moment; saved activations also by module.
export function memoryWall(wall, overTime) {
    const top = fullest(overTime);
    const used = Object.fromEntries(overTime.classes.map((part) => [part.class, part.gib[top]]));
    const modules = wall.classes.filter((part) => part.class.startsWith("saved by "));
    const saved = modules.reduce((sum, part) => sum + part.gib, 0);
    const rows = wall.classes.filter((part) => !part.class.startsWith("saved by ")).map((part) => ({ name: part.class, reserved: part.gib, used: used[part.class] ?? 0 }));
    if (modules.length) rows.push({ name: "saved activations", reserved: saved, used: used["saved activations"] ?? 0 });
    rows.sort((a, b) => b.reserved - a.reserved);
    const together = (field) => rows.reduce((sum, row) => sum + row[field], 0);
    rows.push({ name: "together", reserved: together("reserved"), used: together("used"), sum: true });
    return h("div", null,
        table({
            caption: "memory by class",
            rows,
            classes: (row) => row.sum && "sum",
            columns: [
                { head: "class", left: true, show: (row) => term(row.name) },
                { head: "reserved", show: (row) => gib(row.reserved) },
                { head: "in use at the fullest moment", show: (row) => gib(row.used) },
            ],
        }),
        rows.some((row) => row.used > row.reserved) && h("p", { class: "note" },
            "Reserved bytes are laid out in the order of the program, and classes take each other's places; what is in use follows predicted times, by which slots overlap."),
        h("p", { class: "note" }, `GiB on stage ${wall.stage}, of ${gib(wall.limit_gib)}. `,
            modules.length ? `Saved activations: ${modules.map((part) => `${part.class.slice(9)} ${gib(part.gib)}`).join(", ")}.` : ""));
}

export function communicationWall(wall) {
    if (!wall.axes.length) return h("p", { class: "note" }, "No GPU speaks to another.");
    return table({
        caption: "communication by axis",
        rows: wall.axes,
        columns: [
            { head: "axis", left: true, show: (row) => row.axis },
            { head: "busy", sort: (row) => row.busy_seconds, show: (row) => seconds(row.busy_seconds) },
            { head: "exposed", sort: (row) => row.exposed_seconds, show: (row) => seconds(row.exposed_seconds) },
            { head: "hidden", show: (row) => (row.busy_seconds > 0 ? percent(Math.max(0, 1 - row.exposed_seconds / row.busy_seconds)) : "") },
            { head: "GB", show: (row) => figure(row.bytes / 1e9) },
            { head: "GB/s", show: (row) => (row.busy_seconds > 0 ? figure(row.bytes / row.busy_seconds / 1e9) : "") },
            { head: "ops", show: (row) => count(row.ops) },
        ],
    });
}

export function computeWall(wall) {
    return h("div", null, table({
        caption: "compute by class",
        rows: wall.classes,
        columns: [
            { head: "class", left: true, show: (row) => term(row.class) },
            { head: "busy", sort: (row) => row.busy_seconds, show: (row) => seconds(row.busy_seconds) },
            { head: "at peak", sort: (row) => row.seconds_at_peak, show: (row) => seconds(row.seconds_at_peak) },
            { head: "of peak", show: (row) => (row.busy_seconds > 0 ? percent(row.seconds_at_peak / row.busy_seconds) : "") },
            { head: "recompute", show: (row) => (row.recompute_seconds > 0 ? seconds(row.recompute_seconds) : "") },
            { head: "ops", show: (row) => count(row.ops) },
        ],
    }),
    h("p", { class: "note" }, `The host needs ${seconds(wall.host_issue_seconds)} to issue ${count(wall.launches)} operations; ${seconds(wall.host_exposed_seconds)} of the step waits for it.`));
}
