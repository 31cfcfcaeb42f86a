// The page of one plan: figures, walls, pipeline, memory, what-ifs, and where they come from.
import { h, section, download } from "./dom.js";
import { count, figure, gib, percent, seconds } from "./units.js";
import { bars } from "./bars.js";
import { front } from "./front.js";
import { memory } from "./memory.js";
import { pipeline } from "./pipeline.js";
import { table } from "./table.js";
import { term } from "./terms.js";
import { communicationWall, computeWall, memoryWall } from "./walls.js";
import { whatIfs } from "./whatif.js";

const names = { tp: "TP", cp: "CP", dp: "DP", pp: "PP", vpp: "VPP", ep: "EP", etp: "ETP", mbs: "MBS" };

export function cards(report) {
    const explained = report.explain, card = (value, ...what) => h("div", null, h("b", null, value), h("span", null, what));
    return h("div", { class: "cards" },
        card(figure(explained.tflops_per_gpu), term("TFLOPS/GPU")),
        card(percent(explained.walls.compute.mfu), `of ${explained.plan.precision} peak (`, term("MFU"), ")"),
        card(seconds(explained.step_seconds), term("step")),
        card(count(report.tokens_per_second_per_gpu), term("tokens/s/GPU")),
        card(`${gib(explained.memory_gib)} of ${gib(explained.walls.memory.limit_gib)}`, term("GiB"), explained.fits ? " per GPU" : " per GPU: does not fit"));
}

// The sentence, whose word "interval" is a term.
function intervalText(text) {
    const at = text.indexOf("interval");
    return at < 0 ? text : [text.slice(0, at), term("interval"), text.slice(at + 8)];
}

export function planTitle(plan) {
    return `${plan.model.name} on ${plan.mesh.gpus} × ${plan.hardware.name}`;
}

// list: the fields that are not at their default.
export function choices(plan, list) {
    const item = (name, value) => h("span", null, term(name), " ", h("b", null, value));
    return h("p", { class: "plan" }, item("GBS", String(plan.workload.gbs)), item("tokens", String(plan.workload.seq)),
        list.map((choice) => item(names[choice.field] ?? choice.field, choice.value)), item("stack", plan.stack));
}

function skew(data) {
    if (!data) return null;
    return section("Routing skew", `Routing ${data.routing}; everything else on this page is at the mean. ${percent(data.overflow)} of the steps exceed the planned capacity and run again.`,
        table({
            caption: "routing skew", rows: data.rows,
            columns: [
                { head: "over steps", left: true, show: (row) => row.over_steps },
                { head: "load", show: (row) => row.load.toFixed(2) },
                { head: "step", show: (row) => seconds(row.step_seconds) },
                { head: "TFLOPS/GPU", show: (row) => figure(row.tflops_per_gpu) },
                { head: "GiB", show: (row) => gib(row.memory_gib) },
            ],
        }),
        data.copies.map((line) => h("p", null, line)));
}

// ran: the command of the run that a page is of, where that is another than the page's own.
export function origin(report, plan, ran) {
    const row = (name, value) => [h("dt", null, name), h("dd", null, value)];
    return section("Where this comes from", null, h("dl", { class: "origin" },
        row("version", `moe-plan ${report.version}`), row("date", report.date), report.command && row("command", h("code", null, report.command)), ran && row("run", h("code", null, ran)),
        row("model", h("code", null, `sha256 ${report.sha256.model}`)), row("hardware", h("code", null, `sha256 ${report.sha256.hardware}`)),
        row("stack", plan.stack)));
}

// actions: none in a report; in the served page {choose(changes), extra: further sections}.
export function planView(report, actions) {
    const explained = report.explain, walls = explained.walls, plan = explained.plan;
    const parts = (list, name) => list.map((part) => ({ name: part[name], value: part.seconds }));
    return h("article", null,
        h("h1", { tabindex: "-1" }, planTitle(plan)), choices(plan, report.choices), cards(report),
        h("p", { class: "note" }, intervalText(report.interval_text)),
        h("p", null, h("button", { type: "button", class: "download", click: () => download("plan.json", JSON.stringify(plan, null, 2) + "\n") }, "Download plan.json")),
        actions?.extra,
        h("div", { class: "pair" },
            section("Where the step goes", `On stage ${walls.compute.stage}, which ends last; communication as far as nothing computes meanwhile.`,
                bars("where the step goes", parts(report.breakdown, "part"), explained.step_seconds, seconds)),
            section("What keeps it from peak", "Time of that stage beyond what its operations take at the machine's peak.",
                bars("what keeps it from peak", parts(walls.losses, "cause"), explained.step_seconds, seconds))),
        skew(report.skew),
        section("One pipeline", "The first rank of every stage; a box holds a slot from its first operation to its last, or until the next slot begins.", pipeline(report.pipeline)),
        section(`Memory of stage ${walls.memory.stage} over the step`, "The stage that holds most.",
            memory(report.memory_over_time, walls.memory.memory_gib, walls.memory.limit_gib), memoryWall(walls.memory, report.memory_over_time)),
        section("What each single change would do", `By the fast estimate, which gives ${figure(explained.base.tflops_per_gpu)} TFLOPS/GPU and ${gib(explained.base.memory_gib)} GiB for this plan. Struck out: does not fit.`,
            whatIfs(explained, actions?.choose)),
        explained.front.length > 0 && section("Memory against throughput, same mapping", "Each plan is beaten by no other in both.", front(explained.front, walls.memory.limit_gib, actions?.choose)),
        h("div", { class: "pair" },
            section("Communication", "One rank in one step; exposed: nothing computes meanwhile.", communicationWall(walls.communication)),
            section("Compute and host", "At peak: FLOPs or bytes at the machine's rate, whichever takes longer.", computeWall(walls.compute))),
        section("Busy time by kind of operation", "Mean over ranks; streams overlap, so that shares may add up to more than 100 %.",
            bars("busy time by kind", parts(report.kinds, "kind"), explained.step_seconds, seconds)),
        origin(report, plan));
}

