"""Write the pages of results from the lines in `results/`: `make docs`.

README.md gets ratios, docs/results.md every row and an overview of the papers, and docs/results/
a page for each paper with its plots. With --check nothing is written, and the exit status is 1 if a
page is out of date.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from PIL import Image
from rows import headlines, hybrid_table, models_table, served_table, table

from mainstem_bench.paper.command import draw, judged, outcome_at
from mainstem_bench.paper.item import Item, Line, Outcome
from mainstem_bench.paper.registry import PAPERS
from mainstem_bench.paper.results import read_lines

ROOT = Path(__file__).resolve().parent.parent
LINES = ROOT / "benchmarks" / "results" / "paper"
PLOTS = ROOT / "docs" / "img" / "paper"
FILES = {"RelayAttention": "relay", "AttentionStore": "attentionstore", "BatchLLM": "batchllm"}
ELSEWHERE = ", at another point"
ABOUT = {
    "RelayAttention": "The keys of a system prompt that all requests share are read once per step.",
    "AttentionStore": "The KV of conversations is kept in host memory and on disk between turns.",
    "BatchLLM": "The whole batch is known in advance: requests with a common prefix run together.",
}


def blocks() -> dict[str, dict[str, str]]:
    """The text of each generated block, by file and by the block's name."""
    return {
        "README.md": {"results": headlines()},
        "docs/results.md": {
            "results": table(),
            "models": models_table(),
            "served": served_table(),
            "hybrid": hybrid_table(),
            "papers": overview(),
        },
        **{
            f"docs/results/{FILES[paper]}.md": {"items": paper_page(paper, items)}
            for paper, items in PAPERS.items()
        },
    }


def overview() -> str:
    """A row for each item, paper by paper."""
    out = []
    for paper, items in PAPERS.items():
        verdicts = [judged(item, read_lines(LINES, item)) for item in items]
        counts = Counter(verdict.outcome for verdict in verdicts)
        told = ", ".join(f"{counts[each]} {each.value}" for each in Outcome if counts[each])
        out += [f"### {paper}", "", f"{ABOUT[paper]} {len(items)} items: {told}."]
        out += ["", "| item | verdict | result |", "| --- | --- | --- |"]
        for item, verdict in zip(items, verdicts, strict=True):
            link = f"[{_short(item)}](results/{FILES[paper]}.md#{item.name})"
            where = "" if item.is_papers_point or verdict.outcome is Outcome.CANNOT else ELSEWHERE
            outcome = f"{verdict.outcome.value}{where}"
            out.append(f"| {link} | {outcome} | {_capital(verdict.reason)}. |")
        out.append("")
    return "\n".join(out).rstrip()


def paper_page(paper: str, items: tuple[Item, ...]) -> str:
    """Every item of a paper: plot, claim, verdict, difference, command."""
    out = []
    for item in items:
        lines = read_lines(LINES, item)
        verdict = judged(item, lines)
        out += [f'<a id="{item.name}"></a>', "", f"## {_short(item)}", ""]
        if item.plot is not None and lines:
            out += [f"![{item.title}](../img/paper/{item.name}.png)", ""]
        out += [
            f"- **The paper:** {item.claim}.",
            f"- **Here, {outcome_at(item, verdict)}:** {verdict.reason}.",
            f"- **Different:** {item.differs}.",
        ]
        if item.run is not None:
            out.append(f"- **To repeat it:** `{item.command}`{_where(lines, item)}")
        out.append("")
    return "\n".join(out).rstrip()


def _short(item: Item) -> str:
    return item.title.partition(" ")[2]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _where(lines: list[Line], item: Item) -> str:
    """Where stored lines come from."""
    if not lines:
        return ""
    line = lines[0]
    machine = line["card"] if line["card"] != "cpu" else f"CPU, {line['machine']}"
    name = f"benchmarks/results/paper/{item.name}.jsonl"
    return f"; `{name}` is from {machine}, commit {line['commit']}, torch {line['torch']}."


def filled(text: str, parts: dict[str, str]) -> str:
    """The text with these blocks in it."""
    for name, made in parts.items():
        begin, end = f"<!-- {name}: make docs -->", f"<!-- end of {name} -->"
        head, rest = text.split(begin)
        _, tail = rest.split(end)
        text = f"{head}{begin}\n{made}\n{end}{tail}"
    return text


def plot_all() -> None:
    """Draw the plots of all items that have lines."""
    for items in PAPERS.values():
        for item in items:
            lines = read_lines(LINES, item)
            if item.plot is not None and lines:
                path = PLOTS / f"{item.name}.png"
                draw(item, lines, path)
                Image.open(path).convert("RGB").quantize(64).save(
                    path, optimize=True
                )  # a third of the size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is out of date"
    )
    parser.add_argument("--no-plots", action="store_true", help="pages only")
    args = parser.parse_args()
    stale = []
    for name, parts in blocks().items():
        path = ROOT / name
        text = path.read_text()
        if (fresh := filled(text, parts)) != text:
            stale.append(name)
            if not args.check:
                path.write_text(fresh)
    if not args.check and not args.no_plots:
        plot_all()
    if args.check and stale:
        print(f"out of date: {', '.join(stale)}; run `make docs`", file=sys.stderr)
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
