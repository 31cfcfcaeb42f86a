// The slots of each pipeline stage over time, with zoom: by buttons, keys, a wheel with Ctrl, or two fingers.
import { h, svg, onWidth } from "./dom.js";
import { seconds } from "./units.js";
import { term } from "./terms.js";

const laneHeight = 26, laneGap = 6, left = 58, top = 22;
const letters = { forward: "F", backward: "B", dgrad: "D", wgrad: "W", begin: "", finish: "" };

function ticks(from, to) {
    const rough = (to - from) / 6, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((nice) => nice * power).find((value) => value >= rough);
    const list = [];
    for (let at = Math.ceil(from / step) * step; at <= to; at += step) list.push(at);
    return list;
}

// data: the report's field of this name; until: seconds that the axis ends at, such as that of a longer step beside it.
export function pipeline(data, until = 0) {
    const lanes = Array.from({ length: data.stages }, () => []);
    let end = until, chunks = 1;
    for (const [stage, kind, chunk, micro, start, length, half] of data.boxes) {
        lanes[stage].push({ kind: data.kinds[kind], chunk, micro, start: start / 1e6, end: (start + length) / 1e6, half });
        end = Math.max(end, (start + length) / 1e6);
        chunks = Math.max(chunks, chunk + 1);
    }
    // Transfers of a slot may go on beside the next one: a box is drawn until the next box of its row starts.
    for (const lane of lanes) {
        const next = {};
        for (const box of lane.toReversed()) {
            const behind = box.half ? [box.half, 0] : [0, 1, 2];
            box.shown = Math.max(box.start, Math.min(box.end, ...behind.map((half) => next[half] ?? Infinity)));
            next[box.half] = box.start;
        }
    }
    const longest = lanes.map((lane) => lane.reduce((most, box) => Math.max(most, box.end - box.start), 0));
    const hidden = new Set();
    let from = 0, to = end, width = 0;
    const drawing = svg("svg", { role: "img", class: "pipeline", "aria-label": "slots of each pipeline stage over time" });
    const said = h("p", { class: "note said", "aria-live": "polite" }, "Point at a box to read it.");
    const frame = h("div", { class: "chart", tabindex: "0", role: "group", "aria-label": "pipeline: plus and minus zoom, arrows move, 0 shows all" }, drawing);

    const say = (stage, box) => {
        said.textContent = `Stage ${stage}: ${box.kind}${box.chunk >= 0 ? `, chunk ${box.chunk}, micro-batch ${box.micro}` : ""}` +
            `${box.half ? ", merged with the slot beside it" : ""}: ${seconds(box.end - box.start)} from ${seconds(box.start)}`;
    };
    const draw = () => {
        const scale = (width - left) / Math.max(to - from, 1e-9), x = (time) => left + (time - from) * scale;
        const parts = [];
        for (const time of ticks(from, to))
            parts.push(svg("line", { class: "grid", x1: x(time), x2: x(time), y1: top - 4, y2: top + lanes.length * (laneHeight + laneGap) }),
                svg("text", { x: x(time), y: 14, "text-anchor": x(time) > width - 40 ? "end" : "start" }, seconds(time)));
        lanes.forEach((lane, stage) => {
            const y = top + stage * (laneHeight + laneGap);
            parts.push(svg("text", { x: 0, y: y + laneHeight / 2 + 4 }, `stage ${stage}`));
            let first = 0, last = lane.length; // the first box that may reach into the window
            while (first < last) {
                const middle = (first + last) >> 1;
                if (lane[middle].start < from - longest[stage]) first = middle + 1;
                else last = middle;
            }
            const drawn = {}; // right edge of what was drawn, by half: narrower boxes behind it would not be seen
            for (let at = first; at < lane.length && lane[at].start < to; ++at) {
                const box = lane[at], begin = Math.max(left, x(box.start)), stop = Math.min(width, x(box.shown));
                if (box.shown < from || hidden.has(box.kind) || stop < (drawn[box.half] ?? -1) + 0.35) continue;
                drawn[box.half] = stop;
                const shade = chunks > 1 && box.chunk >= 0 ? 1 - (0.55 * box.chunk) / (chunks - 1) : 1;
                const tall = box.half ? laneHeight / 2 : laneHeight, above = y + (box.half === 2 ? laneHeight / 2 : 0);
                parts.push(svg("rect", { class: "slot " + box.kind, x: begin, y: above, width: Math.max(0.4, stop - begin), height: tall,
                    "fill-opacity": shade, mouseenter: () => say(stage, box) }));
                const label = letters[box.kind] + (chunks > 1 ? `${box.chunk}.${box.micro}` : box.micro);
                if (letters[box.kind] && stop - begin > 7 * label.length + 4)
                    parts.push(svg("text", { class: "slot-name", x: (begin + stop) / 2, y: above + tall / 2 + 4, "text-anchor": "middle" }, label));
            }
        });
        drawing.setAttribute("viewBox", `0 0 ${width} ${top + lanes.length * (laneHeight + laneGap)}`);
        drawing.replaceChildren(...parts);
    };
    const move = (start, length) => {
        length = Math.min(end, Math.max(length, 20e-6));
        from = Math.min(Math.max(0, start), end - length);
        to = from + length;
        draw();
    };
    const zoom = (factor, at = 0.5) => move(from + (to - from) * at * (1 - factor), (to - from) * factor);
    const pan = (share) => move(from + (to - from) * share, to - from);
    const keys = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => pan(-0.25), ArrowRight: () => pan(0.25), 0: () => move(0, end) };
    frame.addEventListener("keydown", (event) => {
        if (!(event.key in keys) || event.ctrlKey || event.metaKey) return;
        event.preventDefault();
        keys[event.key]();
    });
    frame.addEventListener("wheel", (event) => {
        if (!event.ctrlKey && !event.shiftKey) return;
        event.preventDefault();
        const box = drawing.getBoundingClientRect();
        if (event.ctrlKey) zoom(event.deltaY > 0 ? 1.3 : 1 / 1.3, Math.max(0, (event.clientX - box.left - left) / (box.width - left)));
        else pan((event.deltaY || event.deltaX) > 0 ? 0.15 : -0.15);
    }, { passive: false });
    let held = null;
    drawing.addEventListener("pointerdown", (event) => { held = { x: event.clientX, from }; drawing.setPointerCapture(event.pointerId); });
    drawing.addEventListener("pointermove", (event) => {
        if (held) move(held.from - ((event.clientX - held.x) / (width - left)) * (to - from), to - from);
    });
    for (const name of ["pointerup", "pointercancel"]) drawing.addEventListener(name, () => { held = null; });
    onWidth(frame, (now) => { width = now; draw(); });

    const kinds = [...new Set(data.boxes.map((box) => data.kinds[box[1]]))];
    const toggle = (kind) => (event) => {
        hidden.has(kind) ? hidden.delete(kind) : hidden.add(kind);
        event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(kind)));
        draw();
    };
    const button = (text, name, act) => h("button", { type: "button", title: name, "aria-label": name, click: act }, text);
    return h("div", null,
        h("div", { class: "tools" },
            button("+", "zoom in", () => zoom(0.5)), button("−", "zoom out", () => zoom(2)),
            button("◀", "earlier", () => pan(-0.25)), button("▶", "later", () => pan(0.25)), button("all", "show the whole step", () => move(0, end)),
            kinds.map((kind) => h("button", { type: "button", class: "switch", "aria-pressed": "true", click: toggle(kind) }, h("i", { class: "swatch " + kind }), kind))),
        frame, said,
        h("p", { class: "note" }, kinds.flatMap((kind, at) => [at ? ", " : "Kinds: ", term(kind)]),
            chunks > 1 ? `. Paler boxes are later ones of ${chunks} chunks; labels read chunk.micro-batch.` : ". Labels are micro-batches.",
            data.boxes.some((box) => box[6]) ? " Half boxes, one above the other, are slots that run merged." : "",
            data.omitted ? ` ${data.omitted} slots in the middle are left out.` : ""));
}
