"""Prints reports of simulations: a JSON line for each, or a table."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import TypeVar

from mainstem.core.tables import table
from mainstem_simulate.replicas import FleetReport
from mainstem_simulate.simulator import SimulationReport
from mainstem_simulate.trace_records import Trace

R = TypeVar("R", SimulationReport, FleetReport)


def rounded(values: Mapping[str, object]) -> dict[str, object]:
    return {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in values.items()
    }


def print_reports(
    reports: Iterable[R],
    trace: Trace,
    columns: Mapping[str, tuple[str, str]],
    is_json: bool,
) -> list[R]:
    """Print JSON lines as they come, or a table with a row for each report; columns are fields by
    their headings, each with its form. Returns the reports."""
    shown = []
    for report in reports:
        shown.append(report)
        if is_json:
            about = {"format": trace.format.value, "can_share": trace.can_share}
            print(json.dumps(about | rounded(asdict(report))), flush=True)
    if not is_json:
        forms = columns.values()
        rows = [[format(getattr(each, field), form) for field, form in forms] for each in shown]
        print(table(list(columns), rows))
    return shown
