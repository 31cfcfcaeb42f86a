#!/usr/bin/env python3
"""Writes the tables of docs/reference that follow from the schemas in this folder.

    docs/schemas/tables.py            # rewrites docs/reference/documents.md and the tables of docs/reference/plan.md
    docs/schemas/tables.py --check    # exit status 1 and the names of the files that would change
"""
import json
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
REFERENCE = HERE.parent / "reference"
BEGIN, END = "<!-- tables.py writes from here -->", "<!-- tables.py wrote to here -->"

PRINTED = ["search", "replay", "explain", "execute", "evaluate", "generate", "compare", "compare-log", "compare-profile", "validate", "anchor", "tokenize", "export", "launch", "launch-engine", "import",
           "show-models", "show-model", "show-hardware-list", "show-hardware", "show-stacks", "show-stack", "show-plan", "ui", "completion", "man"]
FILES = ["plan", "report", "run-report", "hardware", "model", "stack", "anchored-stack", "coefficients", "checkpoint", "trace", "measured", "residuals", "neighbours"]

INTRODUCTION = """# Documents

Every JSON document that `moe-plan` prints or writes has a schema (JSON Schema, draft 2020-12) in `docs/schemas`.
Its field `schema` names the schema and its version, such as `moe-plan/search/1`.
The version grows when a field changes its meaning or goes away; a new field leaves it as it is.
Readers accept files without `schema`, which is how they were written before it existed, and refuse another one than theirs.
`docs/schemas/tables.py` makes this page; a test holds it to the schemas and the documents to them.

Fields in the tables are paths: `plans[].fits` is the field `fits` of each element of the list `plans`.
`pruned.*` is any field of `pruned`.
A field with `?` may be missing. Fractions are fractions, not per cent; GiB are 2^30 bytes.
"""

RUN_DIRECTORY = """## The run directory

`execute --run-dir DIR` keeps the record of one run in these files.
The folder is made where it is missing, and files of an earlier run are removed first.
Of several processes, the one of rank 0 writes.

| file | holds | written |
|---|---|---|
| `plan.json` | the plan that ran: that of the command with what its options set in place of fields ([plan](plan.md)) | before the first step |
| `predicted.json` | the simulated timeline of a step ([trace](#trace)) | before the first step |
| `measured.json` | the measured timeline of a step, of all ranks; missing where none was recorded ([trace](#trace)) | behind the last step |
| `run.json` | the steps, as `execute --json` prints them ([execute](#execute)) | behind the last step |
| `routing.csv` | tokens by MoE layer and expert, where tokens are counted ([CSV](csv.md#routing)) | behind the last step |

`compare DIR` reads the two timelines, with `--report` also `run.json` and `routing.csv`.
`calibrate --runs DIR` reads the measured one with the plan inside of it.
`search --fix routing=DIR/routing.csv` plans for the experts' loads.

## The history

`execute --metrics DIR` appends a line to `DIR/metrics.jsonl` as each step ends, and writes the same figures as events for TensorBoard.
`--resume` goes on with the folder: lines of steps that are taken again move to `metrics.replaced.jsonl`.
Each line is a JSON object without a `schema`.
It holds the fields of a step of `run.json` ([execute](#execute), `steps[]`), null where a figure is no number, and these:

| field | meaning | unit |
|---|---|---|
| `valid_loss`? | loss over `--valid-data` behind the step | nats/token |
| `memory_gib` | what the fullest rank holds | GiB |
| `time` | seconds since 1970 as the step ended | s |
"""


def load():
    return {file.stem: json.loads(file.read_text()) for file in sorted(HERE.glob("*.json"))}


class Tables:
    def __init__(self, schemas):
        self.schemas = schemas

    def resolved(self, schema, home):
        """The schema that `schema` refers to, its own words first, and the document that further references start from."""
        while "$ref" in schema:
            file, _, path = schema["$ref"].partition("#")
            home = file.removesuffix(".json") or home
            target = self.schemas[home]
            for step in filter(None, path.split("/")):
                target = target[step]
            schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
        return schema, home

    @staticmethod
    def kind(schema):
        """Type and unit in words."""
        if "const" in schema:
            return f"`{schema['const']}`"
        unit = schema.get("x-unit")
        after = f", {unit}" if unit and unit != "1" else ""
        if "x-type" in schema:
            return schema["x-type"] + after
        names = {"integer": "whole number", "string": "text", "boolean": "true or false", "array": "list"}
        types = schema["type"]
        types = types if isinstance(types, list) else [types]
        return " or ".join(names.get(one, one) for one in types) + after

    def rows(self, schema, home, path=""):
        """(path, type, description) of every field below `schema`; documents inside of documents are named, not repeated."""
        for name, value in schema.get("properties", {}).items():
            here = f"{path}.{name}" if path else name
            yield from self.field(value, home, here, name not in schema.get("required", []))
        rest = schema.get("additionalProperties")
        if isinstance(rest, dict):
            yield from self.field(rest, home, f"{path}.*" if path else "*", False)

    def field(self, schema, home, path, optional):
        document = schema.get("$ref", "").removesuffix(".json")
        mark = "`" + path + "`" + ("?" if optional else "")
        if document in self.schemas:
            yield mark, f"[{document}]({'plan.md' if document == 'plan' else '#' + document})", schema["description"]
            return
        inner, home = self.resolved(schema, home)
        part = self.shared(schema, inner)
        yield mark, part or self.kind(inner), inner["description"]
        if part:
            return
        yield from self.rows(inner, home, path)
        if "items" in inner:
            item, item_home = self.resolved(inner["items"], home)
            part = self.shared(inner["items"], item)
            if part:
                yield f"`{path}[]`", part, item["description"]
            else:
                yield from self.rows(item, item_home, path + "[]")

    @staticmethod
    def shared(schema, inner):
        """A link to the object of several fields that a schema refers to, which has a table of its own."""
        name = schema.get("$ref", "").rpartition("/")[2]
        return f"[{name}](#{name})" if name and "properties" in inner else ""

    def section(self, name):
        schema = self.schemas[name]
        yield f"## {name}"
        yield ""
        yield schema["description"]
        yield f"Schema: [`{name}.json`](../schemas/{name}.json). Written by: {schema['x-written-by']}."
        yield ""
        if name == "plan":
            yield "[plan.md](plan.md) has its fields."
        else:
            inner, home = self.resolved(schema["items"], name) if schema["type"] == "array" else (schema, name)
            yield from table(["field", "type, unit", "meaning"], self.rows(inner, home, "[]" if inner is not schema else ""))
        yield ""

    def index(self):
        for name in PRINTED + FILES:
            yield f"[{name}](#{name})", self.schemas[name]["x-written-by"]

    def parts(self):
        """Objects that several documents hold."""
        yield from ["## Shared parts", "", "Objects that fields of several documents refer to.", ""]
        for home in ("common", "validate"):
            for name, schema in self.schemas[home]["$defs"].items():
                if "properties" in schema:
                    yield from [f"### {name}", "", schema["description"][0].upper() + schema["description"][1:] + ".", ""]
                    yield from table(["field", "type, unit", "meaning"], self.rows(schema, home))
                    yield ""

    def documents(self):
        lines = [INTRODUCTION, *table(["schema", "written by"], self.index()), "", RUN_DIRECTORY]
        for name in PRINTED + FILES:
            lines += self.section(name)
        lines += self.parts()
        return "\n".join(lines).rstrip() + "\n"

    def plan(self):
        """The tables of plan.md: all fields but model and hardware, and the values of those that are words."""
        fields, values = [], []

        def walk(schema, path):
            for name, value in schema["properties"].items():
                here = f"{path}.{name}" if path else name
                if "$ref" in value:
                    document = value["$ref"].removesuffix(".json")
                    fields.append((f"`{here}`", "", f"[{document}](documents.md#{document})", "", value["description"]))
                    continue
                default = value.get("default", "" if name in schema["required"] else "left out")
                shown = f"`{json.dumps(default)}`" if default not in ("", "left out") or "default" in value else default
                fix = f"`{value['x-fix']}`" if "x-fix" in value else ""
                fields.append((f"`{here}`", fix, self.kind(value), shown, value["description"]))
                words = value.get("enum") or value.get("items", {}).get("enum")
                if words:
                    values.append((f"`{here}`", ", ".join(f"`{word}`" for word in words)))
                if value.get("type") == "object":
                    walk(value, here)

        walk(self.schemas["plan"], "")
        return "\n".join([*table(["field", "`--fix`", "type, unit", "default", "meaning"], fields), "",
                          *table(["field", "values"], values)])


def table(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def between(text, tables):
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        sys.exit(f"docs/reference/plan.md: the lines '{BEGIN}' and '{END}' are missing")
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def main(arguments):
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    tables = Tables(load())
    plan = REFERENCE / "plan.md"
    wanted = {REFERENCE / "documents.md": tables.documents(), plan: between(plan.read_text(), tables.plan())}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if arguments:
        for path in stale:
            print(f"{path.relative_to(HERE.parents[1])}: run docs/schemas/tables.py, the schemas say something else")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
