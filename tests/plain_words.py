"""`make lint`: phrases that make a reader stop, in comments, strings and pages of docs.

    so many         name the number, or write "up to N"
    whoever         name what it is: the caller, the sequence, the thread that waits
    who, whom       for people; things are "that" or "which"
    of equals       write "on a tie"
    a rank of several   write "with several ranks"
    what came of it     name it: the result, the answers

Code is not looked at, only what people read.
"""

import io
import re
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "docs", "benchmarks", "deploy")
HAVE_THEM_AS_DATA = (
    "src/mainstem_bench/conversations.py",
    "tests/plain_words.py",
    "tests/test_plain_words.py",
)
# after these, and in a question, "who" is right
PEOPLE = (
    *("anybody", "anyone", "authors", "caller", "callers", "client", "clients", "everybody"),
    *("nobody", "operator", "people", "person", "reader", "readers", "reviewer", "somebody"),
    *("someone", "tenant", "tenants", "those", "user", "users"),
)
PHRASES = {
    re.compile(r"\bso many\b", re.I): 'name the number, or write "up to N"',
    re.compile(r"\bwho(m)?ever\b", re.I): "name what it is",
    re.compile(rf"(?<!\w)(?<!{' )(?<!'.join(PEOPLE)} )whom?\b(?![^.;]{{0,60}}\?)", re.I): (
        'things are "that" or "which"; name the person otherwise'
    ),
    re.compile(r"\bof equals\b", re.I): 'write "on a tie"',
    re.compile(r"\brank of several\b", re.I): 'write "with several ranks"',
    re.compile(r"\bwhat c[ao]mes? of (it|them|this)\b", re.I): "name it: the result, the answers",
}


@dataclass(frozen=True, slots=True)
class Finding:
    path: Path
    line: int
    phrase: str
    advice: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.phrase!r}: {self.advice}"


def main() -> int:
    findings = [finding for path in checked_files() for finding in check(path)]
    for finding in findings:
        print(finding, file=sys.stderr)
    return 1 if findings else 0


def checked_files() -> Iterator[Path]:
    """Every source file and page, except those that have such words as data."""
    pages = ROOT.glob("*.md")
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in sorted((*pages, *found)):
        name = path.relative_to(ROOT).as_posix()
        if path.suffix in (".py", ".md") and name not in HAVE_THEM_AS_DATA:
            yield path


def check(path: Path) -> Iterator[Finding]:
    text = path.read_text(encoding="utf-8")
    prose = python_prose(text) if path.suffix == ".py" else text
    yield from find(path.relative_to(ROOT), prose)


def find(path: Path, prose: str) -> Iterator[Finding]:
    """Phrases may run over the end of a line; the line named is that of their first word."""
    words = [word for word in re.finditer(r"\S+", prose) if word[0] != "#"]
    begins = list(accumulate((len(word[0]) + 1 for word in words), initial=0))
    joined = " ".join(word[0] for word in words)
    for pattern, advice in PHRASES.items():
        for match in pattern.finditer(joined):
            first = words[bisect_right(begins, match.start()) - 1]
            yield Finding(path, prose.count("\n", 0, first.start()) + 1, match[0], advice)


def python_prose(source: str) -> str:
    """The source with everything but comments and strings blanked out."""
    lines = [list(" " * len(line)) for line in source.splitlines()]
    kinds = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            row, column = token.start
            for offset, part in enumerate(token.string.split("\n")):
                begin = column if offset == 0 else 0
                lines[row - 1 + offset][begin : begin + len(part)] = part
    return "\n".join("".join(line) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
