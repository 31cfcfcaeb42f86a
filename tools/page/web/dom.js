// Makes elements: h(name, attributes, ...children), and svg() likewise for drawings.

function filled(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes ?? {})) {
        if (value === undefined || value === null || value === false) continue;
        if (typeof value === "function") element.addEventListener(name, value);
        else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
        else element.setAttribute(name, value === true ? "" : value);
    }
    element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
    return element;
}

export function h(name, attributes, ...children) {
    return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes, ...children) {
    return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

export function section(title, note, ...children) {
    return h("section", null, h("h2", null, title), note && h("p", { class: "note" }, note), ...children);
}

// A colour of the style sheet, which knows light and dark.
export function colour(name) {
    return getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
}

// Calls draw(width) now that the element stands in the page, and whenever its width or the colour scheme changes.
export function onWidth(element, draw) {
    let last = 0;
    const again = (force) => {
        const width = Math.floor(element.clientWidth);
        if (width > 0 && (force || width !== last)) draw((last = width));
    };
    new ResizeObserver(() => again(false)).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => again(true));
}

// Offers a text as a file.
export function download(name, text, type = "application/json") {
    const link = h("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    document.body.append(link);
    link.click();
    link.remove();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
