"""`mainstem bench columns` with a tokenizer of bytes."""

from pathlib import Path

from mainstem_bench.columns import choose_for_random, compare
from tests.fake_engines import a_tokenizer


def test_a_table_is_ordered_nearly_as_well_as_possible(tmp_path: Path) -> None:
    path = tmp_path / "some.csv"
    rows = [f"{n},{'cat' if n % 2 else 'a longer word'},{n % 5}" for n in range(30)]
    path.write_text("\n".join(["id,kind,stars", *rows]) + "\n")
    found = compare(path, 30, a_tokenizer())
    assert found["fields"] == 3
    assert str(found["chosen_order"]) == "kind,stars,id"
    assert 1 <= float(str(found["chosen_over_best"])) <= 1.05


def test_a_random_table_is_ordered() -> None:
    found = choose_for_random(300, a_tokenizer())
    assert found["rows"] == 300
    assert sorted(str(found["chosen_order"]).split(",")) == [f"column_{n}" for n in range(8)]
