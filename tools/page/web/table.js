// A table whose columns sort by a click on their heading, with a filter where it is asked for.
import { h } from "./dom.js";
import { term } from "./terms.js";

// columns: {head, show(row): text or node, sort(row): number or text where the column sorts, left: of text}.
// The first column heads its row. key(row): class names of the row.
export function table({ caption, columns, rows, filter = false, classes = () => null }) {
    let order = null, down = false, words = "";
    const body = h("tbody");
    const status = h("p", { class: "note", role: "status" });
    const cells = (row) =>
        columns.map((column, at) =>
            h(at === 0 ? "th" : "td", { class: column.left && "text", scope: at === 0 && "row" }, column.show(row) || ""),
        );
    const fill = () => {
        const list = [...rows];
        if (order) {
            const value = order.sort;
            list.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (down ? -1 : 1));
        }
        const made = list.map((row) => h("tr", { class: classes(row) }, cells(row)));
        const kept = made.filter((row) => words.toLowerCase().split(/\s+/).every((word) => row.textContent.toLowerCase().includes(word)));
        body.replaceChildren(...kept);
        if (filter) status.textContent = words ? `${kept.length} of ${rows.length} rows` : `${rows.length} rows`;
    };
    const heads = columns.map((column) => {
        if (!column.sort) return h("th", { scope: "col", class: column.left && "text" }, term(column.head));
        const head = h("th", { scope: "col", class: column.left && "text", "aria-sort": "none" });
        const press = () => {
            down = order === column ? !down : !column.left;
            order = column;
            for (const other of heads) if (other.hasAttribute("aria-sort")) other.setAttribute("aria-sort", "none");
            head.setAttribute("aria-sort", down ? "descending" : "ascending");
            fill();
        };
        head.append(h("button", { type: "button", class: "sort", click: press }, column.head));
        return head;
    });
    fill();
    const frame = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
        h("table", null, h("caption", { class: "hidden" }, caption), h("thead", null, h("tr", null, heads)), body));
    if (!filter) return frame;
    const input = (event) => { words = event.target.value.trim(); fill(); };
    return h("div", null,
        h("label", { class: "filter" }, "Filter ", h("input", { type: "search", input, placeholder: "words that a row holds" })), status, frame);
}
