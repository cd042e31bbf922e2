"""One browser for all tests of the page; each test opens its own tab."""

from collections.abc import Iterator

import pytest

from tests.server_page.browser import Page, browser, find_chromium


@pytest.fixture(scope="package")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("chromium is not installed")
    with browser(chromium, tmp_path_factory.mktemp("profile")) as made:
        yield made
