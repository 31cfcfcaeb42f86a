"""What tools/gpu-check holds to a bar on several GPUs: collectives, routed tokens, parity, faults, curves and predictions."""
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import time

PARTS = ["collectives", "dispatch", "parity", "faults", "curves", "predictions"]
PORT = 29571
BENCH = "tools/bench/bench-dispatch"
SMS = 24  # multiprocessors of a call beside others that compute
# Of a peer copy in both directions at once, what the largest calls of dispatch and combine reach at least: (tokens, width, top) -> share.
TOKEN_BARS = {(16384, 7168, 8): 0.6, (16384, 4096, 2): 0.8}

# (model, changed configuration, sequence, samples of a step for each GPU, plan fields, TFLOPS/GPU to reach or None). N stands
# for the number of GPUs, H for as many of them as some head counts allow, 4, D for the number of such groups. None is in the calibration, which times communication alone and ops on one GPU. LARGE holds whole layers
# of published models by the number of GPUs, at the sizes that other software was measured at; layers None: as many as have room. Buffers
# for what 8 ranks might at worst send to one would make room by recomputing whole layers, so a capacity bounds them there.
DEEPEST = ("Mixtral-8x22B", {"num_hidden_layers": None}, 4096, 8, "ep=N dp=N mbs=1 capacity=1.25 recompute=moe_act offload=none", 0.52 * 989)
LARGE = {
    2: [("Qwen3-30B-A3B", {"num_hidden_layers": 8}, 4096, 16, "ep=N dp=N mbs=4", 400),
        ("Mixtral-8x7B", {"num_hidden_layers": 4}, 4096, 8, "ep=N dp=N mbs=2", 540),
        DEEPEST],
    4: [("Qwen3-30B-A3B", {"num_hidden_layers": 16}, 4096, 16, "ep=N dp=N mbs=4", 400),
        ("Mixtral-8x7B", {"num_hidden_layers": 8}, 4096, 8, "ep=N dp=N mbs=2", 540),
        DEEPEST],
    8: [("Qwen3-30B-A3B", {"num_hidden_layers": 16}, 4096, 16, "ep=N dp=N mbs=4 capacity=1.25", 400),
        ("Qwen3-30B-A3B", {"num_hidden_layers": 48}, 4096, 8, "ep=N dp=N mbs=2 capacity=1.25 recompute=layernorm+moe_act", 350),
        DEEPEST],
}
ROOM = {("Qwen3-30B-A3B", 48): 110}  # GiB that a plan of so many layers may take
PLANS = [
    ("qwen3", {"hidden_size": 2048}, 4096, 4, "tp=H dp=D ep=N etp=1 mbs=2", None),
    ("mla", {"hidden_size": 2048}, 4096, 4, "ep=N dp=N mbs=2", None),
    ("Qwen3-30B-A3B", {"num_hidden_layers": 4}, 4096, 8, "pp=H dp=D ep=D mbs=1 schedule=1f1b", None),
    ("Mixtral-8x7B", {"num_hidden_layers": 2}, 4096, 4, "tp=N etp=N mbs=2", None),
    ("Qwen3-30B-A3B", {"num_hidden_layers": 2}, 4096, 4, "cp=H dp=D cp_comm=alltoall ep=N mbs=2", None),
    ("qwen3", {}, 2048, 16, "dp=N ep=1 mbs=4", None),
    ("mla", {}, 2048, 8, "tp=H dp=D ep=N etp=1 mbs=4", None),
    ("Mixtral-8x7B", {"num_hidden_layers": 2}, 4096, 8, "ep=N dp=N mbs=2 dispatcher=allgather", None),
    ("qwen3", {"num_experts": 32}, 4096, 4, "ep=N dp=N mbs=2 capacity=1.25", None),
    ("Qwen3-30B-A3B", {"num_hidden_layers": 4}, 2048, 8, "ep=N dp=N mbs=2 recompute=moe_act", None),
    ("Qwen3-30B-A3B", {"num_hidden_layers": 4}, 4096, 8, "pp=H dp=D ep=D mbs=1 schedule=zero-bubble", None),
    ("Qwen3-30B-A3B", {"num_hidden_layers": 4}, 4096, 8, "pp=H dp=D ep=D mbs=1 schedule=zb-v", None),
    ("Qwen3-30B-A3B", {"num_hidden_layers": 4}, 4096, 8, "pp=H dp=D ep=D mbs=1 schedule=dualpipe-v", None),
]
# What the planner chooses from: model, changed configuration, sequence, samples of a step for each GPU, choices that are run.
CHOICE = ("Qwen3-30B-A3B", {"num_hidden_layers": 4}, 4096, 8, 6)


def filled(fields, gpus):
    heads = min(gpus, 4)
    degrees = {"N": gpus, "H": heads, "D": gpus // heads}
    return "cuda_graph=full " + re.sub(r"=([NHD])\b", lambda found: f"={degrees[found[1]]}", fields)


def name_of(kind, changed, seq, fields, gpus):
    """What rows and plans of a document are called."""
    return " ".join([kind, *(f"{k}={v}" for k, v in changed.items()), f"seq={seq} over {gpus} GPUs:", fields])


def mapping(plan):
    """Degrees above one, micro-batch and dispatcher of a plan."""
    degrees = [f"{k}={v}" for k, v in plan["mesh"].items() if k != "gpus" and isinstance(v, int) and v > 1]
    return " ".join([*degrees, f"mbs={plan['mbs']}", f"dispatcher={plan['dispatcher']}"])


def listed():
    """A line for each GPU: "GPU 0: NVIDIA H200 (UUID: ...)"."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except FileNotFoundError:
        return []
    return [line for line in said.splitlines() if line.startswith("GPU ")]


def gpus_here():
    return len(listed())


def name_here():
    """Of the first GPU, None where there is none."""
    return listed()[0].split(": ", 1)[1].split(" (")[0] if listed() else None


def usable(asked):
    """The largest power of two of GPUs that are asked for and here."""
    gpus = 1
    while 2 * gpus <= min(asked, gpus_here()):
        gpus *= 2
    return gpus


class Ranks:
    """The parts for several GPUs; `check` runs programs and keeps the table."""

    def __init__(self, check, gpus, engine_test, moe_plan, learner):
        self.check, self.rows, self.gpus = check, check.rows, gpus
        self.engine_test, self.moe_plan, self.learner = engine_test, moe_plan, learner

    def case(self, name, pattern, **environment):
        """A case of the engine's tests, its output; None with a row where it failed."""
        done = self.check.run(name, "env", *(f"{k}={v}" for k, v in environment.items()), self.engine_test, f"-tc={pattern}", "-d")
        if done is None:
            return None
        if done.returncode != 0:
            print(done.stdout[-4000:])
            return self.rows.failed(name, f"exit status {done.returncode}")
        if re.search(r"test cases:\s+0 ", done.stdout):
            return self.rows.failed(name, "no case has this name")
        return done.stdout

    def collectives(self):
        out = self.check.folder / "collectives.json"
        if self.case("collectives", "cuda ranks: collectives*", MOE_PLAN_OUT=out) is not None:
            self.rows.list += json.loads(out.read_text())

    def dispatch(self, program):
        """Routed tokens out to their experts and back by 24 multiprocessors, GB/s of link beside a peer copy. Bytes that cross are counted
        once for each token and other rank."""
        name = f"dispatch and combine over {self.gpus} GPUs"
        if not program.exists():
            return self.rows.skip(name, f"no {program.name} in {program.parent.name}")
        seen = ",".join(map(str, range(self.gpus)))  # it takes all that it sees
        done = self.check.run(name, "env", f"CUDA_VISIBLE_DEVICES={seen}", program, "--peers", SMS)
        if done is None:
            return
        print(done.stdout, flush=True)
        copy = re.search(r"all to the next at once: ([\d.]+)", done.stdout)
        calls = re.findall(r"^ *(\d+) +(\d+) +(\d+)/(\d+) +0\.0 +peers .*? ([\d.]+) link .*? ([\d.]+) link", done.stdout, re.MULTILINE)
        if done.returncode != 0 or copy is None or not calls:
            return self.rows.failed(name, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200])
        for tokens, width, top, experts, *reached in calls:
            bar = TOKEN_BARS.get((int(tokens), int(width), int(top)))
            for call, rate in zip(("dispatch", "combine"), map(float, reached)):
                self.rows.add(f"{call} of {tokens} x {width}, top {top} of {experts}, over {self.gpus} GPUs by {SMS} multiprocessors: beside a "
                              "peer copy", "GB/s", rate, float(copy[1]), bar, bar is None or rate >= bar * float(copy[1]))

    def parity(self, share=1.0, plans=100):
        """Drawn plans, as many as half of this share of the time allows, and the cases of every axis."""
        left = max(5, int(min(120, self.check.left() * share / 2)))
        said = self.case("drawn plans", "cuda ranks: drawn*", MOE_PLAN_PLANS=plans, MOE_PLAN_SECONDS=left, MOE_PLAN_GPUS=self.gpus)
        if said is not None:
            found = re.search(r"(\d+) drawn plans .* farthest at ([\d.]+) .* (\d+) near", said)
            name = f"{found[1]} drawn plans over {self.gpus} GPUs, {found[3]} near ties: farthest from the CPU"
            self.rows.below(name, "of its tolerance", float(found[2]), 1.0)
        said = self.case("every axis", "cuda ranks ?:*")
        if said is not None:
            print(*re.findall(r"^[\d.]+ s: .*", said, re.MULTILINE), sep="\n")
            self.rows.add(f"every axis over {self.gpus} GPUs, the same bits twice, checkpoints", "exit status", 0, 0, None, True)

    def start(self, plan, *more):
        """A process for each GPU."""
        processes = []
        for rank in range(self.gpus):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.gpus), "MASTER_PORT": str(PORT)}
            processes.append(subprocess.Popen(
                [str(self.moe_plan), "execute", plan, "--data", "text", "--backend", "cuda", *more], cwd=self.check.folder,
                env={**os.environ, **place}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
        return processes

    def faults(self):
        """One process is killed, then one stopped: the others end with one line and status 1, the last checkpoint holds. A plan
        without room, and GPUs that do not reach each other."""
        fields = f"ep={self.gpus} dp={self.gpus} mbs=1"
        if self.check.searched(self.learner, 128, 4 * self.gpus, fields, gpus=self.gpus, precision="fp32") is None:
            return
        for what, number in (("killed", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            shutil.rmtree(self.check.folder / "saved", ignore_errors=True)
            ranks = self.start("plan.json", "--steps", "1000000", "--checkpoint", "saved", "--save-interval", "20",
                               "--hang-timeout", "8")
            self.fault(what, number, ranks)
            for rank in ranks:
                rank.kill()
                rank.wait()
        last = max((int(folder.name[5:]) for folder in (self.check.folder / "saved").glob("step-????????")), default=0)
        resumed = self.check.plan("execute", "plan.json", "--data", "text", "--backend", "cuda", "--steps", str(last + 2),
                                  "--checkpoint", "saved", "--resume")
        if resumed is not None:
            first = resumed["steps"][0]["step"]
            self.rows.add("the last checkpoint of a run that was stopped goes on", "step", first, last + 1, 1.0, first == last + 1)
        self.no_room()
        self.overflow()
        self.held("2 GPUs without peer access or shared memory: experts over the network, beside the CPU",
                  "cuda ranks 2: expert parallel*", NCCL_P2P_DISABLE=1, NCCL_SHM_DISABLE=1)

    def no_room(self):
        """A plan for GPUs of more memory than these have."""
        known = json.loads((pathlib.Path(os.environ["MOE_PLAN_PROFILES"]) / "hardware" / "h200.json").read_text())
        (self.check.folder / "roomy.json").write_text(json.dumps({**known, "name": "roomy", "memory_bytes": 1e13}))
        fields = f"ep={self.gpus} dp={self.gpus} mbs=1"
        if self.check.searched(self.check.model("Mixtral-8x22B", {}), 4096, self.gpus, fields, hardware="roomy.json", gpus=self.gpus) is None:
            return
        start = time.monotonic()
        ranks = self.start("plan.json", "--steps", "2")
        self.ended(f"a plan that has no room on {self.gpus} GPUs: seconds until all processes have ended with status 1", ranks, start,
                   r"rank \d+: cannot allocate an arena of .* GiB free; use more ranks")

    def overflow(self):
        """Buffers for balanced loads, which a router's own choices do not fit in: such steps run again, to the same losses."""
        losses, again = [], 0
        for capacity in (0, 1):
            fields = f"ep={self.gpus} dp={self.gpus} mbs=1 cuda_graph=full capacity={capacity}"
            if self.check.searched(self.learner, 128, 2 * self.gpus, fields, gpus=self.gpus, precision="fp32") is None:
                return
            ran = self.check.plan("execute", "plan.json", "--data", "text", "--backend", "cuda", "--steps", "6")
            if ran is None:
                return
            losses.append([step["loss"] for step in ran["steps"]])
            again = sum(step.get("overflow", 0) > 0 for step in ran["steps"])
        worst = max(abs(a / b - 1) for a, b in zip(*losses))
        name = f"{again} of 6 steps over {self.gpus} GPUs whose routed rows overflow their buffers: farthest loss from the worst case's"
        self.rows.add(name, "relative", worst, 1e-5, 1.0, again > 0 and worst <= 1e-5)

    def held(self, name, pattern, **environment):
        if self.case(name, pattern, **environment) is not None:
            self.rows.add(name, "exit status", 0, 0, None, True)

    def fault(self, what, number, ranks):
        name = f"a process of {self.gpus} is {what}: seconds until the others have ended with status 1"
        until = time.monotonic() + min(40, self.check.left())
        while not list((self.check.folder / "saved").glob("step-????????")):
            if time.monotonic() > until or any(rank.poll() is not None for rank in ranks):
                return self.rows.failed(name, "no checkpoint was written before")
            time.sleep(0.2)
        ranks[-1].send_signal(number)
        self.ended(name, ranks[:-1], time.monotonic(), f"rank {self.gpus - 1}")

    def ended(self, name, ranks, start, line):
        """All of them end with status 1 within 30 s, the first with a line that matches."""
        try:
            said = [(rank.communicate(timeout=60)[1].strip().splitlines() or ["nothing"])[-1] for rank in ranks]
        except subprocess.TimeoutExpired:
            for rank in ranks:
                rank.kill()
            return self.rows.failed(name, "they had not after 60 s")
        seconds = time.monotonic() - start
        print(f"{name}: {said[0]}")
        told = all(rank.returncode == 1 for rank in ranks) and re.search(line, said[0]) is not None
        self.rows.add(name, "s", seconds, 30.0, 1.0, told and seconds <= 30.0)

    def predictions(self, profile):
        """Plans are priced for balanced routing, so they run with it."""
        known = ["--from", profile] if profile else []
        if self.check.plan("calibrate", "--backend", "cuda", "--gpus", str(self.gpus), *known, "--out", "here.json") is None:
            return
        self.check.profile = "here.json"
        errors = []
        for kind, changed, seq, samples, fields, bar in LARGE[self.gpus] + PLANS:
            start = time.monotonic()
            fields = filled(fields, self.gpus)
            if "num_hidden_layers" in changed and changed["num_hidden_layers"] is None:
                changed = self.deepest(kind, seq, samples, fields)
            name = name_of(kind, changed, seq, fields, self.gpus)
            compared = self.check.trained(self.check.model(kind, changed), seq, samples * self.gpus, fields, gpus=self.gpus,
                                          fewest=6, more=("--balance", "forced"))
            if compared is not None:
                self.compared(name, compared, bar, ROOM.get((kind, changed.get("num_hidden_layers"))))
                errors.append(abs(compared["error"]))
                shutil.copytree(self.check.folder / "run", self.check.folder / f"run-{len(errors)}", dirs_exist_ok=True)
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        if errors:
            self.rows.below(f"mean error of {len(errors)} predicted steps over {self.gpus} GPUs", "relative", sum(errors) / len(errors), 0.05)
        self.choices()

    def deepest(self, kind, seq, samples, fields):
        """The configuration with as many layers as have room, in pairs."""
        for layers in range(32, 2, -2):
            (self.check.folder / "model.json").write_text(json.dumps(self.check.model(kind, {"num_hidden_layers": layers})))
            found = self.check.run("search", self.moe_plan, "search", "--model", "model.json", "--hardware", "here.json", "--gpus",
                                   self.gpus, "--gbs", samples * self.gpus, "--seq", seq, "--precision", "bf16", "--json",
                                   *(a for field in fields.split() for a in ("--fix", field)))
            if found is None or found.returncode == 0:
                break
        return {"num_hidden_layers": layers}

    def choices(self):
        """The planner's first choices, each of a mapping of its own, run one after another: the first beside the best."""
        kind, changed, seq, samples, count = CHOICE
        (self.check.folder / "model.json").write_text(json.dumps(self.check.model(kind, changed)))
        found = self.check.plan("search", "--model", "model.json", "--hardware", "here.json", "--gpus", str(self.gpus), "--gbs",
                                str(samples * self.gpus), "--seq", str(seq), "--precision", "bf16", "--fix", "cuda_graph=full",
                                "--top", str(count))
        if found is None:
            return
        reached = []
        for number, choice in enumerate(found["plans"], 1):
            plan = choice["plan"]
            (self.check.folder / "choice.json").write_text(json.dumps(plan))
            steps = self.check.steady_steps(choice["step_seconds"], 6)
            ran = self.check.plan("execute", "choice.json", "--data", "text", "--backend", "cuda", "--steps", str(steps), "--balance", "forced")
            if ran is None:
                return
            reached.append(statistics.median(step["tflops_per_gpu"] for step in ran["steps"][len(ran["steps"]) // 2:]))
            print(f"choice {number}: {choice['tflops_per_gpu']:.1f} predicted, {reached[-1]:.1f} TFLOPS/GPU reached, {mapping(plan)}", flush=True)
        name = f"{kind} {changed} over {self.gpus} GPUs: the planner's first choice beside the best of its first {len(reached)}"
        self.rows.add(name, "TFLOPS/GPU", reached[0], max(reached), 0.97, reached[0] >= 0.97 * max(reached))

    def compared(self, name, c, bar, room):
        rows, measured = self.rows, c["measured_tflops_per_gpu"]
        self.check.plans.append({"name": name, "by_kind": c["by_kind"]})
        if bar is not None:
            rows.add(f"{name}: TFLOPS/GPU", "TFLOPS/GPU", measured, bar, 1.0, measured >= bar)
        if room is not None:
            rows.below(f"{name}: memory, at most", "GiB", c["measured_memory_gib"], room)
        rows.within(f"{name}: step", "TFLOPS/GPU", c["predicted_tflops_per_gpu"], measured, 1.10)
        rows.within(f"{name}: memory", "GiB", c["predicted_memory_gib"], c["measured_memory_gib"], 1.02)
        shares = [c[f"{side}_exposed_communication_seconds"] / c[f"{side}_step_seconds"] for side in ("measured", "predicted")]
        rows.add(f"{name}: share of the step in which only communication runs, beside the predicted", "of the step", *shares, None, True)
