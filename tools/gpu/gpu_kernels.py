"""The kernels' tests and timings on a GPU: the tests several at once, since most of their time is the host's, then the timings alone."""
import concurrent.futures
import json
import re

AT_ONCE = 8  # processes on the GPU; each has little to do for it
RAN = re.compile(r"test cases: +[1-9]")  # what a name stands for, and not nothing: that would pass


def cases(check, program, *options):
    """Names of the tests' cases, None with a row where the program does not say them. check: of tools/gpu-check."""
    listed = check.run("the kernels' cases", program, *options, "--list-test-cases")
    if listed is None:
        return None
    return [line for line in listed.stdout.splitlines() if line and not line.startswith(("[doctest]", "===="))]


def only(name):
    """What has the program run this case alone. A comma would begin another pattern."""
    return "-tc=" + name.replace(",", "?")


def at_once(jobs, run):
    """Pairs of a job and what run made of it, in the order of the jobs."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        yield from zip(jobs, pool.map(run, jobs))


class Worst:
    """Of the rows of one name, which every case with such an op reports, the one nearest to its bar."""

    def __init__(self):
        self.rows, self.cases = {}, 0

    def add(self, report):
        self.cases += report["cases"]
        for row in report["rows"]:
            if row["ratio"] >= self.rows.setdefault(row["name"], row)["ratio"]:
                self.rows[row["name"]] = row


def tested(check, program, beside=lambda: None):
    """Rows of errors and times; the device's name, None where nothing was timed. beside: another job, done before anything is timed,
    which leaves most of its time to the host too."""
    both = [[(name, options) for name in cases(check, program, *options) or []] for options in ([], ["--plain"])]
    jobs = [(f"report-{at}.json", *job) for at, job in enumerate(both[0] + both[1])]
    worst, failed = Worst(), 0

    def one(job):
        file, name, options = job
        return check.run(f"kernels: {name}", program, "--out", file, *options, only(name))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        other = pool.submit(beside)
        outcomes = list(at_once(jobs, one))
        other.result()  # raises what it raised
    for (file, name, _), done in outcomes:
        if done is None or done.returncode != 0 or not RAN.search(done.stdout):
            failed += 1
            if done is not None:  # else a row says why
                print(f"{name}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
                check.rows.failed(f"kernels: {name}", f"exit status {done.returncode}" if done.returncode else "ran no case")
            continue
        worst.add(json.loads((check.folder / file).read_text()))
    check.rows.list += worst.rows.values()
    check.rows.add("kernels: all cases", "failed", failed, 0, None, failed == 0 < len(jobs))
    done = check.run("kernels: timings", program, "--out", "timings.json", "--bench", only("none"))
    if done is None:
        return None
    if done.returncode != 0:
        return check.rows.failed("kernels: timings", f"exit status {done.returncode}: {done.stderr[-300:]}")
    report = json.loads((check.folder / "timings.json").read_text())
    check.rows.list += report["rows"]
    print(f"{report['device']}, {report['gemm']}, {report['attention']}: {worst.cases} comparisons in {len(jobs)} cases")
    return report["device"]
