"""The summary of a job, as text and as JSON."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from mainstem.batch.done import State
from mainstem.batch.ordering import PlannedWindow
from mainstem.core.events import StoreOpened
from mainstem.core.metrics import Counters
from mainstem.core.tables import table
from mainstem.core.words import counted

OTHER_MODELS = 100  # at most this many names are counted separately


@dataclass(slots=True)
class Summary:
    """Counts of one run. `is_complete`: every row of the input has its line in the output."""

    input: str
    output: str
    model: str
    is_complete: bool = False
    rows: int = 0  # read from the input
    skipped: int = 0  # rows that were done by an earlier run
    answered: int = 0  # in this run
    failed: int = 0  # error rows of this run
    failed_before: int = 0  # error rows of earlier runs
    changed: int = 0  # skipped rows whose contents have changed since the earlier run
    of_other_model: int = 0  # skipped rows that another model answered
    redone: int = 0  # lines of earlier runs that were removed to be answered again
    deduplicated: int = 0  # answered rows that got a copy of an equal row's answer
    errors: Counter[str] = field(default_factory=Counter)  # by code
    other_models: Counter[str] = field(default_factory=Counter)  # names of other models in rows
    windows: int = 0
    plan_s: float = 0.0
    seconds: float = 0.0
    counters: Counters = field(default_factory=Counters)
    deduplicated_tokens: int = 0  # prompt tokens of the copies
    store_fault: str | None = None  # what was wrong with the disk store when it was opened

    def note_store(self, event: StoreOpened) -> None:
        """Record what was found when the disk store was opened."""
        self.store_fault = event.words

    def note_window(self, planned: PlannedWindow) -> None:
        """Count rows that were read and planned."""
        window = planned.window
        self.windows += 1
        self.plan_s += planned.plan_s
        self.rows = window.num_rows_read
        self.skipped += window.num_skipped
        self.changed += window.states[State.CHANGED]
        self.of_other_model += window.states[State.OTHER_MODEL]
        self.note_models(row.call.model for row in window.rows)

    def note_models(self, names: Iterable[str | None]) -> None:
        """Count the models that rows name, except the one that answers."""
        counted = self.other_models
        for name in names:
            if name not in (None, self.model):
                known = name if name in counted or len(counted) < OTHER_MODELS else "..."
                counted[str(known)] += 1

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that were not computed: found in cached pages, or belonging to copied
        answers."""
        return self.counters.cached_tokens + self.deduplicated_tokens

    @property
    def saving_ratio(self) -> float:
        """Share of prompt tokens that did not have to be computed (BatchLLM Eq. 2)."""
        total = self.counters.prompt_tokens + self.deduplicated_tokens
        return self.saved_tokens / total if total else 0.0

    def to_json(self) -> dict[str, object]:
        """One object; the names are part of the interface."""
        counters, seconds = self.counters, max(self.seconds, 1e-9)
        return {
            "input": self.input,
            "output": self.output,
            "model": self.model,
            "complete": self.is_complete,
            "rows": self.rows,
            "skipped": self.skipped,
            "answered": self.answered,
            "failed": self.failed,
            "failed_before": self.failed_before,
            "changed": self.changed,
            "of_other_model": self.of_other_model,
            "redone": self.redone,
            "deduplicated": self.deduplicated,
            "errors": dict(self.errors),
            "prompt_tokens": counters.prompt_tokens + self.deduplicated_tokens,
            "computed_prompt_tokens": counters.computed_tokens,
            "cached_prompt_tokens": counters.cached_tokens,
            "deduplicated_prompt_tokens": self.deduplicated_tokens,
            "saving_ratio": round(self.saving_ratio, 6),
            "generated_tokens": counters.generated_tokens,
            "preemptions": counters.preemptions,
            "lost_pages": dict(counters.lost_pages),
            "store_fault": self.store_fault,
            "steps": counters.steps,
            "states_read": counters.states_read,
            "states_saved": counters.states_saved,
            "rows_folded": counters.rows_folded,
            "windows": self.windows,
            "plan_seconds": round(self.plan_s, 6),
            "seconds": round(self.seconds, 6),
            "requests_per_s": round(self.answered / seconds, 3),
            "generated_tokens_per_s": round(counters.generated_tokens / seconds, 3),
        }

    def to_text(self) -> str:
        """A few lines for the end of a job."""
        counters, seconds = self.counters, max(self.seconds, 1e-9)
        rows = [
            ["answered", f"{self.answered:,}"],
            ["failed", f"{self.failed:,}"],
            ["done before (failed)", f"{self.skipped:,} ({self.failed_before:,})"],
            ["answers copied from equal rows", f"{self.deduplicated:,}"],
            ["prompt tokens", f"{counters.prompt_tokens + self.deduplicated_tokens:,}"],
            ["prompt tokens computed", f"{counters.computed_tokens:,}"],
            ["prompt tokens saved", f"{self.saved_tokens:,} ({self.saving_ratio:.1%})"],
            ["tokens generated", f"{counters.generated_tokens:,}"],
            ["seconds (planning)", f"{self.seconds:.1f} ({self.plan_s:.2f})"],
            ["requests/s", f"{self.answered / seconds:.2f}"],
            ["generated tokens/s", f"{counters.generated_tokens / seconds:.1f}"],
        ]
        if counters.states_read:
            total = counters.states_read + counters.states_saved
            share = f"{counters.states_saved:,} ({counters.states_saved / total:.1%})"
            rows.insert(7, ["reads of states saved", share])
        lines = [table([counted(self.rows, "row"), ""], rows)]
        if self.errors:
            found = ", ".join(f"{code} {count:,}" for code, count in self.errors.most_common())
            lines.append(f"errors: {found}")
        if self.store_fault is not None:
            lines.append(self.store_fault)
        if counters.lost_pages:
            lost = ", ".join(f"{reason} {num:,}" for reason, num in counters.lost_pages.items())
            lines.append(f"stored pages that were lost and computed again: {lost}")
        if self.other_models:
            names = ", ".join(repr(name) for name, _ in self.other_models.most_common(3))
            total = sum(self.other_models.values())
            verb = "names" if total == 1 else "name"
            lines.append(
                f"{counted(total, 'row')} {verb} another model ({names}); {self.model} answered"
            )
        if self.changed or self.of_other_model:
            lines.append(
                f"stale: {self.changed:,} rows changed since they were answered, "
                f"{self.of_other_model:,} lines are of another model; "
                "--resume=changed answers them again"
            )
        if not self.is_complete:
            lines.append("the job is not complete; run it again with --resume")
        return "\n".join(lines)
