"""A rank does not outlive the launcher that started it.

The one idea: an agent that is killed outright cannot end its ranks, and ranks that are all well never notice; so each
asks the system for a signal when its parent goes. What a SIGTERM does to a rank is decided elsewhere.
"""

from __future__ import annotations

import ctypes
import signal
import sys

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def end_with_launcher() -> None:
    """From now on this process gets SIGTERM when its parent ends; where the system is not Linux, it does not."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
