// A launch script, YAML or TOML of another engine: dropped or chosen, it becomes a plan with findings.
import { h, section } from "./dom.js";
import { field, hardwareField, modelField, stackField } from "./form.js";
import { ask, lineOf } from "./server.js";
import { table } from "./table.js";

function findings(answer, name, open) {
    const order = { error: 0, warning: 1, hint: 2 };
    return h("div", null,
        h("p", null, `${name}: ${answer.findings.length} findings, ${answer.unknown.length} settings not understood. `,
            h("button", { type: "button", class: "main open-import", click: () => open(answer.plan) }, "Open the plan")),
        answer.findings.length > 0 && section("Findings", null, table({
            caption: "findings", rows: [...answer.findings].sort((a, b) => order[a.severity] - order[b.severity]), classes: (row) => row.severity,
            columns: [
                { head: "severity", left: true, sort: (row) => order[row.severity], show: (row) => row.severity },
                { head: "field", left: true, sort: (row) => row.field, show: (row) => row.field },
                { head: "message", left: true, show: (row) => row.message },
            ],
        })),
        answer.unknown.length > 0 && section("Not understood", null, table({
            caption: "settings not understood", rows: answer.unknown,
            columns: ["setting", "value", "line", "why"].map((key) => ({ head: key, left: true, show: (row) => String(row[key] ?? "") })),
        })));
}

export function importView(profiles, open) {
    const model = modelField(profiles.models), hardware = hardwareField(profiles.hardware, "h100"), stack = stackField(profiles.stacks);
    const gpus = h("input", { type: "number", name: "gpus", min: "1", placeholder: "as the file says" });
    const said = h("p", { role: "status", class: "note" }), answer = h("div");
    const read = async (file) => {
        said.textContent = `reading ${file.name} …`;
        answer.replaceChildren();
        const request = { name: file.name, text: await file.text(), hardware: hardware.value };
        Object.assign(request, model.value());
        if (gpus.value) request.gpus = Number(gpus.value);
        if (stack.value) request.stack = stack.value;
        try {
            const found = await ask("import", request);
            said.textContent = "";
            answer.replaceChildren(findings(found, file.name, open));
        } catch (error) {
            said.textContent = lineOf(error);
        }
    };
    const chosen = h("input", { type: "file", name: "launch", change: () => chosen.files.length && read(chosen.files[0]) });
    const zone = h("div", { class: "drop" }, h("label", null, "Drop a launch script, YAML or TOML here, or choose one: ", chosen));
    zone.addEventListener("dragover", (event) => { event.preventDefault(); zone.classList.add("over"); });
    zone.addEventListener("dragleave", () => zone.classList.remove("over"));
    zone.addEventListener("drop", (event) => {
        event.preventDefault();
        zone.classList.remove("over");
        if (event.dataTransfer.files.length) read(event.dataTransfer.files[0]);
    });
    return h("div", null,
        h("h1", { tabindex: "-1" }, "Read a launch file"),
        h("p", { class: "note" }, "Of Megatron-LM, Megatron-Bridge, torchtitan or AutoModel. What it says nothing about is asked here."),
        h("div", { class: "fields" }, field("machine", hardware), model.element, field("GPUs", gpus), field("stack", stack)),
        zone, said, answer);
}
