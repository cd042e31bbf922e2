"""`mainstem map --workers`: servers answer as one engine does."""

import csv
from pathlib import Path

from tests.fake_engines import FakeEngines
from tests.server.running import a_server
from tests.tables.test_map import Folder, some_rows


def test_a_server_answers_as_one_engine_does(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(some_rows(30))
    with folder.input.open("ab") as file:
        file.write(b"30,\xff,x\n")
    assert folder.run(prompt="{row}?") == 1
    alone = folder.rows()
    with a_server(engines=FakeEngines(num_pages=512)) as server:
        spread = tmp_path / "spread.csv"
        assert folder.run("--workers", server.url, output=spread, prompt="{row}?") == 1
        assert folder.rows(spread) == alone
        assert len(alone) == 31
        server.settle()


def test_choices_are_generated_by_servers(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write(some_rows(4))
    with a_server(engines=FakeEngines(num_pages=512)) as server:
        assert folder.run("--workers", server.url, "--choices", "yes,no") == 0
        server.settle()
    with folder.output.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert list(found[0])[3:] == ["answer", "answer_error"]
    assert {row["answer"] for row in found} <= {"yes", "no"}
