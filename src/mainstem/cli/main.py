"""The `mainstem` command: finds the subcommand, which parses its own flags."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper

from mainstem.core.environment import SWITCH_S
from mainstem.core.errors import AnswerFailed, EngineLost, MainstemError
from mainstem.core.spelling import did_you_mean
from mainstem.core.version import __version__


@dataclass(frozen=True, slots=True)
class Command:
    """The module with a command's `main(argv) -> exit status`. It is imported when the command
    runs."""

    module: str
    summary: str


WORK_FAILED = (AnswerFailed, EngineLost)  # the call was right
COMMANDS = {
    "generate": Command("mainstem.cli.generate", "answer one prompt, streaming"),
    "chat": Command("mainstem.cli.chat", "talk with a model in the terminal"),
    "demo": Command("mainstem.cli.demo", "questions about shared documents, sharing on and off"),
    "serve": Command("mainstem.cli.serve", "an OpenAI-compatible server with a web page"),
    "batch": Command("mainstem.cli.batch", "answer a file of requests, planned and resumable"),
    "map": Command("mainstem.cli.map", "a prompt for every row of a table"),
    "plan": Command("mainstem.cli.plan", "what a batch of prompts shares, and the best order"),
    "bench": Command("mainstem_bench.cli", "measure the parts and the whole"),
    "simulate": Command(
        "mainstem_simulate.command", "what a tiered KV store would save for a trace of requests"
    ),
    "capacity": Command(
        "mainstem_simulate.capacity_command", "the storage that a hit rate needs, from a trace"
    ),
    "calibrate": Command("mainstem.cli.calibrate", "measure this device for the cost model"),
    "cache": Command("mainstem.cli.cache", "show, verify and delete saved pages on disk"),
    "models": Command("mainstem.cli.models", "the embedded model and the cached models"),
    "doctor": Command("mainstem.cli.doctor", "what this machine has and what will be used"),
}

# package that may be missing -> the extra that installs it
EXTRAS = {"starlette": "server", "uvicorn": "server", "matplotlib": "plot", "gguf": "smollm2"}


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: mainstem COMMAND [flags]",
            "",
            "LLM inference for requests that share context.",
            "",
            *lines,
            "",
            "`mainstem COMMAND --help` lists its flags; `mainstem --version` shows the version.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """Entry point. Exit status: 0 done, 1 the work failed, 2 the call was wrong, 130 Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    sys.setswitchinterval(SWITCH_S)
    if isinstance(sys.stdout, TextIOWrapper):  # a terminal may lack characters that a model writes
        sys.stdout.reconfigure(errors="replace")
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        print(f"mainstem {__version__}")
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        hint = did_you_mean(argv[0], COMMANDS)
        print(f"mainstem: no command {argv[0]!r}.{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    return run(argv[0], command, argv[1:])


def run(name: str, command: Command, argv: list[str]) -> int:
    """Return the command's exit status. Expected errors and system errors are printed as one
    line."""
    try:
        call: Callable[[list[str]], int] = import_module(command.module).main
        return call(argv)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(error.name or "")
        if extra is None:
            raise
        needs = f"needs the {extra} extra: pip install 'mainstem[{extra}]'"
        print(f"mainstem {name} {needs}", file=sys.stderr)
        return 2
    except MainstemError as error:
        print(f"mainstem {name}: {error}", file=sys.stderr)
        return 1 if isinstance(error, WORK_FAILED) else 2
    except BrokenPipeError:
        # the reader of our output has closed it; Python would report that again at exit
        sys.stderr.close()
        return 1
    except OSError as error:  # a full disk, a lost mount: a traceback would not help
        print(f"mainstem {name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
