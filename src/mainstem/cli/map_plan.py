"""What `mainstem map --dry-run` prints: rows, tokens, what is saved, seconds. Needs no weights."""

import argparse
from collections.abc import Callable

from mainstem.batch.windows import RowReader
from mainstem.checkpoints.hub import config_folder
from mainstem.cli.app_flag import apps_by_name
from mainstem.cli.flags import engine_config, model_defaults
from mainstem.cli.plan import ReadPrompts, read_prompts
from mainstem.core.config import Device, EngineConfig
from mainstem.core.errors import MainstemError
from mainstem.core.tables import table
from mainstem.models.families import read_spec
from mainstem.plan.cost import GENERIC_CPU, ModelSize, card_for, token_costs
from mainstem.plan.planner import plan_prompts
from mainstem.plan.saving import processed_tokens
from mainstem.tables.fields import FieldOrder
from mainstem.tables.job import TableJob
from mainstem.text.parsers.formats import find_formats
from mainstem.text.tokenizer import Tokenizer
from mainstem.wire.chat.parsing import CallParser

SAMPLED_ERRORS = 3
BATCH = 256  # sequences that decode at once, assumed for the estimate


def print_plan(
    args: argparse.Namespace, job: TableJob, load_words: Callable[[EngineConfig], Tokenizer]
) -> None:
    """Plan the whole table, and print what the job would cost."""
    config = engine_config(args)
    config.check()
    tokenizer = load_words(config)
    formats = find_formats(tokenizer, args.tool_call_parser, args.reasoning_parser)
    defaults = model_defaults(args, tokenizer) | {"max_tokens": args.max_tokens}
    rows = RowReader(
        CallParser(defaults, find_formats=lambda: formats),
        lambda: tokenizer,
        apps_by_name(args.app),
    )
    job.prepare(tokenizer)
    read = read_prompts(job.rows(), rows)
    computed = _computed(read)
    total = len(read.prompts.token_ids)
    shown = [
        ["rows", f"{job.num_rows:,}"],
        ["rows without a prompt", f"{len(read.failures):,}"],
        ["prompt tokens", f"{total:,}"],
        ["computed", f"{computed:,} ({1 - computed / max(1, total):.1%} saved)"],
    ]
    if job.order.given and job.order.orders != [job.order.given]:
        given = read_prompts(job.rows(FieldOrder([job.order.given])), rows)
        in_given = _computed(given)
        ratio = in_given / max(1, computed)
        shown.append(["computed in the given order", f"{in_given:,} ({ratio:.2f}x)"])
    outputs = int(read.max_tokens.sum()) if "choices" not in job.asking.fields else 0
    shown.append(["tokens of answers, at most", f"{outputs:,}"])
    shown.append(["seconds, estimated", _seconds(config, computed, outputs)])
    if job.order.orders[0]:
        print(job.order.to_text())
    print(table(["plan", ""], shown))
    for failure in read.failures[:SAMPLED_ERRORS]:
        print(f"row {failure.line}: {failure.error.message}")


def _computed(read: ReadPrompts) -> int:
    """Prompt tokens that are computed, if all rows are planned together."""
    total = len(read.prompts.token_ids)
    return processed_tokens(plan_prompts(read.prompts, max_tokens=read.max_tokens), total)


def _seconds(config: EngineConfig, prompt_tokens: int, output_tokens: int) -> str:
    """An estimate by the cost model, for answers of the greatest length; says for which device."""
    from mainstem.runner.machine import describe_devices  # noqa: PLC0415  # brings torch

    devices = describe_devices()  # GPUs first
    device = devices[-1 if config.model.device is Device.CPU else 0]
    name = GENERIC_CPU.name if device.kind == "cpu" else device.name
    try:
        with config_folder(config.model.model) as folder:
            spec = read_spec(folder)
    except MainstemError as error:
        return f"unknown ({error})"
    size = ModelSize(
        num_params=spec.num_layer_params,
        num_head_params=spec.num_head_params,
        kv_bytes_per_token=spec.kv_elements_per_token * 2,
        bytes_per_param=spec.bytes_per_param(4 if device.kind == "cpu" else 2),
        num_idle_params=spec.num_idle_params,
    )
    costs = token_costs(card_for(name), size, BATCH)
    prompts_s, outputs_s = costs.prompt_s * prompt_tokens, costs.output_s * output_tokens
    return f"{prompts_s + outputs_s:,.1f} on {name} ({prompts_s:,.1f} for prompts)"
