"""Shell. `python -m qmq.broker`."""

import sys

from qmq.broker.main import main

sys.exit(main())
