"""Starts `moe-plan ui` on a free port and speaks HTTP to it; ends it with the object."""
import http.client
import json
import os
import signal
import socket
import subprocess
import urllib.parse

COMMAND = os.environ.get("MOE_PLAN", "")


class Served:
    def __init__(self, *words):
        self.process = subprocess.Popen([COMMAND, "ui", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.address = self.process.stdout.readline().strip()
        parts = urllib.parse.urlsplit(self.address)
        self.host, self.port = parts.hostname, parts.port
        self.token = urllib.parse.parse_qs(parts.query)["token"][0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        """Ends it as Ctrl-C does; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(20)
        finally:
            self.process.stdout.close()

    def ask(self, method, path, body=None, **headers):
        """Status, headers and text of one request; a header of None is left out."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        names = {"X-Moe-Plan-Token": self.token, "Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        connection.request(method, path, body, {name: value for name, value in names.items() if value is not None})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, dict(answer.getheaders()), text

    def events(self, name, request):
        """The events that a request is answered by, as (name, data)."""
        status, _, text = self.ask("POST", "/api/" + name, json.dumps(request))
        assert status == 200, (status, text)
        return events_of(text)

    def result(self, name, request):
        """The document that a request ends with."""
        last = self.events(name, request)[-1]
        assert last[0] == "result", last
        return json.loads(last[1])

    def children(self):
        """Processes that the server has started and that still run."""
        tasks = f"/proc/{self.process.pid}/task"
        while True:
            direct = []
            try:
                for task in os.listdir(tasks):
                    with open(f"{tasks}/{task}/children") as file:
                        direct += file.read().split()
                return sorted(set(direct))
            except FileNotFoundError:  # a thread has ended meanwhile, and another has its children
                if not os.path.exists(tasks):
                    raise

    def open_stream(self, name, request):
        """Sends a request and returns its socket, whose answer is not read."""
        body = json.dumps(request).encode()
        stream = socket.create_connection((self.host, self.port), timeout=60)
        stream.sendall(f"POST /api/{name} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nX-Moe-Plan-Token: {self.token}\r\n"
                       f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        return stream


def events_of(text):
    events = []
    for block in text.split("\n\n"):
        lines = block.split("\n")
        if lines[0].startswith("event: "):
            events.append((lines[0][7:], "\n".join(line[6:] for line in lines[1:] if line.startswith("data: "))))
    return events
