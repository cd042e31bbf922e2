"""When a verdict counts. A verdict that breaks a rule is only "partly reproduced", and says why.

point       it names the point at which the claim was judged; "exceeded" only at the paper's own
two sides   numbers agree with the paper's within a tolerance, above and below
same job    a baseline ran as many requests with the same prompts, as stored in its line
measured    a simulation never counts fully, as long as the engine was not found to agree with it:
            hit rates within 2 points, first tokens within 15 %, device times within 10 %
limit       no rate is above the limit that is stored beside it
sustained   a rate is sustained if requests arrived for at least 30 s and four times the mean
            time of a request, and the queue did not grow
lines       as many lines are stored as a run yields
spread      a gain is larger than the spread of at least three runs
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from mainstem_bench.paper.item import Gain, Item, Line, Number, Outcome, Runs, Sustained, Verdict

LEAST_RUNS = 3
LEAST_S, LEAST_LATENCIES = 30.0, 4.0
LIMIT_SLACK = 0.01  # limits follow from measured rates, which are not more exact than this
HIT_POINTS, TTFT_SHARE, DEVICE_SHARE = 2.0, 0.15, 0.1  # of a simulation that agrees
# what makes two jobs the same; only what both lines have is compared
JOB = ("model_shape", "requests", "prompts", "kv_tokens", "prefix", "own", "degree", "answer",
       "system", "user", "mean_user", "mean_answer", "shots", "prompt", "batch",
       "history", "new", "document")  # fmt: skip
CLAIMS = (Outcome.EXCEEDED, Outcome.REPRODUCED, Outcome.PARTLY)
Rule = Callable[[Item, Sequence[Line], Verdict], str | None]
"""Returns what is wrong, as words that can follow "because"."""


def weighed(numbers: Sequence[Number]) -> Outcome:
    """The outcome of a claim that consists of these numbers."""
    sides = [_side(number) for number in numbers]
    if all(side == 0 for side in sides):
        return Outcome.REPRODUCED
    if min(sides) >= 0:
        return Outcome.EXCEEDED
    return _some(side >= 0 for side in sides)


def agreed(numbers: Sequence[Number]) -> Outcome:
    """The same for a simulation: numbers that are better than the paper's do not agree with it."""
    sides = [_side(number) for number in numbers]
    if not any(sides):
        return Outcome.REPRODUCED
    return _some(side == 0 for side in sides)


def _some(are_right: Iterable[bool]) -> Outcome:
    """Partly, if at least half of the numbers are right."""
    found = list(are_right)
    return Outcome.PARTLY if 2 * sum(found) >= len(found) else Outcome.NOT


def _side(number: Number) -> int:
    """Whether ours is below (-1) or above (1) the range in which it agrees with the paper's."""
    margin = number.tolerance * abs(number.paper)
    return (number.ours > number.paper + margin) - (number.ours < number.paper - margin)


def runs_of(line: Line, name: str = "requests_per_s", count: int | None = None) -> Runs:
    """The runs behind a line; `count` is for lines that have a spread, but no number of runs."""
    spread = line.get("spread")
    if spread is None:
        return Runs(1, line[name], line[name])
    return Runs(line.get("num_runs") or count or 2, *spread)


def gain_of(
    ours: Line, baseline: Line, name: str = "requests_per_s", count: int | None = None
) -> Gain:
    """Compare two lines; see `runs_of`."""
    return Gain(ours, baseline, runs_of(ours, name, count), runs_of(baseline, name, count))


def differing(ours: Line, baseline: Line) -> list[str]:
    """In what two jobs differ, as words."""
    return [
        f"{name.replace('_', ' ')} {_shown(ours[name])} against {_shown(baseline[name])}"
        for name in JOB
        if ours.get(name) is not None
        and baseline.get(name) is not None
        and ours[name] != baseline[name]
    ]


def _shown(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def has_point(item: Item, _: Sequence[Line], verdict: Verdict) -> str | None:
    if not item.point:
        return "it does not say at which point it holds"
    if verdict.outcome is Outcome.EXCEEDED and not item.is_papers_point:
        return "it was measured at another point than the paper's"
    return None


def is_two_sided(_: Item, __: Sequence[Line], verdict: Verdict) -> str | None:
    if not verdict.numbers or verdict.outcome is Outcome.PARTLY:
        return None
    if verdict.outcome is weighed(verdict.numbers):
        return None
    off = sum(_side(number) != 0 for number in verdict.numbers)
    return f"{off} of {len(verdict.numbers)} numbers differ from the paper's by more than allowed"


def is_same_job(_: Item, __: Sequence[Line], verdict: Verdict) -> str | None:
    for gain in verdict.gains:
        if found := differing(gain.ours, gain.baseline):
            return f"the baseline ran another job ({', '.join(found)})"
    return None


def is_measured(item: Item, _: Sequence[Line], __: Verdict) -> str | None:
    if not item.is_simulated or item.agreement is not None:
        return None
    return "it is simulated, and the engine was not yet found to agree with the simulation"


def agrees(line: Line) -> bool:
    """Whether a simulation was close enough to the engine: a line of `mainstem bench agree`."""
    off = (
        (line["hit_points"], HIT_POINTS),
        (line["ttft_ratio"] - 1, TTFT_SHARE),
        (line["device_ratio"] - 1, DEVICE_SHARE),
    )
    return all(abs(difference) <= most for difference, most in off)


def is_below_limit(_: Item, lines: Sequence[Line], verdict: Verdict) -> str | None:
    pairs = [(each.per_s, each.limit_per_s) for each in verdict.sustained]
    for line in lines:
        limit = line.get("limit_requests_per_s")
        if limit is not None:
            pairs.append((line["requests_per_s"], limit))
        least_us = line.get("floor_us")
        if least_us is not None:
            us = line["us"] if "us" in line else line["reads_us"]
            pairs.append((1e6 / us, 1e6 / least_us))
    for rate, limit in pairs:
        if rate > (1 + LIMIT_SLACK) * limit:
            return f"a rate of {rate:.4g} a second is above the limit of {limit:.4g}"
    return None


def is_sustained(_: Item, __: Sequence[Line], verdict: Verdict) -> str | None:
    for each in verdict.sustained:
        if not can_be_sustained(each):
            return f"{each.per_s:.4g} requests/s was not shown to be sustained"
    return None


def can_be_sustained(rate: Sustained) -> bool:
    """Whether a rate was measured for long enough, and the queue did not grow."""
    if rate.sent_s is None or rate.latency_s is None or rate.is_queue_growing is None:
        return False
    is_long = rate.sent_s >= max(LEAST_S, LEAST_LATENCIES * rate.latency_s)
    is_possible = rate.per_s <= (1 + LIMIT_SLACK) * rate.limit_per_s
    return is_long and is_possible and not rate.is_queue_growing


def has_all_lines(item: Item, lines: Sequence[Line], _: Verdict) -> str | None:
    if len(lines) == item.num_lines:
        return None
    return f"{len(lines)} of the {item.num_lines} lines of a run are stored"


def is_beyond_spread(_: Item, __: Sequence[Line], verdict: Verdict) -> str | None:
    for gain in verdict.gains:
        ours, theirs = gain.our_runs, gain.baseline_runs
        count = ours.count if gain.is_rival else min(ours.count, theirs.count)
        if count < LEAST_RUNS:
            return f"the gain was measured in {count} run{'s' * (count > 1)}, not in {LEAST_RUNS}"
        if ours.least <= theirs.most and theirs.least <= ours.most:
            return "the gain is not larger than the spread of the runs"
    return None


RULES: tuple[Rule, ...] = (
    has_point, is_two_sided, is_same_job, is_measured, is_below_limit, is_sustained,
    has_all_lines, is_beyond_spread,
)  # fmt: skip


def broken(item: Item, lines: Sequence[Line], verdict: Verdict) -> list[str]:
    """What keeps a verdict from counting fully."""
    if verdict.outcome not in CLAIMS:
        return []
    return [reason for rule in RULES if (reason := rule(item, lines, verdict)) is not None]


def held(item: Item, lines: Sequence[Line], verdict: Verdict) -> Verdict:
    """Return the verdict as the rules allow it."""
    reasons = broken(item, lines, verdict)
    if not reasons:
        return verdict
    reason = f"{verdict.reason}. It counts only in part, because {'; and '.join(reasons)}"
    return replace(verdict, outcome=Outcome.PARTLY, reason=reason)
