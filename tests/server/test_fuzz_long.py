"""Thousands of random requests, and every limit of every field, never cause a 5xx or a hang.

Only collecting this file takes seconds, since its cases are made then: tests/conftest.py leaves it
out of runs without slow tests.
"""

import hypothesis
import pytest

from tests.server.running import Running
from tests.server.test_fuzz import Case, fuzz, fuzzed, the_schema

__all__ = ["fuzzed"]  # a fixture

schema = the_schema()


@pytest.mark.slow
@schema.parametrize()
@hypothesis.settings(max_examples=400, deadline=None)
def test_thousands_of_random_requests_cause_no_server_error(case: Case, fuzzed: Running) -> None:
    fuzz(case, fuzzed)
