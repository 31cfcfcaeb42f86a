#!/usr/bin/env python3
"""Holds the server of `moe-plan ui` to its promises: who may ask, how much, and that work ends with who asked for it.

    MOE_PLAN=build/tools/moe-plan tests/tools/ui/server_test.py
"""
import glob
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "schemas"))
from served import COMMAND, Served
from suite import run

SMALL = {"model": "tiny-qwen3-moe", "hardware": "cpu-local", "gpus": "2", "gbs": 4, "seq": 64, "precision": "fp32", "top": 3}
# A search of minutes, which nobody waits for here.
LONG = {"model": "DeepSeek-V3", "hardware": "gb200-nvl72", "gpus": "1024", "gbs": 8192, "seq": 4096}
SERVER = Served()


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_the_page_needs_the_token():
    status, headers, text = SERVER.ask("GET", "/?token=" + SERVER.token)
    assert status == 200 and headers["Content-Type"].startswith("text/html") and "<!doctype html>" in text
    assert headers["X-Frame-Options"] == "DENY" and headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    for path in ("/", "/?token=", "/?token=" + "0" * 32, "/?token=" + SERVER.token[:-1]):
        assert SERVER.ask("GET", path)[0] == 403, path
    for token in (None, "", "0" * 32, SERVER.token + "0"):
        assert SERVER.ask("POST", "/api/show", '{"what":"models"}', X_Moe_Plan_Token=token)[0] == 403, token


def test_tokens_differ():
    with Served() as other:
        assert re.fullmatch("[0-9a-f]{32}", other.token) and other.token != SERVER.token
        assert other.end() == 0


def test_the_page_asks_nobody_else():
    text = SERVER.ask("GET", "/?token=" + SERVER.token)[2]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    outside = set(re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?(https?:[^"\')\s]*)', text))
    assert not outside, outside


def test_host_and_origin():
    ask = lambda **headers: SERVER.ask("POST", "/api/show", '{"what":"stacks"}', **headers)[0]
    own = f"127.0.0.1:{SERVER.port}"
    assert ask() == 200
    assert ask(Host=f"localhost:{SERVER.port}") == 200
    assert ask(Host=own, Origin="http://" + own) == 200
    for host in ("example.org", f"example.org:{SERVER.port}", "127.0.0.1", f"127.0.0.1.example.org:{SERVER.port}", f"127.0.0.1:{SERVER.port + 1}"):
        assert ask(Host=host) == 403, host
    for origin in ("http://example.org", "null", f"https://{own}", f"http://localhost:{SERVER.port}"):
        assert ask(Host=own, Origin=origin) == 403, origin
    assert ask(Sec_Fetch_Site="cross-site") == 403


def test_requests_are_bounded():
    status, _, text = SERVER.ask("POST", "/api/import", json.dumps({"name": "a.sh", "text": "x" * (5 << 20), "hardware": "h100"}))
    assert status == 413 and "4 MiB" in text, (status, text)
    assert SERVER.ask("GET", "/?token=" + SERVER.token, Cookie="x" * 20000)[0] == 431
    assert SERVER.ask("POST", "/api/show", '{"what":"models"}')[0] == 200  # and it goes on


def test_what_is_no_request():
    assert SERVER.ask("GET", "/api/show")[0] == 405
    assert SERVER.ask("POST", "/?token=" + SERVER.token, "{}")[0] == 405
    assert SERVER.ask("GET", "/other")[0] == 404
    assert SERVER.ask("POST", "/api/show", '{"what":"models"}', Content_Type="text/plain")[0] == 415
    for path, body, words in (("show", "{", "not valid JSON"), ("show", '{"what":"files"}', "models, hardware or stacks"), ("delete", "{}", "no such request"),
                              ("search", '{"modell":"x"}', "modell"), ("search", '{"model":"/etc/passwd"}', "without a slash"),
                              ("search", '{"fix":["routing=/etc/passwd"]}', "without a slash"), ("launch", '{"plan":{},"engine":"--out"}', "engine"),
                              ("plan", '{"plan":3}', "plan"), ("plan", '{"plan":{"stack":"/etc/passwd"}}', "without a slash"),
                              ("launch", '{"plan":{"workload":{"routing":"/etc/passwd"}},"engine":"mpi"}', "without a slash")):
        status, _, text = SERVER.ask("POST", "/api/" + path, body)
        assert status == 400 and words in text and text.count("\n") == 1, (path, status, text)
    with socket.create_connection((SERVER.host, SERVER.port), timeout=20) as stream:
        stream.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert stream.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_script_reads_no_file_of_the_machine():
    with tempfile.TemporaryDirectory() as folder:
        sizes = pathlib.Path(folder, "sizes.sh")
        sizes.write_text("ARGS=(--num-layers 7 --hidden-size 512)\n")
        script = f"source {sizes}\npython pretrain_gpt.py $" + "{ARGS[@]} --num-attention-heads 8 --vocab-size 512 --seq-length 64\n"
        request = {"name": "run.sh", "text": script, "hardware": "h100", "gpus": 8}
        _, _, text = SERVER.ask("POST", "/api/import", json.dumps(request))
        assert "event: refused" in text and "says no layers" in text, text


def test_a_search_and_what_follows():
    found = SERVER.result("search", SMALL)
    assert found["schema"] == "moe-plan/search/1" and len(found["plans"]) > 1
    plan = found["plans"][0]["plan"]
    report = SERVER.result("plan", {"plan": plan, "set": []})
    assert report["schema"] == "moe-plan/report/1" and report["explain"]["plan"] == plan
    text = SERVER.result("launch", {"plan": plan, "engine": "slurm"})["text"]
    assert text.startswith("#!/bin/bash") and "srun" in text
    delta = report["explain"]["deltas"][0]
    changes = [f'{change["field"]}={change["to"]}' for change in [delta, *delta["along"]] if change["field"] != "edp"]
    changed = SERVER.result("plan", {"plan": plan, "set": changes})["explain"]["plan"]
    assert changed != plan and SERVER.result("plan", {"plan": changed})["explain"]["plan"] == changed


def test_an_uploaded_model():
    config = (pathlib.Path(__file__).resolve().parents[3] / "profiles/models/tiny-qwen3-moe.json").read_text()
    request = {**SMALL, "config": config}
    del request["model"]
    assert SERVER.result("search", request)["plans"]
    assert SERVER.events("search", {**request, "config": "{}"})[-1][0] == "refused"


def test_an_import():
    script = "torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py --expert-model-parallel-size 8 --micro-batch-size 1 --global-batch-size 64 --seq-length 4096 --bf16 --surely-unknown 3\n"
    answer = SERVER.result("import", {"name": "../run.sh", "text": script, "hardware": "h100", "model": "Qwen3-30B-A3B", "gpus": 16})
    assert answer["plan"]["mesh"]["ep"] == 8 and any("surely-unknown" in str(one) for one in answer["unknown"])


def test_refusals_are_those_of_the_verb():
    for change, status, words in (({"model": "no-such-model"}, 2, "no-such-model"), ({"fix": ["tp=3"]}, 2, "tp"), ({"model": "--help"}, 2, "--help")):
        kind, data = SERVER.events("search", {**SMALL, **change})[-1]
        said = json.loads(data)
        assert kind == "refused" and said["status"] >= status and words in said["line"], (change, said)


def test_progress_and_cancel():
    before = set(glob.glob(tempfile.gettempdir() + "/moe-plan-ui-*"))
    with SERVER.open_stream("search", LONG) as stream:
        wait_for(lambda: SERVER.children())
        text = b""
        while b"event: progress" not in text:
            piece = stream.recv(4096)
            assert piece, text
            text += piece
        assert b"plans evaluated" in text and len(SERVER.children()) == 1
    wait_for(lambda: not SERVER.children(), 3.0)  # a closed tab ends its search
    wait_for(lambda: set(glob.glob(tempfile.gettempdir() + "/moe-plan-ui-*")) <= before)


def test_workers_are_bounded():
    streams = [SERVER.open_stream("search", LONG) for _ in range(4)]
    try:
        wait_for(lambda: len(SERVER.children()) == 4)
        status, _, text = SERVER.ask("POST", "/api/search", json.dumps(SMALL))
        assert status == 503 and "try again" in text
        assert SERVER.ask("GET", "/?token=" + SERVER.token)[0] == 200
    finally:
        for stream in streams:
            stream.close()
    wait_for(lambda: not SERVER.children(), 5.0)


def test_the_end_ends_searches():
    with Served() as server:
        stream = server.open_stream("search", LONG)
        wait_for(lambda: server.children())
        child = server.children()[0]
        assert server.end() == 0
        wait_for(lambda: not os.path.exists(f"/proc/{child}"), 3.0)
        stream.close()


def test_command_line():
    for words, line in ((["--port", "70000"], "--port 70000"), (["--listen", "example.org"], "--listen example.org"), (["--port", str(SERVER.port)], "choose another by --port")):
        done = subprocess.run([COMMAND, "ui", *words], capture_output=True, text=True, timeout=20)
        assert done.returncode == 2 and line in done.stderr and done.stderr.count("\n") == 1 and not done.stdout, done


if __name__ == "__main__":
    try:
        status = run([value for name, value in list(globals().items()) if name.startswith("test_")])
    finally:
        ended = SERVER.end()
    sys.exit(status or ended)
