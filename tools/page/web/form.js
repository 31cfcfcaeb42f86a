// The form of a request: model, machine, sizes, precision, stack, pinned fields and headroom.
import { h } from "./dom.js";
import { term } from "./terms.js";

const precisions = ["bf16", "fp8-tensor", "fp8-blockwise", "mxfp8", "nvfp4", "fp32"];

export function field(label, control, hint) {
    return h("label", { class: "field" }, h("span", null, label), control, hint && h("small", null, hint));
}

// A choice of model: a name of the profiles, or a config.json from this machine. value(): {model} or {config}.
export function modelField(models, initial = "") {
    let config = null;
    const name = h("input", { list: "models", name: "model", autocomplete: "off", value: initial });
    const said = h("small", { role: "status" }, "a name, or a Hugging Face config.json");
    const file = h("input", {
        type: "file", accept: ".json,application/json", "aria-label": "config.json of a model",
        change: async () => {
            config = file.files.length ? await file.files[0].text() : null;
            name.disabled = config !== null;
            said.textContent = config === null ? "a name, or a Hugging Face config.json" : `from ${file.files[0].name}`;
        },
    });
    const list = document.getElementById("models") ? null : h("datalist", { id: "models" }, models.map((model) => h("option", { value: model.name })));
    return {
        element: h("div", { class: "field" }, h("label", null, h("span", null, "model"), name), list, file, said),
        value: () => (config !== null ? { config } : { model: name.value.trim() }),
        name,
    };
}

export function hardwareField(hardware, initial) {
    return h("select", { name: "hardware" }, hardware.map((machine) => h("option", { value: machine.name, selected: machine.name === initial }, machine.name)));
}

export function stackField(stacks) {
    return h("select", { name: "stack" }, h("option", { value: "" }, "newest for the machine"), stacks.map((stack) => h("option", { value: stack.name }, stack.name)));
}

// Rows of FIELD = VALUE.
function pins(fields) {
    const list = h("ul", { class: "pins" });
    const add = () => {
        const name = h("select", { "aria-label": "pinned field" }, fields.map((one) => h("option", null, one)));
        const value = h("input", { "aria-label": "value of the pinned field", placeholder: "value", size: "12" });
        const row = h("li", null, name, " = ", value, h("button", { type: "button", "aria-label": "remove this pin", click: () => row.remove() }, "×"));
        list.append(row);
        name.focus();
    };
    return {
        element: h("fieldset", null, h("legend", null, term("pinned fields", "pin")), list, h("button", { type: "button", class: "add-pin", click: add }, "Pin a field")),
        value: () => [...list.children].map((row) => [row.querySelector("select").value, row.querySelector("input").value.trim()]).filter((pin) => pin[1]).map((pin) => pin.join("=")),
    };
}

// profiles: {models, hardware, stacks}; submit(request) is called with a sound form.
export function requestForm(profiles, fields, submit) {
    const model = modelField(profiles.models, "Qwen3-30B-A3B");
    const hardware = hardwareField(profiles.hardware, "h100"), stack = stackField(profiles.stacks), pinned = pins(fields);
    const number = (name, value, extra) => h("input", { type: "number", name, value, min: "1", step: "1", required: true, ...extra });
    const gpus = h("input", { name: "gpus", value: "16", required: true, pattern: "auto|[0-9]+(,[0-9]+)*", size: "10" });
    const gbs = number("gbs", "512"), seq = number("seq", "4096"), top = number("top", "10", { max: "100" });
    const headroom = h("input", { type: "number", name: "headroom", min: "0", max: "0.9", step: "0.01", placeholder: "the stack's own" });
    const boxes = precisions.map((name) => h("input", { type: "checkbox", name: "precision", value: name }));
    const send = (event) => {
        event.preventDefault();
        const chosen = boxes.filter((box) => box.checked).map((box) => box.value);
        const request = { ...model.value(), hardware: hardware.value, gpus: gpus.value.trim(), gbs: Number(gbs.value), seq: Number(seq.value), top: Number(top.value), fix: pinned.value() };
        if (chosen.length) request.precision = chosen.join(",");
        if (stack.value) request.stack = stack.value;
        if (headroom.value) request.headroom = Number(headroom.value);
        submit(request);
    };
    return h("form", { class: "request", submit: send },
        h("div", { class: "fields" }, model.element, field("machine", hardware), field("GPUs", gpus, "a number, several as 256,512, or auto"),
            field("global batch", gbs, "sequences per step"), field("sequence", seq, "tokens"), field("stack", stack),
            field("headroom", headroom, "share of memory left free"), field("plans to show", top)),
        h("fieldset", { class: "checks" }, h("legend", null, "precision"), boxes.map((box) => h("label", null, box, " ", box.value)), h("small", null, "none checked: the search's own choice")),
        pinned.element,
        h("p", null, h("button", { type: "submit", class: "main" }, "Search")));
}
