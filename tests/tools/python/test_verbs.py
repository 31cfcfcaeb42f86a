"""The functions of the package beside the command: the same documents, errors, progress, threads."""
import inspect
import json
import os
import re
import signal
import subprocess
import threading
import time
import warnings

import pytest

import moe_plan
from moe_plan import _core, verbs

SMALL = {"gpus": 8, "gbs": 64, "seq": 1024, "precision": "bf16", "fix": {"tp": 2, "mbs": 1, "pp": 1, "ep": 8}}


def small_search(**more):
    return moe_plan.search("tiny-qwen3-moe", "h100", **{**SMALL, **more})


def larger_search(**more):
    return moe_plan.search("Qwen3-30B-A3B", "h100", gpus=16, gbs=64, seq=4096, **more)


@pytest.fixture(scope="module")
def found():
    return small_search()


def command(*words):
    return json.loads(subprocess.run([os.environ["MOE_PLAN"], *words, "--json"], check=True, capture_output=True, text=True).stdout)


def without(data, *names):
    """The document without fields, and without those that are null: a field that may be missing is None either way."""
    if isinstance(data, dict):
        return {key: without(value, *names) for key, value in data.items() if key not in names and value is not None}
    return [without(item, *names) for item in data] if isinstance(data, list) else data


def test_search_is_the_commands(found):
    printed = command("search", "--model", "tiny-qwen3-moe", "--hardware", "h100", "--gpus", "8", "--gbs", "64", "--seq", "1024",
                      "--precision", "bf16", "--fix", "tp=2", "--fix", "mbs=1", "--fix", "pp=1", "--fix", "ep=8")
    assert without(found.to_dict(), "seconds") == without(printed, "seconds")


def test_a_plan_goes_to_a_file_and_back(found, tmp_path):
    plan = found.plans[0].plan
    plan.write(tmp_path / "plan.json")
    assert moe_plan.Plan.read(tmp_path / "plan.json") == plan
    assert moe_plan.show("plan", tmp_path / "plan.json") == moe_plan.show("plan", plan)
    assert moe_plan.show("plan", plan.to_dict()).fields["tp"] == "2"


def test_replay_takes_plans_files_and_dictionaries(found, tmp_path):
    found.plans[0].plan.write(tmp_path / "plan.json")
    printed = command("replay", str(tmp_path / "plan.json"))
    for plan in (found.plans[0], found.plans[0].plan.to_dict(), tmp_path / "plan.json"):
        assert without(moe_plan.replay(plan).to_dict()) == without(printed)


def test_replay_writes_trace_and_report(found, tmp_path):
    replayed = moe_plan.replay(found.plans[0], trace=tmp_path / "trace.json", report=tmp_path / "report.html")
    assert replayed.fits is True
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_replay_changes_fields_first(found):
    plan = found.plans[0].plan
    changed = moe_plan.Plan.from_dict({**plan.to_dict(), "recompute": ["moe_act"]})
    assert moe_plan.replay(plan, set_={"recompute": ["moe_act"]}) == moe_plan.replay(changed) != moe_plan.replay(plan)


def test_explain_takes_a_plan_two_plans_or_a_request(found):
    plan = found.plans[0].plan
    other = moe_plan.Plan.from_dict({**plan.to_dict(), "recompute": ["moe_act"]})
    explained = moe_plan.explain(plan, versus=other)
    assert explained.feasible and explained.versus is not None
    assert explained.walls.memory.classes[0].class_
    asked = moe_plan.explain(model="tiny-qwen3-moe", hardware="h100", **SMALL)
    assert asked.tflops_per_gpu == pytest.approx(found.plans[0].tflops_per_gpu)


def test_launch_and_import_go_round(found, tmp_path):
    plan = found.plans[0].plan
    launched = moe_plan.launch(plan, "megatron-lm", out=tmp_path / "train.sh")
    assert launched.engine == "megatron-lm" and "--tensor-model-parallel-size" in launched.args
    read = moe_plan.import_plan(tmp_path / "train.sh", hardware="h100", model="tiny-qwen3-moe")
    assert read.plan.mesh == plan.mesh
    (tmp_path / "caller.sh").write_text(f"bash {tmp_path / 'train.sh'}\n")
    assert moe_plan.import_plan(tmp_path / "caller.sh", hardware="h100", model="tiny-qwen3-moe", seq=64).plan.workload.seq == 64
    with pytest.raises(moe_plan.InvalidInput):
        moe_plan.import_plan(tmp_path / "caller.sh", hardware="h100", model="tiny-qwen3-moe", alone=True)
    plan.write(tmp_path / "plan.json")
    with pytest.warns(moe_plan.PlanWarning, match="execute cannot run this plan"):
        assert "#SBATCH" in moe_plan.launch(tmp_path / "plan.json", "slurm").text
    with pytest.raises(moe_plan.InvalidInput, match="the job reads its plan from a file"):
        moe_plan.launch(plan, "slurm")


def test_compare_two_traces(found, tmp_path):
    moe_plan.replay(found.plans[0], trace=tmp_path / "trace.json")
    measured = (tmp_path / "trace.json").read_text().replace('"predicted":true', '"predicted":false')
    (tmp_path / "measured.json").write_text(measured)
    compared = moe_plan.compare(tmp_path / "trace.json", tmp_path / "measured.json")
    assert isinstance(compared, verbs.Compare)
    assert without(compared.to_dict()) == without(command("compare", str(tmp_path / "trace.json"), str(tmp_path / "measured.json")))


def test_validate_some_rows():
    seen = []
    result = moe_plan.validate(row="MB-26.08-DSV3-GB200", progress=seen.append)
    assert result.rows and all("DSV3-GB200" in row.run_id for row in result.rows)
    assert without(result.to_dict()) == without(command("validate", "--row", "MB-26.08-DSV3-GB200"))


def test_show_has_lists_and_single_profiles():
    assert "DeepSeek-V3" in [model.name for model in moe_plan.show("models").models]
    assert moe_plan.show("hardware", "h100").name == "h100"
    assert moe_plan.show("model", {"architectures": ["Qwen3MoeForCausalLM"], **tiny()}).layers == 2
    assert moe_plan.show("stack", "moe-plan").name == "moe-plan"
    assert moe_plan.show("stacks").stacks and moe_plan.show("hardware").hardware


def tiny():
    return {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128,
            "name": "tiny"}


@pytest.mark.parametrize("call, kind, status, words", [
    (lambda: moe_plan.show("model", "nope"), moe_plan.InvalidInput, 2, "unknown model 'nope'"),
    (lambda: small_search(fix={"tp": 3}), moe_plan.Unsatisfiable, 3, "tp"),
    (lambda: small_search(top=0), moe_plan.InvalidInput, 2, "--top 0: must be between 1 and 1000"),
    (lambda: small_search(out="/nowhere/plan.json"), moe_plan.InvalidInput, 2, "/nowhere/plan.json"),
    (lambda: small_search(gpus="many"), moe_plan.InvalidInput, 2, "--gpus many: must be"),
    (lambda: small_search(gpus=True), moe_plan.InvalidInput, 2, "--gpus: its value N|auto is missing"),
    (lambda: moe_plan.show("model", {"hidden_size": 64}), moe_plan.InvalidInput, 2, "model: field \"architectures\" is missing"),
    (lambda: moe_plan.replay("\udcff.json"), moe_plan.InvalidInput, 2, "replay: '\\udcff.json': holds bytes that are no text in UTF-8"),
])
def test_errors_have_the_commands_line_and_status(call, kind, status, words):
    with pytest.raises(moe_plan.Error) as raised:
        call()
    assert type(raised.value) is kind and raised.value.status == status
    assert words in str(raised.value) and "\n" not in str(raised.value)


def test_what_the_command_warns_of_is_a_warning():
    language = {"architectures": ["Qwen3MoeForCausalLM"], **tiny()}
    pictures = {**language, "name": "pictures", "text_config": language, "vision_config": {"hidden_size": 64}}
    with pytest.warns(moe_plan.PlanWarning, match="plans and figures are of the language model alone"):
        moe_plan.search(pictures, "h100", gpus=1, gbs=1, seq=64, precision="bf16")


def test_progress_comes_to_the_callers_thread():
    here, lines = threading.get_ident(), []

    def progress(line):
        assert threading.get_ident() == here
        lines.append(line)

    larger_search(progress=progress, precision="bf16", fix={"pp": 1})
    assert any("plans evaluated" in line for line in lines)


def test_what_progress_raises_ends_the_search():
    class Enough(Exception):
        pass

    def progress(line):
        raise Enough(line)

    with pytest.raises(Enough, match="plans evaluated"):
        larger_search(progress=progress)


def test_an_interrupt_ends_the_search():
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        larger_search()
    timer.join()


def test_other_threads_run_meanwhile_and_two_searches_at_once(found):
    results, ticks = [], []
    searches = [threading.Thread(target=lambda: results.append(small_search())) for _ in range(2)]
    for thread in searches:
        thread.start()
    while any(thread.is_alive() for thread in searches):
        ticks.append(time.monotonic())
        time.sleep(0.01)
    assert len(ticks) > 1
    assert [without(result.to_dict(), "seconds") for result in results] == [without(found.to_dict(), "seconds")] * 2


def options_of(verb):
    status, text, warned = _core.run(["man", "--markdown"], None)
    assert status == 0 and warned == []
    part = re.search(rf"^## {verb}\n(.*?)(?=^## |\Z)", text, re.M | re.S).group(1)
    return {name.strip("-").replace("-", "_").lower() for name in re.findall(r"^\* `(\S+?)[ `]", part, re.M)}


@pytest.mark.parametrize("verb", ["search", "replay", "explain", "show", "launch", "import", "compare", "validate"])
def test_every_option_of_the_verb_is_a_parameter(verb):
    function = getattr(moe_plan, "import_plan" if verb == "import" else verb)
    taken = {name.rstrip("_") for name in inspect.signature(function).parameters}
    other_words = {"import": {"file"}, "compare": {"run_dir"},
                   "launch": set(verbs.Job.__args__) | {word.replace("-", "_") for word in verbs.Engine.__args__}}
    lines_alone = {"worst"}  # how many misses validate prints: the document has all
    assert options_of(verb) - other_words.get(verb, set()) - lines_alone <= taken


def test_the_command_is_the_commands():
    main = subprocess.run([os.environ["MOE_PLAN_PYTHON"], "-m", "moe_plan", "show", "model", "nope"], capture_output=True, text=True)
    assert main.returncode == 2 and main.stderr.startswith("moe-plan: unknown model 'nope'")
    listed = subprocess.run([os.environ["MOE_PLAN_PYTHON"], "-m", "moe_plan", "show", "stacks"], capture_output=True, text=True, check=True)
    assert listed.stdout == subprocess.run([os.environ["MOE_PLAN"], "show", "stacks"], capture_output=True, text=True).stdout


def test_no_warnings_without_cause():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        small_search(top=1)
