"""A headless Chromium driven over its DevTools pipe: pages, clicks by selector, keys, screens, and what went wrong."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

PATIENCE = 120  # seconds for an answer: tests of other folders may take both processors meanwhile


def find():
    """The browser's command, or None."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


def trouble():
    """Why the browser that is installed cannot even show an empty page, as where a container forbids what it asks for; or None."""
    try:
        with Browser() as browser:
            browser.open("about:blank")
    except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None


class Browser:
    """One process with a profile of its own, which goes away with it."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.downloads = tempfile.TemporaryDirectory()
        read_commands, self.commands = os.pipe()
        self.answers, write_answers = os.pipe()
        words = [find(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking",
                 "--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars", "--remote-debugging-pipe",
                 f"--user-data-dir={self.profile.name}", "about:blank"]
        # The pipe is spoken over descriptors 3 and 4.
        self.process = subprocess.Popen(["sh", "-c", f'exec "$@" 3<&{read_commands} 4>&{write_answers}', "sh", *words],
                                        pass_fds=(read_commands, write_answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(read_commands)
        os.close(write_answers)
        self.number, self.rest, self.events = 0, b"", []
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=self.downloads.name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.commands)
        os.close(self.answers)
        self.profile.cleanup()
        self.downloads.cleanup()

    def _receive(self, deadline):
        while b"\0" not in self.rest:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([self.answers], [], [], left)[0], "the browser does not answer"
            piece = os.read(self.answers, 1 << 20)
            assert piece, "the browser has ended"
            self.rest += piece
        text, self.rest = self.rest.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, session=None, seconds=PATIENCE, **parameters):
        """Calls a method of the DevTools protocol; events that come meanwhile are kept in self.events."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self.commands, json.dumps(message).encode() + b"\0") if len(json.dumps(message)) < 60000 else self._write_all(message)
        deadline = time.monotonic() + seconds
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            if "method" in answer:
                self.events.append(answer)

    def _write_all(self, message):
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data[:65536]):]

    def open(self, address, width=1400, height=900, dark=False):
        return Page(self, address, width, height, dark)


class Page:
    def __init__(self, browser, address, width, height, dark):
        self.browser = browser
        target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self.target = target
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.call(domain + ".enable")
        self.look(width, height, dark)
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def call(self, method, **parameters):
        return self.browser.call(method, session=self.session, **parameters)

    def look(self, width, height=900, dark=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def run(self, script):
        """The value of an expression in the page, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"].get("exception", {}).get("description", answer)
        return answer["result"].get("value")

    def wait(self, script, seconds=PATIENCE):
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < deadline, f"waited in vain for {script}; the page says: {self.run('document.body.innerText.slice(0, 600)')}"
            time.sleep(0.03)

    def text(self, selector="body"):
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector):
        return self.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector):
        """Clicks the middle of the first such element that is shown, as a mouse does."""
        place = self.run(f"""(() => {{
            const element = [...document.querySelectorAll({json.dumps(selector)})].find((one) => one.getClientRects().length);
            if (!element) return null;
            element.scrollIntoView({{block: "center"}});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        assert place, f"nothing to click: {selector}"
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def key(self, name, text=""):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode={"Tab": 9, "Enter": 13, " ": 32}.get(name, 0), text=text if kind == "keyDown" else "")

    def fill(self, selector, value):
        self.run(f"""(() => {{
            const field = document.querySelector({json.dumps(selector)});
            field.value = {json.dumps(str(value))};
            for (const name of ["input", "change"]) field.dispatchEvent(new Event(name, {{bubbles: true}}));
        }})()""")

    def choose_file(self, selector, path):
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def screen(self, path, whole=True):
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            area = {"clip": {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 12000), "scale": 1}, "captureBeyondViewport": True}
        else:
            area = {}
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png", **area)["data"]))

    def wide(self):
        """Pixels by which the page is wider than the screen."""
        return self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def complaints(self):
        """Errors of the console and of scripts."""
        found = []
        for event in self.browser.events:
            if event.get("sessionId") != self.session:
                continue
            parameters = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(parameters["exceptionDetails"].get("exception", {}).get("description") or parameters["exceptionDetails"]["text"])
            elif event["method"] == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(str(parameters["args"]))
        return found

    def addresses(self):
        """What the page asked for over the network."""
        return [event["params"]["request"]["url"] for event in self.browser.events
                if event.get("sessionId") == self.session and event["method"] == "Network.requestWillBeSent"]

    def faults(self, axe):
        """What axe-core finds serious or critical, as (rule, elements)."""
        self.run(axe + "; 0")
        return self.run("""axe.run(document, {resultTypes: ["violations"]}).then((found) => found.violations
            .filter((one) => ["serious", "critical"].includes(one.impact))
            .map((one) => [one.id, one.help, one.nodes.slice(0, 5).map((node) => node.html.slice(0, 160))]))""")
