"""What compute-sanitizer says of the kernels' tests, case by case: accesses outside of memory and races in shared memory."""
import fnmatch
import os
import re
import shutil

import gpu_kernels

TOOLS = ("memcheck", "racecheck")
SUMMARY = re.compile(r"^========= (?:ERROR|RACECHECK) SUMMARY: (\d+) ", re.MULTILINE)
RACE = re.compile(r"^========= (?:Error|Warning): Race reported between \w+ access at (.*?)\+0x", re.MULTILINE)


def races(said):
    """Kernels of ours that have reports, as often as they have; those of the libraries' do not count."""
    return [kernel for kernel in RACE.findall(said) if "moe::" in kernel]


def sanitized(check, program, patterns):
    """check: of tools/gpu-check; program: the kernels' tests; patterns: of the cases, as a shell's."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.access(sanitizer, os.X_OK):
        return check.rows.failed("compute-sanitizer", "not found: it comes with the CUDA Toolkit")
    names = gpu_kernels.cases(check, program)
    if names is None:
        return
    names = [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not names:
        return check.rows.failed("sanitizers", f"no case is called {' or '.join(patterns)}")

    def one(job):
        tool, name = job
        # The tool rewrites every kernel that is loaded: a case loads its own.
        return check.run(f"{tool}: {name}", "env", "CUDA_MODULE_LOADING=LAZY", sanitizer, "--tool", tool, "--print-limit",
                         "1000", program, gpu_kernels.only(name))

    jobs = [(tool, name) for name in names for tool in TOOLS]
    for (tool, name), done in gpu_kernels.at_once(jobs, one):
        if done is None:
            continue
        summary = SUMMARY.search(done.stdout)
        if summary is None or done.returncode != 0:
            print(f"{tool}: {name}:\n{done.stdout[-4000:]}{done.stderr[-1000:]}")
            check.rows.failed(f"{tool}: {name}", f"exit status {done.returncode}")
            continue
        racing = races(done.stdout)
        reports = len(racing) if tool == "racecheck" else int(summary[1])
        if reports > 0:
            print(f"{tool}: {name}: {'; '.join(sorted(set(racing))) or done.stdout[:4000]}")
        check.rows.below(f"{tool}: {name}", "reports", reports, 0)
