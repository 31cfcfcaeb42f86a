"""Holds `moe-plan import` to the list of arguments that Megatron-LM prints, on random plans of real models.

usage: dumped.py MOE_PLAN [--count N] [--seed S] [--keep FOLDER]

Plans that `launch --megatron-lm` takes are parsed and validated by the installed megatron/training/arguments.py, which
prints its list as in a log, defaults and derived values among them. The list is read by `import`, and the plan that was
read must be launched with the arguments of the first one. The exit status is 1 where one differs, and 77 without the
package, or where no stack is of its release.
"""

import argparse
import collections
import contextlib
import io
import json
import logging
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import arguments as parser_of_megatron
import launched
import oracle

FEW = 0.8  # share of the plans that at least are told again whole


def printed(generation, said, gpus):
    """What Megatron-LM prints of the arguments, behind what a launcher writes before each line."""
    training = parser_of_megatron.prepared(generation)
    kept, argv, out = dict(os.environ), sys.argv, io.StringIO()
    os.environ.update({"WORLD_SIZE": str(gpus), "RANK": "0", "LOCAL_RANK": "0", **said["env"]})
    sys.argv = ["pretrain_gpt.py", *said["args"]]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            given = training.validate_args(training.parse_args())
            training._print_args("arguments", given)
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(kept)
    return "".join(f" 0: {line}\n" for line in out.getvalue().splitlines())


def groups(words):
    """Arguments as a set of flags with their values."""
    found = []
    for word in words:
        if word.startswith("--"):
            found.append([word])
        else:
            found[-1].append(word)
    return {" ".join(one) for one in found}


def told_again(launcher, plan, said, log):
    """What differs between the arguments of the plan and those of the plan that import reads from the log."""
    command = [launcher.program, "import", str(log), "--hardware", plan["hardware"]["name"], "--stack", plan["stack"], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return "import: " + done.stderr.strip().splitlines()[-1], []
    read = json.loads(done.stdout)
    again, refusal = launcher.launch(read["plan"], "--megatron-lm")
    if again is None:
        return "launch: " + refusal, read
    first, second = groups(said["args"]), groups(again["args"])
    differ = [f"-{word}" for word in sorted(first - second)] + [f"+{word}" for word in sorted(second - first)]
    return "; ".join(differ) or None, read


def main():
    parser = argparse.ArgumentParser(description="import of Megatron-LM's own list of arguments.")
    parser.add_argument("program")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("MOE_PLAN_SEED", "1")))
    parser.add_argument("--keep", type=pathlib.Path)
    asked = parser.parse_args()
    oracle.load("2.17")
    logging.disable(logging.WARNING)
    stacks, release = launched.stacks_of(oracle.installed())
    if not stacks:
        print(f"skipped: no stack is of megatron-core {oracle.installed()}")
        return oracle.SKIPPED
    generator, wrong, done, findings = random.Random(asked.seed), 0, 0, collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        launcher = launched.Launcher(os.path.abspath(asked.program), pathlib.Path(folder))
        while done < asked.count:
            plan, _ = launched.document(generator, stacks)
            said, _ = launcher.launch(plan, "--megatron-lm")
            if said is None:
                continue
            generation = "hopper" if plan["hardware"]["name"] in ("h100", "h200") else "blackwell"
            try:
                text = printed(generation, said, plan["mesh"]["gpus"])
            except (SystemExit, Exception):  # launched.py says what is refused
                continue
            done += 1
            log = pathlib.Path(folder) / "train.log"
            log.write_text(text)
            if asked.keep:
                asked.keep.mkdir(parents=True, exist_ok=True)
                (asked.keep / f"{done}.log").write_text(text)
                (asked.keep / f"{done}.json").write_text(json.dumps(plan))
            differ, read = told_again(launcher, plan, said, log)
            for one in (read or {}).get("findings", []) if read else []:
                if one["severity"] != "hint" or "is predicted" not in one["message"]:
                    findings[f"{one['severity']} {one['field']}"] += 1
            for one in (read or {}).get("unknown", []) if read else []:
                findings[f"not understood {one['setting']}"] += 1
            if differ:
                wrong += 1
                print(f"{done}: {plan['model']['name']}: {differ}")
    print(f"megatron-core {oracle.installed()} ({release}), seed {asked.seed}: {done} lists, {wrong} told otherwise")
    for finding, count in findings.most_common(40):
        print(f"  {count:5d}  {finding}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
