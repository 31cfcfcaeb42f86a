#!/usr/bin/env python3
"""Text and loss masks of `moe-plan tokenize --chat` against Jinja, set up as Hugging Face's transformers do.

compare.py MOE_PLAN [TEMPLATE..]: templates of the constructs that published ones have, or those of the files given,
each with conversations that a generator draws. Exits 77 (skipped) without Jinja."""
import json
import os
import random
import struct
import subprocess
import sys
import tempfile

try:
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    print(f"skipped: {error}; pip install jinja2 to run this test")
    sys.exit(77)  # Meson's exit status for a skipped test

SPECIAL = ["<|begin|>", "<|start|>", "<|end|>", "<|turn|>", "</s>", "[INST]", "[/INST]"]
TEMPLATES = {
    "roles": """{% for m in messages %}{{ '<|start|>' + m['role'] + '\\n' + m.content | trim + '<|end|>' + '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}
""",
    "blocks": """
{{- bos_token }}
{#- A comment, with {{ braces }}. #}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0].content.strip() %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "" %}
    {%- set rest = messages %}
{%- endif %}
  {% if system %}
    {{ "<|turn|>system: " ~ system ~ "\\n" }}
  {% endif %}
    {%+ for m in rest if m.role != 'tool' and not (m.role is not string) %}
<|turn|>{{ m.role }}: {{ m["content"] | replace("  ", " ") }}<|end|>{{ "" if loop.last else "\\n" }}
    {%- endfor +%}

{%- if add_generation_prompt %}

<|turn|>assistant:{{ ' ' }}
{%- endif %}
""",
    "turns": """{{ bos_token }}{% set ns = namespace(system='', n=0) %}
{%- for m in messages -%}
{%- if m.role == 'system' %}{% set ns.system = ns.system + m.content + '\\n\\n' %}
{%- elif m.role == 'user' %}{% set ns.n = ns.n + 1 %}[INST] {{ ns.system if ns.n == 1 else '' }}{{ m.content }}[/INST]
{%- elif m.role == 'assistant' %} {% generation %}{{ m.content.lstrip() + eos_token }}{% endgeneration %}
{%- else %}{{ raise_exception('no role ' + m.role) }}{% endif %}
{%- endfor %}""",
    "thoughts": """{%- if tools %}{{- '<|start|>tools' }}{% for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}{{ '<|end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for m in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and m.role == "user" and m.content is string and not(m.content.startswith('<r>') and m.content.endswith('</r>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content if m.content is string else '' %}
    {%- if m.role == "assistant" %}
        {%- set thought = '' %}
        {%- if m.thought is defined and m.thought is not none %}
            {%- set thought = m.thought %}
        {%- elif '</t>' in content %}
            {%- set thought = content.split('</t>')[0].rstrip('\\n').split('<t>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</t>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thought)) %}
            {{- '<|start|>' + m.role + '\\n<t>\\n' + thought.strip('\\n') + '\\n</t>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|start|>' + m.role + '\\n' + content }}
        {%- endif %}
        {%- for call in m.get('calls', []) %}{{ loop.index ~ '/' ~ loop.length ~ ' ' ~ call | tojson }}{% endfor %}
        {{- '<|end|>\\n' }}
    {%- else %}
        {{- '<|start|>' + m.role + '\\n' + content + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- if enable_thinking is defined and enable_thinking is false %}{{- '<t>\\n\\n</t>\\n\\n' }}{%- endif %}{%- endif %}""",
    "arithmetic": """{% set x = [1, 2.5, -3, 7] %}{% set d = {"a": 1, 'b': [true, none]} %}
{% for k, v in d.items() %}{{ k }}={{ v | tojson }};{% endfor %}
{{ 7 // 2 }} {{ -7 // 2 }} {{ -7 % 4 }} {{ 2 * 3 ~ 4 }} {{ d | tojson(indent=2) }} {{ '' | default('d', boolean=true) }} {{ [{'a': 1}, {}, {'a': 0}] | selectattr('a', 'defined') | list | length }}{% if today is defined %}{{ today() }}{% endif %} {{ (1 + 2) * 3 }} {{ x[1] }} {{ x[-1] }} {{ x[1:3] | length }} {{ 1 / 4 }}
{{ 'b' in d and 'c' not in d }} {{ 3 > 2 }} {{ x[9] is defined }} {{ nothing | default('none') }} {{ '' or 'or' }} {{ 'caf\u00e9'[::-1] }}
{{ 'a,b,,c'.split(',') | join('|') }} {{ ' a  b '.split() | length }} {{ 'Ab' | upper }}{{ 'Ab'.lower() }} {{ "it's" }} {{ 'x' 'y' }}
{% for i in range(2, 5) %}{% if i % 2 == 0 %}{{ i }}{% elif i is odd %}<{{ i }}>{% endif %}{{ loop.previtem is defined }}{% endfor %}
{% set a = 1 %}{% for i in range(2) %}{% set a = 2 %}{{ a }}{% endfor %}{{ a }}{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}
""",
}


def drawn(rng):
    """A record of messages."""
    words = ["hello", " ", "  ", "\n", "\u00e9t\u00e9", "\u65e5\u672c", '"quoted"', "<t>", "</t>", "a\\b", "{{ x }}", "\u3000", "\t", "<r>"]
    text = lambda: "".join(rng.choice(words) for _ in range(rng.randint(1, 8)))
    messages = [{"role": "system", "content": text()}] if rng.random() < 0.5 else []
    for _ in range(rng.randint(1, 3)):
        messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        if rng.random() < 0.3:
            messages[-1]["thought"] = rng.choice([None, text()])
        if rng.random() < 0.3:
            messages[-1]["calls"] = [{"name": text(), "arguments": {"x": rng.randint(-9, 9), "y": [1.5, None, True, {}]}}]
    record = {"messages": messages}
    if rng.random() < 0.3:
        record["tools"] = [{"name": text(), "parameters": {"n": {"type": "integer"}, "e": []}}]
    if rng.random() < 0.2:
        record["enable_thinking"] = rng.random() < 0.5
    return record


def environment():
    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            return jinja2.nodes.Scope(parser.parse_statements(["name:endgeneration"], drop_needle=True), lineno=line)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    env.filters["tojson"] = lambda x, ensure_ascii=False, indent=None: json.dumps(x, ensure_ascii=ensure_ascii, indent=indent)
    env.globals["raise_exception"] = refuse
    return env


def byte_tokenizer(folder):
    """Ids below 256 are bytes, those behind them special tokens."""
    vocab, shifted = {}, 0
    for byte in range(256):
        printable = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        vocab[chr(byte if printable else 256 + shifted)] = byte
        shifted += not printable
    with open(os.path.join(folder, "tokenizer.json"), "w") as file:
        json.dump({"added_tokens": [{"id": 256 + i, "content": text, "special": True} for i, text in enumerate(SPECIAL)],
                   "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                   "model": {"type": "BPE", "vocab": vocab, "merges": []}}, file)


def expected(template, record):
    """Documents as lists of (text, whether it counts)."""
    documents, done = [], None
    for i, message in enumerate(record["messages"]):
        if message["role"] != "assistant":
            continue
        variables = {"bos_token": "<|begin|>", "eos_token": "</s>", "tools": None, "documents": None, **record}
        prompt = template.render({**variables, "messages": record["messages"][:i], "add_generation_prompt": True})
        whole = template.render({**variables, "messages": record["messages"][:i + 1], "add_generation_prompt": False})
        if not whole.startswith(prompt):
            return None
        if done is None or not prompt.startswith(done):
            documents.append([])
            done = ""
        answer = whole[len(prompt):]
        documents[-1].append((prompt[len(done):], False))
        body = answer.rstrip(" \n\r\t")
        if any(body.endswith(text) for text in SPECIAL):
            documents[-1] += [(body, True), (answer[len(body):], False)]
        else:
            documents[-1].append((answer, True))
        done = whole
    return documents


def read(folder):
    """The same of what was written, by bytes."""
    with open(os.path.join(folder, "out.idx"), "rb") as file:
        index = file.read()
    count = struct.unpack_from("<Q", index, 18)[0]
    lengths = struct.unpack_from(f"<{count}i", index, 34)
    with open(os.path.join(folder, "out.bin"), "rb") as file:
        raw = file.read()
    with open(os.path.join(folder, "out.loss.bin"), "rb") as file:
        mask = file.read()
    ids, documents, at = struct.unpack(f"<{len(raw) // 2}H", raw), [], 0
    assert len(mask) == len(ids) == sum(lengths)
    for length in lengths:
        documents.append([(bytes([i]) if i < 256 else SPECIAL[i - 256].encode(), bool(m))
                          for i, m in zip(ids[at:at + length], mask[at:at + length])])
        at += length
    return documents


def flat(pieces):
    return [(byte, counts) for text, counts in pieces for byte in (text if isinstance(text, bytes) else text.encode())]


def check(moe_plan, name, source, rng):
    compared = split = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer(folder)
        with open(os.path.join(folder, "tokenizer_config.json"), "w") as file:
            json.dump({"bos_token": {"content": "<|begin|>"}, "eos_token": "</s>", "chat_template": source}, file)
        template, records, want = environment().from_string(source), [], []
        for _ in range(200):
            record = drawn(rng)
            try:
                documents = expected(template, record)
            except (jinja2.exceptions.TemplateError, TypeError):
                documents = None
            if documents is None:
                refused += 1
                continue
            records.append(record)
            want += documents
            compared += 1
            split += len(documents) > 1
        if not records:
            return f"{name}: Jinja refuses every record"
        with open(os.path.join(folder, "chat.jsonl"), "w") as file:
            file.write("".join(json.dumps(record, ensure_ascii=rng.random() < 0.5) + "\n" for record in records))
        run = subprocess.run([moe_plan, "tokenize", "chat.jsonl", "--chat", "--vocab", "tokenizer.json", "--out", "out"],
                             cwd=folder, capture_output=True, text=True)
        if run.returncode != 0:
            return f"{name}: {run.stderr}"
        got = read(folder)
    if len(got) != len(want):
        return f"{name}: {len(got)} documents, not {len(want)}"
    for i, (a, b) in enumerate(zip(got, want)):
        if flat(a) != flat(b):
            show = lambda pieces: repr(b"".join(bytes([byte]) for byte, _ in flat(pieces)))
            return f"{name}: document {i}:\n  {show(a)}\n  not\n  {show(b)}"
    print(f"{name}: {compared} conversations, {split} in several documents, {refused} that Jinja refuses left out")
    return None


def main():
    templates = dict(TEMPLATES)
    if len(sys.argv) > 2:
        templates = {path: open(path, encoding="utf-8").read() for path in sys.argv[2:]}
    rng = random.Random(1)
    faults = [fault for name, source in templates.items() if (fault := check(os.path.abspath(sys.argv[1]), name, source, rng))]
    print("\n".join(faults))
    sys.exit(1 if faults else 0)


main()
