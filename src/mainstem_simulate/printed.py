"""Prints reports of simulations: a JSON line for each, or a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from mainstem.core.tables import table
from mainstem_simulate.replicas import FleetReport
from mainstem_simulate.simulator import SimulationReport
from mainstem_simulate.trace_records import Trace

Report = SimulationReport | FleetReport


def json_line(report: Report, trace: Trace) -> str:
    values = {
        name: round(value, 6) if isinstance(value, float) else value
        for name, value in asdict(report).items()
    }
    return json.dumps({"format": trace.format.value, "can_share": trace.can_share, **values})


def as_table(reports: Sequence[Report], columns: Mapping[str, tuple[str, str]]) -> str:
    """A row for each report; columns are fields by their headings, each with its form."""
    rows = [
        [format(getattr(report, field), form) for field, form in columns.values()]
        for report in reports
    ]
    return table(list(columns), rows)
