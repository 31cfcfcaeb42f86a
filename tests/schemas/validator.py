"""Holds documents to the schemas of docs/schemas, and says where a changed document must be refused."""
import copy
import json
import pathlib

import jsonschema

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCHEMAS = {file.stem: json.loads(file.read_text()) for file in sorted((ROOT / "docs/schemas").glob("*.json"))}


def validator(name):
    """Schemas refer to each other by the names of their files."""
    files = {f"{stem}.json": schema for stem, schema in SCHEMAS.items()}
    try:
        from referencing import Registry, Resource
    except ImportError:  # jsonschema before 4.18
        resolver = jsonschema.RefResolver(base_uri="", referrer=SCHEMAS[name], store=files)
        return jsonschema.Draft202012Validator(SCHEMAS[name], resolver=resolver)
    registry = Registry().with_resources([(file, Resource.from_contents(schema)) for file, schema in files.items()])
    return jsonschema.Draft202012Validator(SCHEMAS[name], registry=registry)


def faults(name, document):
    return [f"{name} at {'/'.join(map(str, error.absolute_path)) or 'the top'}: {error.message[:300]}"
            for error in validator(name).iter_errors(document)]


def hold(name, document):
    found = faults(name, document)
    assert not found, "\n".join(found[:5])


def resolved(schema, home):
    """What a schema refers to, and the document that further references start from."""
    while "$ref" in schema:
        file, _, path = schema["$ref"].partition("#")
        home = file.removesuffix(".json") or home
        schema = SCHEMAS[home]
        for step in filter(None, path.split("/")):
            schema = schema[step]
    return schema, home


def closed_objects(schema, home, document, path=()):
    """Paths of the objects that may hold no other field than the schema names, with the fields that they need. Of a list
    and of fields with any name only the first counts."""
    schema, home = resolved(schema, home)
    if isinstance(document, list) and document and isinstance(schema.get("items"), dict):
        yield from closed_objects(schema["items"], home, document[0], (*path, 0))
    if not isinstance(document, dict):
        return
    if schema.get("additionalProperties") is False:
        yield path, schema.get("required", [])
    known, rest = schema.get("properties", {}), schema.get("additionalProperties")
    others = [key for key in document if key not in known][:1] if isinstance(rest, dict) else []
    for key in [*(key for key in document if key in known), *others]:
        yield from closed_objects(known.get(key, rest), home, document[key], (*path, key))


def at(document, path):
    for step in path:
        document = document[step]
    return document


def hold_to_changes(name, document):
    """Every closed object of the document is refused with an unknown field and without any field that it needs. Returns
    the number of changes tried."""
    check = validator(name)
    tried = 0
    for path, required in closed_objects(SCHEMAS[name], name, document):
        place = "/".join(map(str, path)) or "the top"
        changed = copy.deepcopy(document)
        at(changed, path)["unexpected"] = 1
        assert not check.is_valid(changed), f"{name}: an unknown field at {place} passes"
        tried += 1
        for key in required:
            changed = copy.deepcopy(document)
            del at(changed, path)[key]
            assert not check.is_valid(changed), f"{name}: {place} passes without {key}"
            tried += 1
    assert tried > 0, f"{name}: nothing could be changed"
    return tried
