// The page of a run: what was learned, how the experts were loaded, and what was predicted beside what was measured.
import { h, section } from "./dom.js";
import { count, figure, gib, percent, seconds } from "./units.js";
import { choices, origin, planTitle } from "./plan.js";
import { experts } from "./experts.js";
import { lines } from "./lines.js";
import { pipeline } from "./pipeline.js";
import { table } from "./table.js";
import { term } from "./terms.js";

const ratio = (predicted, measured) => (measured > 0 ? (predicted / measured).toFixed(2) : "none");
const known = (values) => values.filter((value) => value !== null);
const lastOf = (values) => known(values).at(-1);

function card(value, ...what) {
    return h("div", null, h("b", null, value), h("span", null, what));
}

// The figure that was measured, with the predicted one below; either may be missing.
function pairCard(name, text, predicted, measured) {
    if (measured === undefined) return card(text(predicted), term(name), ", predicted");
    return card(text(measured), term(name), predicted > 0 && `, predicted ${text(predicted)}: `, predicted > 0 && term("ratio", "predicted/measured"), predicted > 0 && ` ${ratio(predicted, measured)}`);
}

function runCards(report) {
    const { run, comparison: both } = report;
    const loss = run && lastOf(run.series.loss);
    return h("div", { class: "cards" },
        both && pairCard("TFLOPS/GPU", figure, both.predicted_tflops_per_gpu, both.measured_tflops_per_gpu),
        both ? pairCard("step", seconds, both.predicted_step_seconds, both.measured_step_seconds)
            : run && pairCard("step", seconds, run.predicted_step_seconds, run.measured_step_seconds || undefined),
        both && pairCard("GiB", gib, both.predicted_memory_gib, both.measured_memory_gib),
        loss !== undefined && loss !== null && card(loss.toFixed(4), term("loss"), ` after ${count(run.steps)} steps`),
        run?.evaluations.length > 0 && card((lastOf(run.evaluations.map((one) => one.loss)) ?? NaN).toFixed(4), term("validation loss")));
}

function learning(run) {
    if (!run || run.series.step.length === 0) return null;
    const xs = run.series.step, four = (value) => value.toFixed(4);
    const at = new Map(run.evaluations.map((one) => [one.step, one.loss]));
    const valid = xs.map((step) => at.get(step) ?? null), even = xs.map(() => run.unigram_entropy);
    const rest = [run.every > 1 && `every ${run.every}th step is drawn`, run.skipped.length > 0 && `${run.skipped.length} bad steps changed no weight`].filter(Boolean);
    const losses = [{ name: "training loss", values: run.series.loss, text: four, colour: "m1" },
        known(valid).length > 0 && { name: "validation loss", values: valid, text: four, colour: "m6", points: true },
        { name: "unigram entropy", values: even, text: four, colour: "mark", dash: [6, 4] }].filter(Boolean);
    return [
        section("Loss", ["Nats per token. Drag over a chart to zoom in", ...rest].join("; ") + ".", lines({ xs, series: losses, label: "loss" }),
            h("p", { class: "note" }, term("training loss", "loss"), ", ", term("unigram entropy"))),
        h("div", { class: "pair" },
            section("Gradient norm", null, lines({ xs, series: [{ name: "gradient norm", values: run.series.grad_norm, text: figure, colour: "m2" }], label: "gradient norm" }),
                h("p", { class: "note" }, term("gradient norm"), " before clipping.")),
            section("Learning rate", null, lines({ xs, series: [{ name: "learning rate", values: run.series.lr, text: (value) => value.toExponential(2), colour: "m3" }], label: "learning rate" }))),
        section("Time of a step", "The first step touches all memory for the first time.", lines({
            xs, unit: " s", label: "seconds of a step",
            series: [{ name: "measured", values: run.series.seconds, text: seconds, colour: "m5" },
                { name: "predicted", values: xs.map(() => run.predicted_step_seconds), text: seconds, colour: "mark", dash: [6, 4] }],
        })),
    ];
}

function load(report) {
    const series = report.run?.series, hottest = series && series.hottest_worst.length === series.step.length && series.step.length > 0;
    if (!report.experts && !hottest) return null;
    return section("Load of experts", h("span", null, term("hottest", "hottest expert"), ": its tokens over the mean expert's, of one layer."),
        hottest && lines({
            xs: series.step, label: "tokens of the hottest expert over the mean", unit: " ×",
            series: [{ name: "worst layer", values: series.hottest_worst, text: (value) => value.toFixed(2), colour: "m6" },
                { name: "mean layer", values: series.hottest_mean, text: (value) => value.toFixed(2), colour: "m1" }],
        }),
        report.experts && experts(report.experts));
}

function byKind(both) {
    const rows = both.by_kind.map((kind) => ({ ...kind }));
    const sum = (side) => rows.reduce((total, row) => total + row[side], 0);
    rows.push({ kind: "waiting", count: null, predicted_seconds: both.predicted_step_seconds - sum("predicted_seconds"), measured_seconds: both.measured_step_seconds - sum("measured_seconds") });
    const most = Math.max(...rows.flatMap((row) => [row.predicted_seconds, row.measured_seconds]));
    const bar = (name, value) => h("span", { class: "bar " + name, style: { width: `${Math.max(0, (100 * value) / most)}%` } });
    return table({
        caption: "busy time by kind of operation, predicted and measured", rows,
        columns: [
            { head: "kind", left: true, sort: (row) => row.kind, show: (row) => term(row.kind) },
            { head: "count", sort: (row) => row.count ?? -1, show: (row) => (row.count === null ? "" : count(row.count)) },
            { head: "predicted", sort: (row) => row.predicted_seconds, show: (row) => seconds(row.predicted_seconds) },
            { head: "measured", sort: (row) => row.measured_seconds, show: (row) => seconds(row.measured_seconds) },
            { head: "predicted/measured", sort: (row) => row.predicted_seconds / row.measured_seconds, show: (row) => ratio(row.predicted_seconds, row.measured_seconds) },
            { head: "of step", sort: (row) => row.measured_seconds, show: (row) => percent(row.measured_seconds / both.measured_step_seconds) },
            { head: "", show: (row) => h("span", { class: "two" }, bar("predicted", row.predicted_seconds), bar("measured", row.measured_seconds)) },
        ],
    });
}

function widest(both) {
    return table({
        caption: "operations furthest apart", rows: both.widest,
        columns: [
            { head: "kind", left: true, show: (row) => row.kind },
            { head: "rank", sort: (row) => row.rank, show: (row) => String(row.rank) },
            { head: "layer", sort: (row) => row.layer, show: (row) => (row.layer < 0 ? "none" : String(row.layer)) },
            { head: "phase", left: true, show: (row) => row.phase },
            { head: "predicted", sort: (row) => row.predicted_seconds, show: (row) => seconds(row.predicted_seconds) },
            { head: "measured", sort: (row) => row.measured_seconds, show: (row) => seconds(row.measured_seconds) },
        ],
    });
}

export function runView(report) {
    const { run, comparison: both } = report;
    const longest = both ? Math.max(both.predicted_step_seconds, both.measured_step_seconds) : 0;
    return h("article", null,
        h("h1", { tabindex: "-1" }, `${planTitle(report.plan)}, as it ran`), choices(report.plan, report.choices), runCards(report),
        run && h("p", { class: "note" }, `${count(run.steps)} steps on ${run.ranks} ${run.backend === "cuda" ? "GPUs" : "ranks of CPU cores"}, ${count(run.tokens)} tokens.`),
        !both && h("p", { class: "note" }, "No step was recorded, so that nothing measured stands beside the prediction."),
        learning(run), load(report),
        both && section("Predicted beside measured, by kind of operation", "Busy time of one step, mean over the ranks. Waiting is the rest of the step: for peers, for a core, for the host, and the pipeline's bubble.", byKind(both)),
        section(both ? "Both timelines" : "The predicted timeline", both ? "One step of the first rank of every stage, on one scale of time: predicted above, measured below." : null,
            both && h("h3", null, "predicted"), pipeline(report.predicted, longest), both && h("h3", null, "measured"), both && pipeline(report.measured, longest)),
        both?.widest.length > 0 && section("Furthest apart", "Single operations whose busy time differs most.", widest(both)),
        origin(report, report.plan, run?.command !== report.command && run?.command));
}
