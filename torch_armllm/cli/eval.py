"""``torch-armllm eval``."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from torch_armllm.cli import Subcommands

_SETTINGS = (
    *("limit", "max_length", "batch_size", "num_fewshot", "apply_chat_template"),
    *("kl_tokens", "dtype", "calibration", "off_grid"),
)


def add_parser(commands: Subcommands) -> argparse.ArgumentParser:
    """Adds the command to the command line."""
    parser = commands.add_parser("eval", help="accuracy of a model in several schemes, by lm-eval's tasks")
    parser.add_argument("model", help="smollm2, smollm2-moe, a folder or a hub name")
    parser.add_argument("--tasks", required=True, help="names of lm-eval's tasks, separated by commas")
    parser.add_argument("--include-path", type=Path, action="append", help="a folder of further tasks")
    parser.add_argument("--limit", type=_positive, help="rows of each task; default: all")
    parser.add_argument(
        "--schemes",
        default="bf16,int4-g32i",
        help="the first one is what others are compared with: bf16, f32 (transformers' own forward), "
        "bf16-fused, int4-g32i, int4-g32, int4-row, int8, int4-g32i+gptq, saved … (bf16,int4-g32i)",
    )
    parser.add_argument("--method", help="how weights are rounded, where a scheme does not say: mse, rtn …")
    parser.add_argument(
        "--calibration", type=Path, help="text or .jsonl for gptq and awq; default: the model's own"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of weights that are loaded (bfloat16)")
    parser.add_argument("--device", choices=["cpu"], default="cpu", help="where all of this runs (cpu)")
    parser.add_argument("--batch-size", type=_positive, default=8, help="of generated answers (8)")
    parser.add_argument("--max-length", type=_positive, default=2048, help="tokens read at most (2048)")
    parser.add_argument("--num-fewshot", type=int, help="examples before each question")
    parser.add_argument("--apply-chat-template", action="store_true", help="questions are put as chats are")
    parser.add_argument(
        "--kl-tokens",
        type=_positive,
        default=4096,
        help="of each text, tokens whose distributions count (4096)",
    )
    parser.add_argument(
        "--off-grid",
        action="store_true",
        help="first moves weights by noise of one INT4 step: for checkpoints that 4 bits were made of before",
    )
    parser.add_argument("--json", type=Path, help="a file of everything; an interrupted run goes on from it")
    parser.add_argument("--markdown", type=Path, help="a file for the table")
    parser.add_argument("--plot", type=Path, help="a file for a drawing of scores by bits")
    parser.set_defaults(run=run)
    return parser


def run(options: argparse.Namespace) -> None:
    """Runs every scheme and prints one table."""
    from torch_armllm.system.extras import require_extra

    require_extra("lm_eval", "eval", "eval")
    if options.plot is not None:
        require_extra("matplotlib", "eval", "--plot")
    from torch_armllm.evaluation import table
    from torch_armllm.evaluation.results_file import Store
    from torch_armllm.evaluation.run import Options
    from torch_armllm.evaluation.run import run as run_schemes
    from torch_armllm.evaluation.tasks import load_tasks
    from torch_armllm.evaluation.variant import parse_schemes

    schemes = parse_schemes(options.schemes, options.method)
    settings = Options(**{name: getattr(options, name) for name in _SETTINGS})
    store = Store({"model": options.model, **settings.to_dict(), "method": options.method}, options.json)
    tasks = load_tasks([name for name in options.tasks.split(",") if name], options.include_path or ())
    scratch = None if options.json is None else options.json.with_suffix(".logits")
    run_schemes(options.model, tasks, schemes, store, settings, scratch)
    lines = store.lines()
    print(table.as_text(lines, store.schemes))
    title = f"{options.model}: {', '.join(store.schemes)}"
    if options.markdown is not None:
        options.markdown.write_text(table.as_markdown(lines, store.schemes, title), encoding="utf-8")
    if options.plot is not None:
        from torch_armllm.evaluation.plot import plot

        plot(lines, store.schemes, title, options.plot)
    failed = [name for name, result in store.schemes.items() if result.error is not None]
    if failed:
        raise ValueError(f"{', '.join(failed)} failed, for the reasons above")
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)
