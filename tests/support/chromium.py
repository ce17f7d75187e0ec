"""Shell. A headless Chromium, driven through its own protocol over two pipes: no driver, no package, no port."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

AXE = Path(__file__).parent / "axe" / "axe.min.js"
ANSWER_S = 60.0
FOCUSABLE = "a[href], button, input:not([type=hidden]), select, textarea, summary"


class Chromium:
    """One browser with one page; blocking; a context manager.

    Args:
        profile: directory of its own.
    """

    def __init__(self, profile: Path) -> None:
        self._profile = profile
        self._number, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        """Events since `open`: page errors, and requests refused by its policy."""

    def __enter__(self) -> Chromium:
        self._profile.mkdir(parents=True, exist_ok=True)
        command_end, self._write = os.pipe()
        self._read, answer_end = os.pipe()
        self._process = subprocess.Popen(
            [
                "bash",
                "-c",
                'exec 3<&$1 4>&$2; shift 2; exec chromium "$@"',
                "-",
                str(command_end),
                str(answer_end),
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-pipe",
                "--hide-scrollbars",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--window-size=1280,900",
                f"--user-data-dir={self._profile}",
            ],
            pass_fds=(command_end, answer_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(command_end)
        os.close(answer_end)
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "DOM"):
            self.command(f"{domain}.enable")
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        os.close(self._write)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def command(self, method: str, **words: Any) -> Any:
        """Run a command of the protocol; return its result."""
        self._number += 1
        order = {"id": self._number, "method": method, "params": words}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, words, answer["error"])
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> Any:
        while b"\0" not in self._buffer:
            assert select.select([self._read], [], [], ANSWER_S)[0], (
                f"chromium sent nothing; before: {self.events[-3:]}"
            )
            piece = os.read(self._read, 1 << 20)
            assert piece, f"chromium ended with {self._process.poll()}"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    # A page.

    def open(self, address: str) -> str:
        """Go to an address and wait until it is loaded; return its visible text."""
        self.events.clear()
        self.command("Page.navigate", url=address)
        self.await_event("Page.loadEventFired")
        return self.text()

    def await_event(self, method: str) -> None:
        ends = time.monotonic() + ANSWER_S
        while not any(event.get("method") == method for event in self.events):
            assert time.monotonic() < ends, f"no {method}"
            self.events.append(self._receive())

    def await_next(self, method: str) -> None:
        """Wait until the event occurs again."""
        self.events.clear()
        self.await_event(method)

    def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        result = self.command("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, (script[:200], result["exceptionDetails"])
        return result["result"].get("value")

    def text(self) -> str:
        """Return the visible text, on one line."""
        return " ".join(str(self.run("document.body ? document.body.innerText : ''")).split())

    def complaints(self) -> list[str]:
        """Return the browser's warnings and errors: policy, scripts, missing files."""
        entries = [event["params"]["entry"] for event in self.events if event.get("method") == "Log.entryAdded"]
        raised = [event for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
        return [entry["text"] for entry in entries if entry["level"] in ("error", "warning")] + [str(e) for e in raised]

    def picture(self, width: int, height: int) -> bytes:
        """Return the top of the page as PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        return base64.b64decode(self.command("Page.captureScreenshot", format="png", clip=clip)["data"])

    # Input.

    def press(self, key: str, *, shift: bool = False, text: str = "") -> None:
        code = {"Tab": 9, "Enter": 13, "Space": 32}[key]
        words = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self.command("Input.dispatchKeyEvent", type="keyDown", **words, **({"text": text} if text else {}))
        self.command("Input.dispatchKeyEvent", type="keyUp", **words)

    def type(self, text: str) -> None:
        self.command("Input.insertText", text=text)

    def follow(self) -> str:
        """Press Enter on the focused element, which leads to another page; return its visible text."""
        self.events.clear()
        self.press("Enter", text="\r")
        self.await_event("Page.loadEventFired")
        return self.text()

    def click(self, text: str) -> str:
        """Click the first link or button that begins with `text`, which leads to a page; return its visible text."""
        self.events.clear()
        found = self.run(
            "(t => { const e = [...document.querySelectorAll('a, button')]"
            ".find(e => e.innerText.trim().startsWith(t)); if (e) e.click(); return !!e })"
            f"({json.dumps(text)})"
        )
        assert found, (text, self.text())
        self.await_event("Page.loadEventFired")
        return self.text()

    def fill(self, name: str, text: str) -> None:
        """Set the field or choice of this name to `text`."""
        script = "([n, t]) => { document.querySelector(`[name=${n}]:not([type=hidden])`).value = t }"
        self.run(f"({script})({json.dumps([name, text])})")

    def tab_walk(self) -> tuple[list[str], list[str], list[str]]:
        """Press Tab from the top of the page to its end.

        Returns:
            Focusable elements in document order, elements in the order of focus, focused ones without an outline.
        """
        name = (
            "(e => e.tagName + ' ' + (e.name || '') + ' ' + (e.innerText || e.value || '').trim().slice(0, 60)"
            " + ' #' + (e.walked ??= window.walked = (window.walked || 0) + 1))"  # a redrawn element moves others
        )
        shown = "e => e.checkVisibility() && !e.disabled && (!e.closest('details:not([open])') || e.matches('summary'))"
        wanted = self.run(f"[...document.querySelectorAll({FOCUSABLE!r})].filter({shown}).map({name})")
        self.run("(b => { b.tabIndex = -1; b.focus(); b.removeAttribute('tabindex'); scrollTo(0, 0) })(document.body)")
        had, unseen = [], []
        for _ in range(8 * len(wanted)):  # a date field has several stops
            self.press("Tab")
            focused = self.run(f"document.activeElement === document.body ? '' : {name}(document.activeElement)")
            if not focused or (had and focused == had[0]):
                break
            if had and focused == had[-1]:
                continue
            had.append(focused)
            style = self.run(
                "(e => { const s = getComputedStyle(e), b = e.getBoundingClientRect();"
                " return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2 && b.right > 0 && b.bottom > 0 })"
                "(document.activeElement)"
            )
            unseen += [] if style else [focused]
        return wanted, had, unseen

    def axe(self, *, only: tuple[str, ...] = ()) -> list[str]:
        """Return serious and critical findings of axe-core: rule, explanation, element."""
        if not self.run("typeof axe === 'object'"):
            self.command("Runtime.evaluate", expression=AXE.read_text())
        rules = {"runOnly": {"type": "rule", "values": list(only)}} if only else {}
        found = self.run(
            f"axe.run(document, {json.dumps(rules | {'resultTypes': ['violations']})}).then(r => r.violations)"
        )
        return [
            f"{one['id']} ({one['impact']}): {one['help']}: {node['html'][:200]} {node.get('failureSummary', '')[:300]}"
            for one in found
            if one["impact"] in ("serious", "critical")
            for node in one["nodes"]
        ]
