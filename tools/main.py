"""Shell. Main function of the tools: parses the command line, runs the command, prints errors."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from qmq.cli import PROGRAMS
from qmq.tools.call import Exit
from qmq.tools.files import NoInput
from qmq.tools.session import CannotAsk, Session
from qmq.tools.terminal import complain, program
from qmq.tools.usage import WrongUsage, completion, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `tools.sh … | head` ends quietly
    typed = sys.argv[1:] if arguments is None else arguments
    others = {name: entry.words for name, entry in PROGRAMS.items()} if program() == "qmq" else {}
    try:
        options = parse(typed, os.environ, now_ms=time.time_ns() // 1_000_000, program=program(), others=others)
        if options.command is None:
            print(completion(options.shell, program=program(), others=others))
            return Exit.DONE
        return Session.open(options).run()
    except WrongUsage as wrong:
        print(wrong.usage.rstrip(), file=sys.stderr)
        complain(str(wrong))
    except (NoInput, CannotAsk) as missing:
        complain(str(missing))
    except OSError as error:
        complain(f"{error}; nothing was changed")
    except KeyboardInterrupt:
        complain("interrupted before anything was changed")
        return Exit.REFUSED
    return Exit.USAGE
