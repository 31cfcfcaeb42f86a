// Asks the server that served this page: one request, answered by events until its result.

const token = new URLSearchParams(location.search).get("token") ?? "";

// calls: {progress(text), note(text), signal}. Resolves to the result; throws {line, status} where it was refused.
export async function ask(name, body, calls = {}) {
    const response = await fetch("/api/" + name, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Moe-Plan-Token": token },
        body: JSON.stringify(body),
        signal: calls.signal,
    });
    if (!response.ok) throw { line: (await response.text()).trim(), status: response.status };
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "", result;
    for (;;) {
        const { done, value } = await reader.read();
        if (done) break;
        text += value;
        const events = text.split("\n\n");
        text = events.pop();
        for (const event of events) {
            const kind = /^event: (.*)$/m.exec(event)?.[1];
            const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
            if (kind === "progress") calls.progress?.(data);
            else if (kind === "note") calls.note?.(data);
            else if (kind === "refused") throw JSON.parse(data);
            else if (kind === "result") result = JSON.parse(data);
        }
    }
    if (result === undefined) throw { line: "the server ended before it had answered", status: 1 };
    return result;
}

export function lineOf(error) {
    return error.name === "AbortError" ? "cancelled" : (error.line ?? error.message).replace(/^moe-plan: /, "");
}
