"""Shell. A bash of a test that types the blocks of a page."""

from __future__ import annotations

import subprocess
import time

BLOCK_S = 180


class Shell:
    """One bash that runs a block after the other and stops at the first failure."""

    def __init__(self, command, log, **options):
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "bash"], stdin=subprocess.PIPE, stdout=output, stderr=output, text=True, **options
            )
        self._read_chars = 0
        self._number = 0

    def type(self, text):
        """Run a block; return its output."""
        self._number += 1
        done = f"== {self._number} done ==\n"
        self.process.stdin.write(f"{text}\necho; echo '{done.strip()}'\n")
        self.process.stdin.flush()
        deadline = time.monotonic() + BLOCK_S
        while not (output := self._log.read_text(errors="replace")[self._read_chars :]).endswith(done):
            assert self.process.poll() is None, f"this ended with {self.process.returncode}:\n{text}\n\n{output}"
            assert time.monotonic() < deadline, f"this takes too long:\n{text}\n\n{output}"
            time.sleep(0.05)
        self._read_chars += len(output)
        return output.removesuffix(done)

    def repeat(self, text):
        return self.type(f"until {{ {text}\n}}; do sleep 1; done")

    def close(self):
        self.process.stdin.close()
        self.process.wait(BLOCK_S)
