"""Drives headless Chromium over its DevTools pipe, with the standard library alone."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


def find():
    """The path of a browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def start(command):
    """The process, where to write commands and where to read answers: the browser has them as descriptors 3 and 4."""
    to_browser, write_end = os.pipe()
    read_end, from_browser = os.pipe()

    def connect():
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        for descriptor, end in zip((3, 4), high, strict=True):
            os.dup2(end, descriptor)
            os.close(end)

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, preexec_fn=connect, close_fds=False, **quiet)
    os.close(to_browser)
    os.close(from_browser)
    return process, write_end, read_end


class Browser:
    """One page of one browser; `events` holds everything it reported."""

    def __init__(self, path, profile, timeout=60.0):
        self.timeout, self.count, self.events, self.buffer = timeout, 0, [], b""
        self.process, self.write_end, self.read_end = start([path, *FLAGS, f"--user-data-dir={profile}", "about:blank"])
        self.session = None
        self.attach()

    def attach(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Sends a command and waits for its answer."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.write_end, json.dumps(message).encode() + b"\0")
        return self.wait_for(lambda answer: answer.get("id") == self.count, method)["result"]

    def wait_for(self, wanted, what):
        deadline = time.monotonic() + self.timeout
        while True:
            message = self.receive(deadline, what)
            if "method" in message:
                self.events.append(message)
            if "error" in message:
                raise RuntimeError(f"{what}: {message['error']}")
            if wanted(message):
                return message

    def receive(self, deadline, what):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.read_end], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.read_end, 1 << 20) if ready else b""
            if not chunk:
                raise TimeoutError(f"the browser did not answer to {what}")
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def open(self, url, width=1280, height=900, dark=False):
        """Loads a page at a size and colour scheme, and waits until it is complete."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=url)
        if not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.wait_for(lambda message: message.get("method") == "Page.loadEventFired", url)

    def run(self, expression):
        """The value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"])
        return answer["result"].get("value")

    def point(self, x, y):
        """Moves the mouse to a place of the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector):
        """A real click in the middle of an element."""
        self.run(
            f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def middle(self, selector):
        """Where an element is in the window."""
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        return self.run(f"(b => [b.left + b.width / 2, b.top + b.height / 2])({box})")

    def errors(self):
        """Uncaught exceptions and messages of level error."""
        return [e for e in self.events if e["method"] == "Runtime.exceptionThrown" or is_error(e)]

    def requests(self):
        """The addresses that the page asked for."""
        sent = [e["params"]["request"]["url"] for e in self.events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in sent if not url.startswith("data:")]

    def screenshot(self, file, whole=False):
        """Writes what is seen, or the whole page, as PNG."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(answer["data"]))

    def close(self):
        """Ends the browser that was started here."""
        os.close(self.write_end)
        os.close(self.read_end)
        self.process.terminate()
        self.process.wait(20)


def is_error(event):
    return event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error"


SIZES = {"phone": (390, 844), "desktop": (1280, 900)}


def count(browser: Browser, selector: str) -> int:
    """How many elements of the page there are."""
    return browser.run(f"document.querySelectorAll({selector!r}).length")


def keep(browser: Browser, name: str) -> None:
    """A picture to look at, where a folder for them is given."""
    if "VARPROP_SCREENSHOTS" in os.environ:
        folder = Path(os.environ["VARPROP_SCREENSHOTS"])
        folder.mkdir(parents=True, exist_ok=True)
        browser.screenshot(folder / f"{name}.png")
