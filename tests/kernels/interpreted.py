"""Whether this process runs Triton kernels under the interpreter.

It must be chosen before triton is imported, so these tests run in a separate process:
`test_interpreter.py` starts it, or set TRITON_INTERPRET=1 for the whole of pytest.
"""

import os

import pytest


def require_interpreter() -> None:
    """Skip the calling module unless kernels run on the CPU here."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1; see test_interpreter.py", allow_module_level=True)
