// Numbers in the units that people read.

export function figure(value) {
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

export function seconds(value) {
    const size = Math.abs(value);
    if (size >= 1 || size === 0) return `${Number(value.toPrecision(4))} s`;
    if (size >= 1e-3) return `${Number((value * 1e3).toPrecision(4))} ms`;
    return `${Number((value * 1e6).toPrecision(4))} µs`;
}

export function gib(value) {
    return Math.abs(value) >= 1 || value === 0 ? value.toFixed(1) : String(Number(value.toPrecision(2)));
}

export function percent(share) {
    return `${(100 * share).toFixed(1)} %`;
}

export function signed(value, text) {
    return (value < 0 ? "−" : "+") + text(Math.abs(value));
}

export function count(value) {
    return Math.round(value).toLocaleString("en");
}
