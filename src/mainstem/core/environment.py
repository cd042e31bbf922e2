"""Variables of the environment that are read and set; secrets are read in core/config.py.

Read:
    MAINSTEM_CACHE   folder for converted models, calibrations and notes about other files
    XDG_CACHE_HOME   the parent of that folder, if MAINSTEM_CACHE is not set
    OMP_WAIT_POLICY, GOMP_SPINCOUNT   see child_environment
Set, here or for child processes (child_environment):
    MIMALLOC_PURGE_DELAY   unless set, see keep_freed_memory
    PYTHONPATH, GOMP_SPINCOUNT   see child_environment
    GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME   unless set, see rank_environment
"""

import os
import sys
from pathlib import Path

# A process that runs an engine releases Python's lock this often for threads that read pages. With
# Python's default, 5 ms, a disk reaches a third of its rate.
SWITCH_S = 0.0005


def cache_dir() -> Path:
    """The folder of MAINSTEM_CACHE; not created here."""
    if own := os.environ.get("MAINSTEM_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "mainstem"
    return Path.home() / ".cache" / "mainstem"


def keep_freed_memory() -> None:
    """Let torch reuse a layer's buffers for the next layer. Call it before torch is loaded.

    torch for Arm uses mimalloc, which returns memory to the system 10 ms after it was freed: every
    layer of a long step then pays for new page faults, a tenth of an int8 step's time.
    """
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "10000")  # milliseconds


def child_environment() -> dict[str, str]:
    """The environment of a child process that finds modules where this one does.

    Its OpenMP threads sleep while they wait instead of spinning, unless the user has set
    OMP_WAIT_POLICY or GOMP_SPINCOUNT. On a CPU both processes use all cores, and spinning threads
    would take cores from the process that serves clients.
    """
    own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    if "OMP_WAIT_POLICY" not in os.environ:
        own["GOMP_SPINCOUNT"] = os.environ.get("GOMP_SPINCOUNT", "1000")
    return os.environ | own


def rank_environment() -> dict[str, str]:
    """The environment of a rank: ranks of one machine talk over its loopback, unless the user has
    set another interface."""
    own = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
    return own | child_environment()
