"""One browser for all tests of the page; each test opens its own tab."""

from collections.abc import Iterator

import pytest

from tests.needs import skip_without
from tests.server_page.browser import Page, browser


@pytest.fixture(scope="package")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    skip_without("chromium")
    with browser(tmp_path_factory.mktemp("profile")) as made:
        yield made
