// Words of the page with their meanings; a word that is shown stands in the glossary at the end of the page.
import { h } from "./dom.js";

const meanings = {
    "TFLOPS/GPU": "Model FLOPs per second and GPU: causal attention at half, no recomputation and no router, output head and multi-token prediction counted.",
    MFU: "Model FLOPs utilization: the time that the model's FLOPs take at the precision's peak, over the step time.",
    step: "One optimizer step over the whole global batch.",
    "tokens/s/GPU": "Tokens of the global batch per second, over the number of GPUs.",
    GiB: "1024³ bytes. Of a plan: the peak of the GPU that holds most, with context and communicators.",
    interval: "Where the true figure lies in the named share of cases, by how far predictions of published runs were off.",
    equal: "Plans that cannot be told apart: published pairs that differ like these are off by more than their difference.",
    TP: "Tensor parallelism: matrices of a layer are split over GPUs.",
    CP: "Context parallelism: the tokens of a sequence are split over GPUs.",
    DP: "Data parallelism: sequences are split over GPUs, which reduce their gradients.",
    PP: "Pipeline parallelism: layers are split into stages on different GPUs.",
    VPP: "Model chunks of each pipeline stage, which take turns.",
    EP: "Expert parallelism: experts are spread over GPUs and tokens travel to them.",
    ETP: "Tensor parallelism within experts.",
    MBS: "Sequences of one micro-batch.",
    GBS: "Sequences of one step of all GPUs.",
    recompute: "Modules whose activations are dropped and computed again in the backward pass.",
    offload: "Modules whose activations wait in the host's memory.",
    compute: "Computing, recomputation apart.",
    bubble: "Time in which a pipeline stage has nothing to do.",
    host: "The GPU waits for the host to issue operations.",
    neighbours: "What residuals of published runs nearby add to the step, or take from it.",
    exposed: "Communication while nothing computes on the same GPU.",
    busy: "Time in which such operations run, whatever runs beside them.",
    "at peak": "FLOPs or bytes at the machine's rate, whichever takes longer.",
    products: "Matrix products of dense operands.",
    "grouped products": "Matrix products of experts, many small ones as one operation.",
    rows: "Operations that move or sum rows of tokens: permutation, dispatch and combination at home.",
    "below peak": "Time of a class of operations beyond what it takes at the machine's peak rate.",
    "saved activations": "What the forward pass keeps for the backward pass.",
    workspace: "Tensors that live within one slot.",
    gradients: "Gradients of all weights of the GPU.",
    optimizer: "Master weights and moments.",
    inputs: "Tokens, labels and positions.",
    "context and communicators": "What the driver, loaded kernels and communication buffers take outside of the arena.",
    reserved: "Bytes of the arena that is laid out before the run; with gaps between tensors that live at different times.",
    forward: "A slot that computes a chunk's output for one micro-batch.",
    backward: "A slot that computes a chunk's gradients for one micro-batch.",
    dgrad: "The half of a backward that computes gradients of activations.",
    wgrad: "The half of a backward that computes gradients of weights.",
    begin: "What a rank does before its first slot.",
    finish: "Reduction of gradients and the optimizer's update.",
    sure: "Probability that the sign of the gain is right, by pairs of published runs.",
    load: "Tokens of the fullest ranks over those of the mean rank.",
    headroom: "Share of a GPU's memory that plans leave free.",
    pin: "A plan field that the search may not choose.",
    loss: "Mean cross-entropy over the tokens of a global batch that count, nats per token.",
    "validation loss": "The loss over text that is not trained on.",
    "unigram entropy": "The loss of a model that knows how often each token occurs and nothing else: below it something was learned.",
    "gradient norm": "Root of the sum of squares of all gradients, over all ranks.",
    "predicted/measured": "The predicted figure over the measured one; 1.00 is met exactly.",
    "hottest expert": "The expert of a layer that most tokens are sent to.",
    waiting: "Time in which a rank runs no operation: it waits for peers, for a core or for the host.",
    stack: "A software generation: what it offers and how efficiently.",
};
const shown = new Set();

// The text with its first known word, as a link to the glossary.
export function term(text, key = text) {
    if (!(key in meanings)) {
        const ending = Object.keys(meanings).find((word) => text.endsWith(" " + word));
        if (!ending) return document.createTextNode(text);
        key = ending;
    }
    shown.add(key);
    return h("a", { class: "term", href: "#term-" + key.replace(/\W+/g, "-"), title: meanings[key] }, text);
}

export function glossary() {
    const list = h("dl");
    let filled = -1;
    const fill = () => {
        if (filled === shown.size) return; // a focused entry stays where it is
        filled = shown.size;
        list.replaceChildren(
            ...[...shown].sort((a, b) => a.localeCompare(b, "en")).flatMap((word) => [
                h("dt", { id: "term-" + word.replace(/\W+/g, "-"), tabindex: "-1" }, word),
                h("dd", null, meanings[word]),
            ]),
        );
    };
    fill();
    const frame = h("details", { class: "glossary" }, h("summary", null, "Glossary"), list);
    document.addEventListener("click", (event) => {
        const link = event.target.closest?.("a.term");
        if (!link) return;
        event.preventDefault();
        fill();
        frame.open = true;
        const entry = document.getElementById(link.getAttribute("href").slice(1));
        entry?.scrollIntoView({ block: "center" });
        entry?.focus({ preventScroll: true });
    });
    frame.addEventListener("toggle", fill);
    return frame;
}
