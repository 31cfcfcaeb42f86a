#!/usr/bin/env python3
"""Holds what the command prints and writes, and every committed profile, to the schemas of docs/schemas.

    MOE_PLAN=build/tools/moe-plan tests/schemas/documents_test.py

Needs python3-jsonschema and python3-yaml; without them the test says so and counts as skipped (exit status 77).
"""
import csv
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib

try:
    import jsonschema
    import yaml
except ImportError:
    print("skipped: the documents are held to docs/schemas with python3-jsonschema and python3-yaml, which are not installed")
    sys.exit(77)

from suite import run
from validator import ROOT, SCHEMAS, faults, hold, hold_to_changes, resolved

COMMAND = os.environ.get("MOE_PLAN", "")
FOLDER = tempfile.TemporaryDirectory()
HERE = pathlib.Path(FOLDER.name)
SMALL = "--model tiny-qwen3-moe --hardware cpu-local --gpus 2 --gbs 4 --seq 64 --precision fp32"
GPUS = "--model Qwen3-30B-A3B --hardware h100 --gpus 16 --gbs 64 --seq 4096 --fix vpp=1 --fix tp=1 --fix cp=1 --fix etp=1"


def command(words, status=0):
    done = subprocess.run([COMMAND, *shlex.split(words)], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == status, f"moe-plan {words}: exit status {done.returncode}: {done.stderr[-500:]}"
    return done.stdout


def printed(words, name, status=0):
    """The document that a verb prints, held to its schema and to its name."""
    document = json.loads(command(words + " --json", status))
    assert next(iter(document)) == "schema" and document["schema"] == f"moe-plan/{name}/1", f"moe-plan {words}: {document.get('schema')}"
    hold(name, document)
    return document


def written(path):
    return json.loads((HERE / path).read_text())


def prepare():
    """What several cases start from: a dataset, a plan and a run of it."""
    (HERE / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 600)
    command("tokenize a.txt --out text")
    command(f"search {SMALL} --out plan.json")
    command("execute plan.json --data text --steps 3 --valid-data text --eval-batches 1 --run-dir run --checkpoint saved")


def test_schemas_are_sound():
    """Valid by the meta-schema; every field is described, every number has a unit, every reference leads somewhere."""

    def walk(schema, name, place):
        if "$ref" in schema:
            resolved(schema, name)
        elif "const" not in schema and "anyOf" not in schema:
            assert "type" in schema, f"{name}: {place}: no type"
            assert not {"number", "integer"} & set([schema["type"]] if isinstance(schema["type"], str) else schema["type"]) \
                or "x-unit" in schema or place.endswith("[]"), f"{name}: {place}: no unit"
        for key, value in schema.get("properties", {}).items():
            described = value.get("description") or resolved(value, name)[0].get("description")
            assert described and "\n" not in described, f"{name}: {place}.{key}: no description"
            walk(value, name, f"{place}.{key}")
        for key in ("items", "additionalProperties"):
            if isinstance(schema.get(key), dict):
                walk(schema[key], name, place + "[]")
        for key, value in schema.get("$defs", {}).items():
            walk(value, name, f"{place}.$defs.{key}")

    for name, schema in SCHEMAS.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["title"] and schema["description"].endswith("."), f"{name}: title and a sentence"
        walk({"type": "object", **schema}, name, name)


def test_names_are_those_of_the_program():
    stamped = {SCHEMAS[name]["properties"]["schema"]["const"] for name in SCHEMAS
               if "schema" in SCHEMAS[name].get("properties", {}) and name != "measured"}
    listed = set(re.findall(r'"(moe-plan/[a-z-]+/\d+)"', (ROOT / "planner/base/schema.hpp").read_text()))
    assert stamped == listed, f"docs/schemas and planner/base/schema.hpp differ: {sorted(stamped ^ listed)}"


def test_search():
    hold_to_changes("search", printed(f"search {SMALL} --top 2", "search"))
    money = "--price 2 --mtbf 50000 --tokens 1B --deadline 1e6"
    hold_to_changes("search", printed(f"search {SMALL} {money} --top 1", "search"))
    printed(f"search {GPUS.replace('--gpus 16', '--gpus 2,16')} --fix pp=1 --fix ep=8 --fix mbs=1 --price 2 --top 1", "search")


def test_plan():
    plan = written("plan.json")
    hold("plan", plan)
    assert plan["schema"] == "moe-plan/plan/1" and plan["hardware"]["schema"] == "moe-plan/hardware/1"
    hold_to_changes("plan", plan)
    # Every field away from its default, and a plan from before documents carried their schema.
    fixes = {"cuda_graph": "attn+moe_router", "capacity": "1.5", "paged_stash": "on", "aux_loss": "0.01", "recompute": "layernorm+moe_act",
             "offload": "optimizer", "precision": "fp8-blockwise", "bf16_layers": "1+1", "gradients": "bf16", "ep_overlap": "off"}
    command(f"search {GPUS} --fix ep=8 --out full.json " + " ".join(f"--fix {field}={value}" for field, value in fixes.items()))
    full = written("full.json")
    hold("plan", full)
    hold_to_changes("plan", full)
    for old in (plan, full):
        del old["schema"], old["hardware"]["schema"]
        hold("plan", old)
    (HERE / "old.json").write_text(json.dumps(plan))
    assert json.loads(command("replay old.json --json"))["step_seconds"] == json.loads(command("replay plan.json --json"))["step_seconds"]


def test_other_schemas_are_refused():
    """A file of another schema is bad input, and the message names both."""
    plan = written("plan.json")
    hardware = {**plan["hardware"], "schema": "moe-plan/stack/1"}
    for change, words in (({"schema": "moe-plan/plan/2"}, "moe-plan/plan/1"), ({"hardware": hardware}, "moe-plan/hardware/1")):
        (HERE / "other.json").write_text(json.dumps({**plan, **change}))
        done = subprocess.run([COMMAND, "replay", "other.json"], cwd=HERE, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and "schema = " in done.stderr, done.stderr


def test_stacks_name_their_schema_or_none():
    profiles = HERE / "profiles"
    shutil.copytree(ROOT / "profiles", profiles, ignore=shutil.ignore_patterns("measured"))
    stack = profiles / "stacks/moe-plan.json"
    known = json.loads(stack.read_text())
    for schema, status in (("moe-plan/stack/1", 0), ("moe-plan/plan/1", 2)):
        stack.write_text(json.dumps({"schema": schema, **known}))
        done = subprocess.run([COMMAND, *f"search {SMALL}".split()], cwd=HERE, capture_output=True, text=True,
                              env={**os.environ, "MOE_PLAN_PROFILES": str(profiles)})
        assert done.returncode == status and ("moe-plan/stack/1" in done.stderr) == (status == 2), done.stderr


def test_replay():
    own = printed("replay plan.json --trace t.json --report r.html", "replay")
    assert own["interval"] is None and own["trace"] == "t.json"
    hold_to_changes("replay", own)
    hold("trace", written("t.json"))
    hold_to_changes("trace", written("t.json"))
    command(f"search {GPUS} --fix routing=dirichlet:2 --out gpus.json")
    published = printed("replay gpus.json --report report.json", "replay")
    assert published["interval"]["low"] < published["interval"]["high"]
    hold_to_changes("replay", published)
    hold_to_changes("report", written("report.json"))
    command("replay plan.json --report own.json --set mbs=2")
    hold("report", written("own.json"))
    assert written("own.json")["explain"]["plan"]["mbs"] == 2 and written("own.json")["command"].startswith("moe-plan replay plan.json")


def test_execute_and_its_run_directory():
    document = printed("execute plan.json --data text --steps 3", "execute")
    hold_to_changes("execute", document)
    assert written("run/run.json")["schema"] == "moe-plan/execute/1"
    for file, name in (("plan", "plan"), ("run", "execute"), ("predicted", "trace"), ("measured", "trace")):
        hold(name, written(f"run/{file}.json"))
    rows = list(csv.reader((HERE / "run/routing.csv").open()))
    assert rows[0] == [f"expert {e}" for e in range(8)] and len(rows) == 5 and all(int(cell) >= 0 for row in rows[1:] for cell in row)


def test_execute_on_gpus():
    """Every field that a run may have; a test of tools/report holds the file to the program."""
    document = json.loads((ROOT / "tests/schemas/execute_on_gpus.json").read_text())
    hold("execute", document)
    hold_to_changes("execute", document)
    assert set(document) == set(SCHEMAS["execute"]["properties"])


def test_checkpoint_and_export():
    index = written("saved/step-00000003/index.json")
    assert index["schema"] == "moe-plan/checkpoint/1"
    hold("checkpoint", index)
    hold_to_changes("checkpoint", index)
    hold_to_changes("export", printed("export --checkpoint saved --out exported", "export"))
    hold("model", written("exported/config.json"))
    # An index from before documents carried their schema.
    path = HERE / "saved/step-00000003/index.json"
    path.write_text(path.read_text().replace('"schema":"moe-plan/checkpoint/1",', ""))
    assert "schema" not in written("saved/step-00000003/index.json")
    command("export --checkpoint saved --out again --json")


def test_evaluate_and_generate():
    command("export --checkpoint saved --out used")
    hold_to_changes("evaluate", printed("evaluate --model used --data text --seq 64 --batches 2", "evaluate"))
    hold_to_changes("generate", printed("generate --checkpoint saved --prompt 'The quick' --tokens 4", "generate"))


def test_compare():
    hold_to_changes("compare", printed("compare run --report report.json", "compare"))
    whole = written("report.json")
    hold_to_changes("run-report", whole)
    assert whole["run"]["series"]["step"] == [1, 2, 3] and whole["comparison"]["by_kind"] and len(whole["experts"]) == 4
    command("compare run/predicted.json run/measured.json --report report.json")
    timelines = written("report.json")
    hold("run-report", timelines)
    assert set(whole) - set(timelines) == {"run", "experts"}
    command("execute run/plan.json --data text --steps 2 --report report.json")
    hold("run-report", written("report.json"))
    assert set(written("report.json")) == set(whole)


def test_compare_with_other_engines():
    command(f"search {GPUS} --out gpus.json")
    for log in sorted((ROOT / "tests/tools/measured/logs").glob("*.log")):
        document = printed(f"compare gpus.json --log {log}", "compare-log")
    hold_to_changes("compare-log", document)
    seed = json.loads((ROOT / "tests/fuzz/seeds/chrome_trace/named.json").read_text())
    seed["distributedInfo"]["world_size"] = 16
    (HERE / "trace.json").write_text(json.dumps(seed))
    hold_to_changes("compare-profile", printed("compare gpus.json --profile trace.json", "compare-profile"))


def test_calibrate():
    """From a run: nothing is measured now."""
    profile = json.loads((ROOT / "profiles/hardware/cpu-local.json").read_text())
    (HERE / "base.json").write_text(json.dumps({**profile, "measured": {"gemm fp32": [[1e6, 1e-4]]}}))
    document = printed("calibrate --runs run --from base.json --out here.json", "hardware")
    assert document == written("here.json") and document["measured"]
    hold_to_changes("hardware", document)


def test_validate():
    """A row that is predicted and one that is skipped."""
    with (ROOT / "profiles/runs/papers.csv").open() as file:
        rows = list(csv.DictReader(file))
    predicted = next(row for row in rows if row["model"] == "Mixtral-8x22B" and row["status"] == "current" and row["gpus"] == "128")
    with (HERE / "runs.csv").open("w") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows([predicted, {**predicted, "run_id": "withdrawn", "status": "withdrawn"}])
    document = printed("validate runs.csv --improve", "validate")
    assert [row["skipped"] is None for row in document["rows"]] == [True, False] and len(document["improvements"]) == 1
    hold_to_changes("validate", document)
    document["rows"].reverse()
    hold_to_changes("validate", document)


def test_anchor():
    """A run of one's own, and the stack that has seen it."""
    (HERE / "own.csv").write_text("run_id,source,release,model,system,gpus,precision,gbs,mbs,seq_len,tp,pp,ep,status,tier,tflops_std\n"
                                  "mine,notes,1,Qwen3-30B-A3B,H100,16,BF16,512,1,4096,1,1,8,current,A,150\n")
    hold_to_changes("anchor", printed("calibrate --anchor own.csv --stack bridge-26.08 --out own.json", "anchor"))
    hold("anchored-stack", written("own.json"))
    hold_to_changes("anchored-stack", written("own.json"))


def test_explain():
    """Of a plan, of two plans, and of requests with and without a plan."""
    hold_to_changes("explain", printed("explain plan.json", "explain"))
    command(f"search {SMALL} --fix pp=2 --out other.json")
    both = printed("explain plan.json --versus other.json", "explain")
    assert both["versus"]["fields"]
    hold_to_changes("explain", both)
    assert printed(f"explain {SMALL}", "explain")["feasible"]
    none = printed("explain --model Qwen3-30B-A3B --hardware h100 --gpus 1 --gbs 8 --seq 4096", "explain", status=3)
    assert not none["feasible"] and none["constraints"] and none["closest"] and none["remedies"]
    hold_to_changes("explain", none)
    # The fields of one form have no place in the other.
    assert faults("explain", {**both, "remedies": []}) and faults("explain", {**none, "deltas": []})


def test_tokenize():
    hold_to_changes("tokenize", printed("tokenize a.txt --out again", "tokenize"))


def test_launch():
    for kind in ("--slurm", "--mpi --out job.sh", "--k8s --image some/image"):
        hold_to_changes("launch", printed(f"launch plan.json {kind}", "launch"))


def test_show():
    """The lists, and everything that stands in them."""
    lists = {"models": ("show-models", "models"), "hardware": ("show-hardware-list", "hardware"), "stacks": ("show-stacks", "stacks")}
    for topic, (name, field) in lists.items():
        document = printed(f"show {topic}", name)
        hold_to_changes(name, document)
        listed = [entry["name"] for entry in document[field]]
        assert len(listed) > 5 and len(set(listed)) == len(listed), topic
        one = topic.removesuffix("s")
        for entry in listed:
            assert printed(f"show {one} {entry}", f"show-{one}")["name"] == entry
    for words, name in (("model DeepSeek-V3 --seq 8192", "show-model"), ("hardware h200-measured", "show-hardware"),
                        ("stack bridge-26.08 --hardware b200", "show-stack"), ("plan plan.json", "show-plan")):
        hold_to_changes(name, printed(f"show {words}", name))
    # The program leaves out a figure of 0, so the schema has no place for one.
    document = printed("show model DeepSeek-V3", "show-model")
    document["kinds"][0]["attention"]["kv_lora"] = 0
    assert faults("show-model", document)


def test_ui():
    served = subprocess.Popen([COMMAND, "ui", "--json"], stdout=subprocess.PIPE, text=True)
    try:
        lines = []
        while "}\n" not in lines:
            lines.append(served.stdout.readline())
        hold_to_changes("ui", json.loads("".join(lines)))
    finally:
        served.terminate()
        served.stdout.close()
    assert served.wait(20) == 0


def test_completion_and_man():
    for shell in ("bash", "zsh", "fish"):
        document = printed(f"completion {shell}", "completion")
        assert document["shell"] == shell and document["text"] == command(f"completion {shell}")
        hold_to_changes("completion", document)
    for words, form in (("man", "roff"), ("man --markdown", "markdown")):
        document = printed(words, "man")
        assert document["format"] == form and document["text"] == command(words)
        hold_to_changes("man", document)


def test_no_document_names_its_schema_itself():
    """Names of schemas stand in planner/base/schema.hpp alone."""
    literal = re.compile(r'"moe-plan/[a-z-]+/\d+"')
    found = [str(file.relative_to(ROOT)) for folder in ("planner", "simulator", "engine", "tools")
             for file in sorted((ROOT / folder).rglob("*.?pp")) if literal.search(file.read_text())]
    assert found == ["planner/base/schema.hpp"], found


def test_launch_engine():
    """The engines that know the model; a plan that each of them can express."""
    on_gpus = "--model Qwen3-30B-A3B --hardware h100 --gpus 8 --gbs 64 --seq 4096 --precision bf16 --fix fsdp=on --fix recompute=full"
    command(f"search {on_gpus} --stack automodel --fix optimizer=adamw --fix pp=1 --fix ep=1 --fix etp=1 --top 1 --out engine.json")
    for engine in ("megatron-core", "megatron-lm", "megatron-bridge", "torchtitan", "automodel"):
        document = printed(f"launch engine.json --{engine}", "launch-engine")
        assert document["engine"] == engine
        if engine == "torchtitan":
            assert tomllib.loads(document["text"]) == document["config"]
        elif "config" in document:
            assert yaml.safe_load(document["text"]) == document["config"]
        hold_to_changes("launch-engine", document)


def test_import():
    """What launch wrote for the engines above, read again, beside a flag that means nothing."""
    for engine, file in (("megatron-lm", "again.sh"), ("torchtitan", "again.toml"), ("automodel", "again.yaml")):
        command(f"launch engine.json --{engine} --out {file}")
        document = printed(f"import {file} --from {engine} --hardware h100 --gpus 8 --stack automodel", "import")
        assert document["engine"] == engine and document["plan"]["mesh"] == written("engine.json")["mesh"]
        hold_to_changes("import", document)
    (HERE / "more.txt").write_text("--no-such-flag 3 --fine-grained-activation-offloading --offload-modules attn_proj\n")
    document = printed("import again.sh more.txt --hardware h100 --gpus 8", "import")
    assert document["unknown"][0]["setting"] == "--no-such-flag" and document["findings"][0]["severity"] == "error"
    hold_to_changes("import", document)


def test_profiles():
    """Everything that is committed; what our reader refuses, its schema must refuse as well."""
    folders = {"hardware": "hardware/*.json", "model": "models/*.json", "stack": "stacks/*.json", "coefficients": "coefficients.json",
               "residuals": "runs/residuals.json", "neighbours": "runs/neighbours.json"}
    for name, pattern in folders.items():
        files = sorted((ROOT / "profiles").glob(pattern))
        assert files, pattern
        for file in files:
            found = faults(name, json.loads(file.read_text()))
            assert not found, f"{file.name}: {found[0]}"
    hold("stack", json.loads((ROOT / "profiles/stacks/base/megatron.json").read_text()))
    for file in sorted((ROOT / "profiles/measured").glob("*.json")):
        document = json.loads(file.read_text())
        found = faults("residuals" if isinstance(document, list) else "measured", document)
        assert not found, f"{file.name}: {found[0]}"


def test_changed_profiles_are_refused():
    for name, path in (("hardware", "hardware/h200-measured.json"), ("hardware", "hardware/cpu-local.json"), ("stack", "stacks/moe-plan.json"),
                       ("stack", "stacks/bridge-26.08.json"), ("coefficients", "coefficients.json"), ("residuals", "runs/residuals.json"), ("neighbours", "runs/neighbours.json"),
                       ("measured", "measured/h200-2026-11-24-whole-check.json")):
        hold_to_changes(name, json.loads((ROOT / "profiles" / path).read_text()))
    assert faults("model", {"hidden_size": 64}) and faults("model", {"hidden_size": 0, "vocab_size": 256})


if __name__ == "__main__":
    prepare()
    sys.exit(run([value for name, value in list(globals().items()) if name.startswith("test_")]))
