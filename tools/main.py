"""Shell. Reads the command line, shows the plan, asks, asks the metaserver, prints the answer."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from tools.answer import Exit
from tools.completion import completion
from tools.inputs import NoInput
from tools.session import CannotAsk, Session
from tools.terminal import complain
from tools.usage import WrongUsage, parse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `tools.sh … | head` ends quietly
    try:
        options = parse(
            sys.argv[1:] if arguments is None else arguments, os.environ, now_ms=time.time_ns() // 1_000_000
        )
        if options.command is None:
            print(completion(options.shell))
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
