#!/usr/bin/env python3
"""Writes tools/python/moe_plan/documents.py: a dataclass for every object of the documents that the package returns.

    tools/python/make_documents.py            # rewrites the file from docs/schemas
    tools/python/make_documents.py --check    # exit status 1 where the file would change
"""
import json
import keyword
import pathlib
import re
import sys
import textwrap

HERE = pathlib.Path(__file__).resolve().parent
SCHEMAS = HERE.parents[1] / "docs/schemas"
MADE = HERE / "moe_plan/documents.py"

DOCUMENTS = ["search", "replay", "explain", "launch", "launch-engine", "import", "compare", "compare-log", "compare-profile",
             "validate", "show-models", "show-model", "show-hardware-list", "show-hardware", "show-stacks", "show-stack", "show-plan"]
METHODS = re.findall(r"    def (\w+)\(", (HERE / "moe_plan/document.py").read_text())
SCALARS = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "None"}

HEAD = '''"""The documents of the verbs as dataclasses. Written by tools/python/make_documents.py from docs/schemas; a test holds it to them."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from .document import Document
'''

TAIL = """

# What a document's field `schema` says it is.
BY_SCHEMA: dict[str, type[Document]] = {{
{}}}
"""


def camel(name):
    return "".join(word[:1].upper() + word[1:] for word in re.split(r"[^A-Za-z0-9]+", name))


def singular(name):
    """The name of one item of a list; releases and others that only add an s lose it."""
    for ending, one in (("Axes", "Axis"), ("sses", "ss"), ("ies", "y"), ("ss", "ss"), ("s", "")):
        if name.endswith(ending):
            return name[: len(name) - len(ending)] + one
    return name


def attribute(name):
    """The field's name as Python takes it, and beside the methods of Document."""
    name = re.sub(r"\W", "_", name)
    return name + "_" if keyword.iskeyword(name) or name in METHODS else name


class Classes:
    def __init__(self):
        self.schemas = {file.stem: json.loads(file.read_text()) for file in sorted(SCHEMAS.glob("*.json"))}
        self.texts = {}  # by class name, in the order in which they may stand

    def resolved(self, schema, home, name):
        """The schema behind a reference, the document it stands in, and the class name that it has there."""
        while "$ref" in schema:
            file, _, path = schema["$ref"].partition("#")
            home = file.removesuffix(".json") or home
            target = self.schemas[home]
            for step in filter(None, path.split("/")):
                target = target[step]
            last = path.rpartition("/")[2]
            name = camel(last if home == "common" else f"{home} {last}".strip())
            schema = target
        return schema, home, name

    def type_of(self, schema, home, name):
        schema, home, name = self.resolved(schema, home, name)
        if "const" in schema:
            return f"Literal[{json.dumps(schema['const'])}]"
        if "enum" in schema:
            words = ", ".join(json.dumps(word) for word in schema["enum"] if word is not None)
            return f"Literal[{words}]" + (" | None" if None in schema["enum"] else "")
        kinds = schema.get("type", [])
        kinds = [kinds] if isinstance(kinds, str) else kinds
        parts = [self.part(kind, schema, home, name) for kind in kinds]
        return " | ".join(parts) if parts and "Any" not in parts else "Any"

    def part(self, kind, schema, home, name):
        if kind == "array":
            return f"list[{self.type_of(schema['items'], home, singular(name)) if 'items' in schema else 'Any'}]"
        if kind != "object":
            return SCALARS[kind]
        if "properties" in schema and schema.get("additionalProperties", True) is False:
            self.add(name, schema, home)
            return name
        rest = schema.get("additionalProperties")
        inner = self.type_of(rest, home, singular(name)) if isinstance(rest, dict) and "properties" not in schema else "Any"
        return f"dict[str, {inner}]"

    def add(self, name, schema, home):
        if name in self.texts:
            return
        self.texts[name] = ""  # refers to itself, perhaps
        lines = ["@dataclass(kw_only=True, repr=False)", f"class {name}(Document):"]
        lines += docstring(schema["description"])
        for key, value in schema["properties"].items():
            kind = self.type_of(value, home, name + camel(key))
            inner = self.resolved(value, home, name)[0]
            lines.append("")
            lines.append(f"    {attribute(key)}: {kind}{default(key, kind, key in schema.get('required', []))}")
            lines += docstring(value.get("description", inner.get("description", key)) + unit(inner))
        del self.texts[name]
        self.texts[name] = "\n".join(lines) + "\n"


def default(key, kind, required):
    named = f'metadata={{"json": "{key}"}}' if attribute(key) != key else ""
    if required:
        return f" = dataclasses.field({named})" if named else ""
    optional = "" if kind == "Any" or kind.endswith("| None") else " | None"
    return f"{optional} = " + (f"dataclasses.field(default=None, {named})" if named else "None")


def unit(schema):
    name = schema.get("x-unit", "1")
    return "" if name == "1" else f" [{name}]"


def docstring(text):
    text = text[:1].upper() + text[1:]
    lines = textwrap.wrap(text.replace("\\", "\\\\"), 110)
    lines[-1] += '"""' if not lines[-1].endswith('"') else ' """'
    return ['    """' + lines[0], *("    " + line for line in lines[1:])]


def made():
    classes = Classes()
    for name in DOCUMENTS:
        classes.type_of({"$ref": name + ".json"}, name, camel(name))
    kinds = {classes.schemas[name]["properties"]["schema"]["const"]: camel(name) for name in DOCUMENTS}
    table = "".join(f'    "{schema}": {kind},\n' for schema, kind in kinds.items())
    return HEAD + "".join("\n\n" + text for text in classes.texts.values()) + TAIL.format(table)


def main(arguments):
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    text = made()
    if not arguments:
        MADE.write_text(text)
    elif not MADE.exists() or MADE.read_text() != text:
        print(f"{MADE.relative_to(HERE.parents[1])}: run tools/python/make_documents.py, the schemas say something else")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
