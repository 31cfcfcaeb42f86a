// Shows what the page was given: a report of one plan or of a run, or the views of a served page.
import { h } from "./dom.js";
import { planView, planTitle } from "./plan.js";
import { runView } from "./run.js";
import { glossary } from "./terms.js";
import { versus } from "./versus.js";
import { ask, lineOf } from "./server.js";
import { requestForm } from "./form.js";
import { results } from "./results.js";
import { howToRun } from "./launch.js";
import { importView } from "./import.js";

const app = document.getElementById("app");
const given = JSON.parse(document.getElementById("data").textContent);

// Work that is shown as it goes and that its button, or a closed tab, cancels.
function working(said) {
    let control = null;
    const cancel = h("button", { type: "button", class: "cancel", hidden: true, click: () => control?.abort() }, "Cancel");
    return {
        cancel,
        async run(name, body) {
            control?.abort();
            const mine = (control = new AbortController()), begun = performance.now();
            let latest = "";
            const tell = () => { said.textContent = `working, ${((performance.now() - begun) / 1000).toFixed(1)} s${latest ? ": " + latest : ""}`; };
            const clock = setInterval(tell, 200);
            cancel.hidden = false;
            tell();
            try {
                const answer = await ask(name, body, { signal: mine.signal, progress: (text) => { latest = text; tell(); }, note: (text) => { latest = text; } });
                said.textContent = "";
                return answer;
            } catch (error) {
                if (mine === control) said.textContent = lineOf(error);
                return null;
            } finally {
                clearInterval(clock);
                if (mine === control) cancel.hidden = true;
            }
        },
    };
}

function served() {
    const said = h("p", { class: "said", role: "status" }), work = working(said);
    const views = { search: h("main"), import: h("main"), plan: h("main"), compare: h("main") };
    const seen = []; // reports of this visit
    const tabs = Object.fromEntries([["search", "Search"], ["import", "Import"], ["plan", "Plan"], ["compare", "Compare"]].map(([name, label]) =>
        [name, h("button", { type: "button", disabled: name === "plan" || name === "compare", click: () => show(name) }, label)]));
    const show = (name) => {
        for (const [key, view] of Object.entries(views)) view.hidden = key !== name;
        for (const [key, tab] of Object.entries(tabs)) key === name ? tab.setAttribute("aria-current", "page") : tab.removeAttribute("aria-current");
        tabs[name].disabled = false;
        views[name].querySelector("h1")?.focus({ preventScroll: true });
        scrollTo(0, 0);
    };
    const nameOf = (report, at) => `${at + 1}: ${planTitle(report.explain.plan)}, ${report.explain.tflops_per_gpu.toPrecision(4)} TFLOPS/GPU, ${report.choices.slice(0, 6).map((one) => `${one.field} ${one.value}`).join(", ")}`;
    const compare = (a, b) => {
        views.compare.replaceChildren(versus(a, b));
        show("compare");
    };
    const showPlan = (report) => {
        if (!seen.includes(report)) seen.push(report);
        const other = h("select", { "aria-label": "plan to compare with" }, seen.map((one, at) => (one === report ? null : h("option", { value: at }, nameOf(one, at)))));
        const beside = seen.length > 1 && h("p", { class: "tools" }, h("label", null, "Compare with plan ", other),
            h("button", { type: "button", class: "compare", click: () => compare(report, seen[Number(other.value)]) }, "Side by side"));
        const choose = (changes) => open(report.explain.plan, changes.filter((change) => change.field !== "edp").map((change) => `${change.field}=${change.to}`));
        views.plan.replaceChildren(planView(report, { choose, extra: [beside, howToRun(report.explain.plan)] }));
        show("plan");
    };
    const open = async (plan, set = []) => {
        const report = await work.run("plan", { plan, set });
        if (report) showPlan(report);
    };
    const search = async (request) => {
        const found = await work.run("search", request);
        if (found) list.replaceChildren(results(found, open));
    };
    const list = h("div");
    const header = h("header", null, h("b", null, "moe-plan"), h("nav", { "aria-label": "views" }, Object.values(tabs)), h("div", { class: "status" }, said, work.cancel));
    app.append(header, ...Object.values(views), h("footer", null, glossary(), h("p", { class: "note" }, `moe-plan ${given.version}`)));
    const profiles = async () => {
        const [models, hardware, stacks] = await Promise.all(["models", "hardware", "stacks"].map((what) => ask("show", { what })));
        return { models: models.models, hardware: hardware.hardware, stacks: stacks.stacks };
    };
    show("search");
    profiles().then((known) => {
        views.search.append(h("h1", { tabindex: "-1" }, "Search a plan"), requestForm(known, given.fields, search), list);
        views.import.append(importView(known, open));
    }, (error) => { said.textContent = lineOf(error); });
}

const views = { "moe-plan/report/1": (report) => planView(report, null), "moe-plan/run-report/1": runView };
if (given.schema in views) app.append(h("main", null, views[given.schema](given)), h("footer", null, glossary()));
else served();
