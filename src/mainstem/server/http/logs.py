"""Logs as JSON lines on standard error."""

import json
import logging
import sys
from datetime import UTC, datetime

LEVELS = ("debug", "info", "warning", "error")
FACTS = "facts"  # the attribute of a log record that holds its fields


class JsonLines(logging.Formatter):
    """One object per line: time, level, event, then the record's facts."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, FACTS, {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def set_up_logs(level: str) -> None:
    """Configure logging for the whole process; called when a process starts. uvicorn's own lines
    get the same format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("mainstem", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    least = max(logging.WARNING, logging.getLogger("uvicorn").level)
    logging.getLogger("uvicorn.error").setLevel(least)
    logging.getLogger("uvicorn.access").disabled = True
