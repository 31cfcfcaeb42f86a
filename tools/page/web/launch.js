// How to run a plan: the words of each engine, to copy or to keep as a file.
import { h, section, download } from "./dom.js";
import { ask, lineOf } from "./server.js";

const engines = [
    ["megatron-lm", "Megatron-LM", "train.sh"], ["megatron-bridge", "Megatron-Bridge", "overrides.yaml"], ["torchtitan", "torchtitan", "job.toml"],
    ["automodel", "AutoModel", "automodel.yaml"], ["slurm", "moe-plan by Slurm", "job.sh"], ["mpi", "moe-plan by Open MPI", "job.sh"],
];

export function howToRun(plan) {
    const said = h("p", { class: "note", role: "status" }), text = h("pre", { class: "script", tabindex: "0", hidden: true, "aria-label": "launch file" });
    const keep = h("p", { class: "tools", hidden: true });
    const show = async (engine, name, event) => {
        for (const button of event.currentTarget.parentElement.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
        said.textContent = "…";
        text.hidden = keep.hidden = true;
        const notes = [];
        try {
            const answer = await ask("launch", { plan, engine }, { note: (line) => notes.push(line) });
            text.textContent = answer.text;
            said.textContent = notes.join(" ");
            text.hidden = keep.hidden = false;
            keep.replaceChildren(
                h("button", { type: "button", click: async () => { await navigator.clipboard.writeText(answer.text); said.textContent = "copied"; } }, "Copy"),
                h("button", { type: "button", click: () => download(name, answer.text, "text/plain") }, `Download ${name}`));
        } catch (error) {
            said.textContent = lineOf(error);
        }
    };
    return section("How to run it", "A field that an engine cannot express is refused by name.",
        h("div", { class: "tools engines" }, engines.map(([engine, label, name]) => h("button", { type: "button", "aria-pressed": "false", click: (event) => show(engine, name, event) }, label))),
        said, keep, text);
}
