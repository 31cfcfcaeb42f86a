#!/usr/bin/env python3
"""Drives the page of `moe-plan ui` and a report in a headless Chromium, as a person would.

    MOE_PLAN=build/tools/moe-plan tests/browser/page_test.py [--screens DIR]

Without Chromium it says so and counts as skipped (exit status 77). --screens keeps pictures of the pages.
"""
import json
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in ("tests/schemas", "tests/tools/ui"):
    sys.path.insert(0, str(ROOT / folder))
import chromium
from served import COMMAND, Served
from suite import run

if chromium.find() is None:
    print("skipped: the pages are driven by chromium, which is not installed")
    sys.exit(77)

AXE = (ROOT / "third_party/axe/axe.min.js").read_text()
FOLDER = tempfile.TemporaryDirectory()
HERE = pathlib.Path(FOLDER.name)
SCREENS = pathlib.Path(sys.argv[2]) if sys.argv[1:2] == ["--screens"] else None
SIZES = [(1400, False), (390, True)]
ALL_SIZES = [(1400, False), (1400, True), (390, False), (390, True)]


def sound(page, what, sizes=SIZES):
    """At these widths, light or dark: nothing serious by axe-core, nothing wider than the screen; then: no complaint."""
    for width, dark in sizes:
        page.look(width, 900, dark)
        page.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        name = f"{what}-{width}{'-dark' if dark else ''}"
        if SCREENS:
            time.sleep(0.2)
            page.screen(SCREENS / f"{name}.png")
        faults = page.faults(AXE)
        assert not faults, f"{name}: axe-core: {json.dumps(faults, indent=1)}"
        assert page.wide() <= 0, f"{name}: {page.wide()} pixels wider than the screen"
    page.look(1400)
    assert not page.complaints(), f"{what}: {page.complaints()}"


def fill_small(page):
    page.wait("document.querySelector('form.request')")
    for field, value in {"model": "tiny-qwen3-moe", "hardware": "cpu-local", "gpus": "4", "gbs": 8, "seq": 64, "top": 6}.items():
        page.fill(f"form.request [name={field}]", value)
    page.click("input[name=precision][value=fp32]")


def search(page):
    page.click("form.request button[type=submit]")
    page.wait("document.querySelector('button.open')")


def column(page, number):
    return page.run(f"[...document.querySelectorAll('main:not([hidden]) tbody tr')].filter((row) => row.children.length > 8).map((row) => parseFloat(row.children[{number}].textContent.replace(',', '')))")


def newest_download(browser, name):
    path = pathlib.Path(browser.downloads.name) / name
    deadline = time.monotonic() + 10
    while not path.exists():
        assert time.monotonic() < deadline, f"{name} was not downloaded"
        time.sleep(0.05)
    time.sleep(0.1)
    text = path.read_text()
    path.unlink()
    return text


def test_search_sort_filter():
    page = BROWSER.open(SERVER.address)
    fill_small(page)
    sound(page, "form")
    search(page)
    sound(page, "results")
    rates = column(page, 1)
    assert len(rates) > 2 and rates == sorted(rates, reverse=True), rates
    page.run("[...document.querySelectorAll('button.sort')].find((one) => one.textContent === 'GiB').click()")
    sizes = column(page, 4)
    assert sizes == sorted(sizes, reverse=True) and page.count("th[aria-sort=descending]") == 1, sizes
    page.run("[...document.querySelectorAll('button.sort')].find((one) => one.textContent === 'GiB').click()")
    assert column(page, 4) == sorted(sizes)
    page.fill("input[type=search]", "no such words")
    assert len(column(page, 1)) == 0 and "0 of" in page.text()
    page.fill("input[type=search]", "")
    assert len(column(page, 1)) == len(rates)


def test_plan_what_if_and_side_by_side():
    page = BROWSER.open(SERVER.address)
    fill_small(page)
    search(page)
    page.click("button.open")
    page.wait("document.querySelector('svg.pipeline rect') && document.querySelector('.u-wrap canvas')")
    sound(page, "plan", ALL_SIZES)
    first = page.text(".cards")
    page.click("button.download")
    plan = json.loads(newest_download(BROWSER, "plan.json"))
    assert plan["schema"] == "moe-plan/plan/1" and plan["model"]["name"] == "tiny-qwen3-moe"
    (HERE / "plan.json").write_text(json.dumps(plan))
    subprocess.run([COMMAND, "show", "plan", str(HERE / "plan.json")], check=True, capture_output=True)
    page.click("button.take")
    page.wait(f"document.querySelector('.cards').innerText !== {json.dumps(first)} && document.querySelector('button.compare')")
    page.click("button.compare")
    page.wait("document.querySelector('main:not([hidden]) h1').innerText.includes('side by side')")
    assert page.run("document.querySelectorAll('main:not([hidden]) svg.pipeline').length") == 2
    assert page.run("document.querySelectorAll('main:not([hidden]) section:nth-of-type(1) tbody tr').length") > 0
    sound(page, "versus")


def test_memory_legend_adds_up():
    page = BROWSER.open((HERE / "report.html").as_uri())
    page.wait("document.querySelector('.legend .sum')")
    figures = "[...document.querySelectorAll('.legend tbody tr')].map((row) => parseFloat(row.lastChild.textContent))"
    *parts, total = page.run(figures)
    assert abs(sum(parts) - total) < 0.06 * len(parts) and total > 0, (parts, total)
    table = page.run("[...document.querySelectorAll('tr.sum')].map((row) => parseFloat(row.lastChild.textContent))")
    assert table[0] == table[1] == total, table  # the chart's legend and the table agree
    page.click(".legend button.switch")
    off, *rest, less = page.run(figures)
    assert off is None and less < total and page.text(".legend").count("off") == 1


def test_pipeline_zoom():
    page = BROWSER.open((HERE / "report.html").as_uri())
    page.wait("document.querySelector('svg.pipeline rect')")
    before, names = page.count("svg.pipeline rect"), page.count("svg.pipeline .slot-name")
    page.run("document.querySelector('svg.pipeline').parentElement.focus()")
    for _ in range(5):
        page.key("+", "+")
    assert page.count("svg.pipeline rect") < before and page.count("svg.pipeline .slot-name") >= min(names, 1)
    page.key("0", "0")
    assert page.count("svg.pipeline rect") == before
    page.click("button.switch[aria-pressed=true]")  # legend: one kind is hidden
    assert page.count("svg.pipeline rect") < before


def test_report_stands_alone():
    page = BROWSER.open((HERE / "report.html").as_uri())
    page.wait("document.querySelector('.origin')")
    sound(page, "report", ALL_SIZES)
    addresses = [address for address in page.addresses() if not address.startswith("data:")]
    assert addresses == [(HERE / "report.html").as_uri()], addresses
    text = page.text()
    for words in ("moe-plan replay", "sha256", "UTC", "What each single change would do"):
        assert words in text, words
    assert page.count("button.take") == 0  # nothing that would need a server
    page.click("a.term")
    assert page.run("document.activeElement.tagName") == "DT" and page.run("document.querySelector('.glossary').open")


def test_every_term_has_its_entry():
    page = BROWSER.open((HERE / "report.html").as_uri())
    page.wait("document.querySelector('.origin')")
    page.run("document.querySelector('.glossary').open = true")
    page.wait("document.querySelector('.glossary dt')")
    missing = page.run("[...document.querySelectorAll('a.term')].filter((link) => !document.getElementById(link.getAttribute('href').slice(1))).map((link) => link.textContent)")
    assert not missing, missing


def test_page_of_a_run():
    """As execute writes it: charts with legends that switch, loads of experts, both timelines, glossary, nothing asked for."""
    page = BROWSER.open((HERE / "run.html").as_uri())
    page.wait("document.querySelectorAll('svg.pipeline rect').length && document.querySelector('.u-wrap canvas')")
    sound(page, "run", ALL_SIZES)
    assert [address for address in page.addresses() if not address.startswith("data:")] == [(HERE / "run.html").as_uri()]
    run = json.loads((HERE / "run/run.json").read_text())
    text = page.text()
    for words in ("as it ran", "validation loss", "Gradient norm", "Load of experts", "Both timelines", "Furthest apart", "sha256", "moe-plan execute", f"{run['steps'][-1]['loss']:.4f}"):
        assert words in text, words
    assert page.count("svg.pipeline") == 2
    names, *layers = (HERE / "run/routing.csv").read_text().splitlines()
    assert page.count("svg.experts rect.load") == len(layers) * len(names.split(",")) > 0
    legend = "[...document.querySelectorAll('.legend')].find((one) => one.innerText.includes('training loss')).innerText"
    page.click(".legend button.switch")
    assert "off" in page.run(legend)
    page.run("document.querySelector('.u-over').dispatchEvent(new MouseEvent('mousemove', {clientX: 1, clientY: 1, bubbles: true}))")
    page.click("a.term")
    assert page.run("document.activeElement.tagName") == "DT"
    outside = page.run("""[...document.querySelectorAll('svg text')].filter((text) => {
        const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
        return inner.left < outer.left - 1 || inner.right > outer.right + 1;
    }).map((text) => text.textContent)""")
    assert not outside, f"labels outside of their frame: {outside}"


def test_page_of_a_comparison():
    """As compare writes it of the same run, and of two timelines alone."""
    compared = json.loads(subprocess.run([COMMAND, "compare", "run", "--report", "compared.html", "--json"], cwd=HERE, check=True, capture_output=True, text=True).stdout)
    page = BROWSER.open((HERE / "compared.html").as_uri())
    page.wait("document.querySelectorAll('svg.pipeline rect').length")
    sound(page, "compared")
    rows = page.run("[...document.querySelectorAll('[aria-label^=\"busy time by kind\"] tbody tr')].map((row) => row.firstChild.textContent)")
    assert rows == [kind["kind"] for kind in compared["by_kind"]] + ["waiting"], rows
    page.run("[...document.querySelectorAll('button.sort')].find((one) => one.textContent === 'count').click()")
    counts = page.run("[...document.querySelectorAll('[aria-label^=\"busy time by kind\"] tbody tr')].map((row) => Number(row.children[1].textContent.replace(',', '')))")
    assert counts == sorted(counts, reverse=True) and counts[0] == max(kind["count"] for kind in compared["by_kind"]), counts
    assert "moe-plan compare run" in page.text() and "moe-plan execute" in page.text()
    subprocess.run([COMMAND, "compare", "run/predicted.json", "run/measured.json", "--report", "two.html"], cwd=HERE, check=True, capture_output=True)
    page = BROWSER.open((HERE / "two.html").as_uri())
    page.wait("document.querySelectorAll('svg.pipeline rect').length")
    assert "Both timelines" in page.text() and "Gradient norm" not in page.text() and not page.complaints()


def test_import_and_launch():
    page = BROWSER.open(SERVER.address)
    page.wait("document.querySelector('form.request')")
    page.run("[...document.querySelectorAll('nav button')].find((one) => one.textContent === 'Import').click()")
    script = HERE / "train.sh"
    script.write_text("torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py --tensor-model-parallel-size 1 --expert-model-parallel-size 8 --micro-batch-size 1 "
                      "--global-batch-size 64 --seq-length 4096 --bf16 --moe-token-dispatcher-type alltoall --sequence-parallel --use-distributed-optimizer --surely-unknown 3\n")
    page.fill("main:not([hidden]) input[name=model]", "Qwen3-30B-A3B")
    page.fill("main:not([hidden]) input[name=gpus]", "8")
    page.choose_file("input[name=launch]", script)
    page.wait("document.querySelector('button.open-import')")
    assert "surely-unknown" in page.text()
    sound(page, "import")
    page.click("button.open-import")
    page.wait("document.querySelector('main:not([hidden]) .engines')")
    page.click("main:not([hidden]) .engines button")
    page.wait("document.querySelector('pre.script:not([hidden])')")
    assert "--expert-model-parallel-size" in page.text("pre.script")


def test_cancel_and_refusal():
    page = BROWSER.open(SERVER.address)
    page.wait("document.querySelector('form.request')")
    for field, value in {"model": "DeepSeek-V3", "hardware": "gb200-nvl72", "gpus": "1024", "gbs": 8192, "seq": 4096}.items():
        page.fill(f"form.request [name={field}]", value)
    page.click("form.request button[type=submit]")
    page.wait("document.querySelector('.said').innerText.includes('plans evaluated')")
    assert len(SERVER.children()) == 1
    page.click("button.cancel")
    page.wait("document.querySelector('.said').innerText === 'cancelled'")
    deadline = time.monotonic() + 5
    while SERVER.children():
        assert time.monotonic() < deadline, "the search goes on"
        time.sleep(0.05)
    page.fill("form.request [name=model]", "no-such-model")
    page.click("form.request button[type=submit]")
    page.wait("document.querySelector('.said').innerText.includes('no-such-model')")
    assert not page.complaints(), page.complaints()


def test_keyboard_alone():
    page = BROWSER.open(SERVER.address)
    fill_small(page)
    page.run("document.querySelector('form.request [name=seq]').focus()")
    page.key("Enter", "\r")  # sends the form
    page.wait("document.querySelector('button.open')")
    for _ in range(80):
        page.key("Tab")
        if page.run("document.activeElement.className") == "open":
            break
    assert page.run("document.activeElement.className") == "open"
    page.key("Enter", "\r")
    page.wait("document.querySelector('main:not([hidden]) .cards')")
    assert page.run("document.activeElement.tagName") == "H1"


def prepare():
    small = "--model tiny-qwen3-moe --hardware cpu-local --gpus 4 --gbs 16 --seq 64 --precision fp32 --fix pp=2"
    subprocess.run([COMMAND, "search", *small.split(), "--out", "plan.json"], cwd=HERE, check=True, capture_output=True)
    subprocess.run([COMMAND, "replay", "plan.json", "--report", "report.html"], cwd=HERE, check=True, capture_output=True)
    (HERE / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 500)
    subprocess.run([COMMAND, "tokenize", "a.txt", "--out", "text"], cwd=HERE, check=True, capture_output=True)
    subprocess.run([COMMAND, "execute", "plan.json", "--data", "text", "--steps", "6", "--valid-data", "text", "--eval-batches", "1", "--eval-interval", "2",
                    "--run-dir", "run", "--report", "run.html"], cwd=HERE, check=True, capture_output=True)


if __name__ == "__main__":
    if why := chromium.trouble():
        print(f"skipped: chromium does not run here: {why}")
        sys.exit(77)
    prepare()
    with Served() as SERVER, chromium.Browser() as BROWSER:
        status = run([value for name, value in list(globals().items()) if name.startswith("test_")])
    sys.exit(status)
