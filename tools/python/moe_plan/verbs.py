"""The verbs as functions: each takes the command's options, runs in this process without the interpreter's lock, and returns its document.

Names, files, plans and dictionaries serve alike: a plan or a model that is an object is written to a file that lasts as long as the call.
`progress` is called with the line that the command shows on a terminal; what it raises, Ctrl-C included, ends the call.
Every function raises InvalidInput, Unsatisfiable or Error with the command's line, and warns with PlanWarning.
"""
from __future__ import annotations

import json
import os
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, Union, overload

from . import _core
from .document import Document
from .documents import (BY_SCHEMA, Compare, CompareLog, CompareProfile, Explain, Import, Launch, LaunchEngine, Plan, Replay, Search,
                        SearchPlan, ShowHardware, ShowHardwareList, ShowModel, ShowModels, ShowPlan, ShowStack, ShowStacks, Validate)
from .errors import PlanWarning, error_of

Path = Union[str, "os.PathLike[str]"]
Progress = Callable[[str], None]
PlanLike = Union[Path, Plan, SearchPlan, Mapping[str, Any]]  # plan.json, or what is in it
Profile = Union[Path, Document, Mapping[str, Any]]  # a name in profiles/, a file, or what is in it
Gpus = Union[int, Sequence[int], Literal["auto"]]
Job = Literal["slurm", "mpi", "k8s"]
Engine = Literal["megatron-lm", "megatron-bridge", "torchtitan", "automodel", "megatron-core"]
_Kind = TypeVar("_Kind", bound=Document)


def search(model: Profile, hardware: Profile, *, gpus: Gpus, gbs: int, seq: int, precision: str | Sequence[str] | None = None,
           stack: Path | None = None, fix: Mapping[str, object] | None = None, lengths: Path | None = None,
           memory_headroom: float | None = None, no_neighbours: bool = False, top: int | None = None,
           optimize_for: Literal["mean", "p50", "p99"] | None = None, spare_experts: int | None = None, out: Path | None = None,
           price: float | None = None, mtbf: float | None = None, tokens: float | str | None = None, deadline: float | None = None,
           storage_bandwidth: float | None = None, restart: float | None = None, checkpoint_interval: float | None = None,
           progress: Progress | None = None) -> Search:
    """Explores the whole plan space of a request and ranks it."""
    options = dict(locals())
    return _called(Search, "search", [], options)


def replay(plan: PlanLike, *, set_: Mapping[str, object] | None = None, trace: Path | None = None, report: Path | None = None,
           lengths: Path | None = None, spare_experts: int | None = None, no_neighbours: bool = False,
           progress: Progress | None = None) -> Replay:
    """Simulates one step of a plan event by event; `set_` changes fields of it first."""
    options = dict(locals())
    return _called(Replay, "replay", [options.pop("plan")], options)


def explain(plan: PlanLike | None = None, *, versus: PlanLike | None = None, model: Profile | None = None, hardware: Profile | None = None,
            gpus: Gpus | None = None, gbs: int | None = None, seq: int | None = None, precision: str | Sequence[str] | None = None,
            stack: Path | None = None, fix: Mapping[str, object] | None = None, lengths: Path | None = None,
            memory_headroom: float | None = None, spare_experts: int | None = None, no_neighbours: bool = False,
            progress: Progress | None = None) -> Explain:
    """Why a plan is as fast as it is; without a plan the best one of a request. A request without a plan raises Unsatisfiable."""
    options = dict(locals())
    return _called(Explain, "explain", [options.pop("plan")], options)


@overload
def show(what: Literal["models"]) -> ShowModels: ...
@overload
def show(what: Literal["hardware"]) -> ShowHardwareList: ...
@overload
def show(what: Literal["stacks"], *, hardware: Profile | None = None) -> ShowStacks: ...
@overload
def show(what: Literal["model"], name: Profile, *, seq: int | None = None) -> ShowModel: ...
@overload
def show(what: Literal["hardware"], name: Profile) -> ShowHardware: ...
@overload
def show(what: Literal["stack"], name: Path, *, hardware: Profile | None = None) -> ShowStack: ...
@overload
def show(what: Literal["plan"], name: PlanLike) -> ShowPlan: ...
def show(what: str, name: Profile | None = None, *, seq: int | None = None, hardware: Profile | None = None) -> Document:
    """The names of all models, machines or stacks, or what one of them, or a plan, was read as."""
    options = dict(locals())
    return _called(Document, "show", [options.pop("what"), options.pop("name")], options)


@overload
def launch(plan: PlanLike, to: Job, *, data: str | None = None, arguments: str | None = None, gpus_per_node: int | None = None,
           image: str | None = None, claim: str | None = None, out: Path | None = None) -> Launch: ...
@overload
def launch(plan: PlanLike, to: Engine, *, data: str | None = None, arguments: str | None = None, gpus_per_node: int | None = None,
           image: str | None = None, claim: str | None = None, out: Path | None = None) -> LaunchEngine: ...
def launch(plan: PlanLike, to: Job | Engine, *, data: str | None = None, arguments: str | None = None, gpus_per_node: int | None = None,
           image: str | None = None, claim: str | None = None, out: Path | None = None) -> Document:
    """The file that runs a plan: a job of `execute`, or another engine's. A job reads its plan where `plan` says: give it a file's name."""
    options = dict(locals())
    options[options.pop("to")] = True
    if to in ("slurm", "mpi") and not isinstance(plan, (str, os.PathLike)):
        raise error_of(2, f"launch {to}: the job reads its plan from a file: plan.write(\"plan.json\"), and give that name")
    return _called(Document, "launch", [options.pop("plan")], options)


def import_plan(*files: Path, hardware: Profile, model: Profile | None = None, gpus: int | None = None, stack: Path | None = None,
                from_: Literal["megatron-lm", "megatron-bridge", "torchtitan", "automodel"] | None = None,
                seq: int | None = None, alone: bool = False, out: Path | None = None) -> Import:
    """Reads another engine's launch files as a plan, later files over earlier ones, and says what speaks against it.

    A launch file that says no length of sequences needs `seq`. With `alone` no file is read but `files`.
    """
    options = dict(locals())
    return _called(Import, "import", list(options.pop("files")), options)


def compare(*traces: PlanLike, log: Path | None = None, profile: Path | None = None, steps: int | None = None, rank: int | None = None,
            kernels: Path | None = None, no_neighbours: bool = False, report: Path | None = None) -> Compare | CompareLog | CompareProfile:
    """Predicted beside measured: a run directory, two traces, or a plan with another engine's log or profile."""
    options = dict(locals())
    found = _called(Document, "compare", list(options.pop("traces")), options)
    assert isinstance(found, (Compare, CompareLog, CompareProfile))
    return found


def validate(runs: Path | None = None, *, row: str | None = None, improve: bool = False, no_neighbours: bool = False,
             progress: Progress | None = None) -> Validate:
    """Predicts published runs, each with the very plan of its row."""
    options = dict(locals())
    return _called(Validate, "validate", [options.pop("runs")], options)


def _called(kind: type[_Kind], verb: str, positional: list[Any], options: dict[str, Any]) -> _Kind:
    """Runs a command line with --json and returns its document."""
    progress = options.pop("progress", None)
    with tempfile.TemporaryDirectory(prefix="moe-plan-") as folder:
        words, flags = [verb, "--json", "--quiet"], []
        for name, value in options.items():
            option = name.rstrip("_").replace("_", "-")
            if value is True:
                flags.append(f"--{option}")
            else:
                words += _option(option, value, folder)
        what = positional[0] if verb == "show" and str(positional[0]).isalpha() else "plan"
        words += [_word(what, value, folder) for value in positional if value is not None]
        words += flags  # last: an option that takes a value and is True has no word behind it to take
        for word in words:
            if any("\ud800" <= character <= "\udfff" for character in word):
                raise error_of(2, f"{verb}: {word!a}: holds bytes that are no text in UTF-8")
        status, text, warned = _core.run(words, progress)
    for line in warned:
        warnings.warn(_named(line, folder).removeprefix("warning: "), PlanWarning, stacklevel=3)
    if status != 0:
        raise error_of(status, _named(text, folder))
    data = json.loads(text)
    found = BY_SCHEMA[data["schema"]].from_dict(data)
    assert isinstance(found, kind)
    return found


def _option(name: str, value: Any, folder: str) -> list[str]:
    if value is None or value is False:
        return []
    if name in ("fix", "set"):
        return [f"--{name}={field}={_joined(one, '+')}" for field, one in value.items()]
    return [f"--{name}={_word(name, value, folder)}"]


def _word(name: str, value: Any, folder: str) -> str:
    """One word of the command line. An object goes through a file."""
    if isinstance(value, SearchPlan):
        value = value.plan
    if isinstance(value, (Document, Mapping)):
        file = pathlib.Path(tempfile.mkdtemp(dir=folder)) / f"{name}.json"
        file.write_text(json.dumps(value.to_dict() if isinstance(value, Document) else value))
        return str(file)
    return _joined(value, ",")


def _named(line: str, folder: str) -> str:
    """A line for the user, in which what an object was written to is called by what it is: model, hardware or plan."""
    return re.sub(re.escape(folder) + r"/[^/]+/(\w+)\.json", r"\1", line)


def _joined(value: Any, between: str) -> str:
    """A value of a field or an option as the command takes it: lists joined, flags as on and off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (list, tuple)):
        return between.join(_joined(one, between) for one in value) or "none"
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
