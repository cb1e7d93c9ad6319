r"""Prefix-cache hits and time to first token of each turn of an agent's conversation.

    python -m bench.agent [--model FOLDER | --shape 1b|hybrid|…] [--turns 20] [--instructions 10000] \
        [--no-reasoning] [--template FILE] [--threads N] [--kv-cache-dtype int8] \
        [--peer llama.cpp --binary llama-server [--gguf FILE]]

The instructions and the tools take ``--instructions`` tokens.  A turn has two requests: after a message of
the user, and after the result of a call.  They go to ``torch-armllm serve``, which renders them by the chat
template.  What the model writes is left out: the turns are the same for every model.  Reasoning stands before
each call and each answer; the template decides where it is shown.

``--model`` is a folder with a tokenizer (default: the embedded SmolLM2); ``--shape`` is a model of
`bench.peers.shapes` with random weights, or ``hybrid``, a small Qwen3.5.  SmolLM2 and shapes have a template
of the bench's own, which shows reasoning behind the user's last message only; ``--template`` names another.

With ``--peer llama.cpp`` its server has the same requests, and the two servers take turns in being first.  It
reads ``--gguf FILE`` (default: the embedded SmolLM2, or a file of the shape with random weights).

Prints for each request: its prompt tokens; ``known``, the share that an earlier prompt begins with, which is
the most that a cache can hold; ``hit``, the share that came from the cache; milliseconds to the first token
and to the end.  The last lines are sums over all requests after the first.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from bench import agent_server
from bench.agent_conversation import TEMPLATE, Request, instructions, requests, tools
from bench.agent_server import Cost
from bench.peers.shapes import SHAPES
from torch_armllm.benchmark.random_model import save_random_model
from torch_armllm.chat_format.chat_renderer import ChatInput, ChatRenderer
from torch_armllm.checkpoint.bundled_model import smollm2_file
from torch_armllm.checkpoint.load import load_tokenizer

_CONTEXT = 32_768
_HYBRID = {
    **SHAPES["qwen3.5"].config,
    "hidden_size": 512,
    "num_experts": 16,
    "num_attention_heads": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
_CONFIGS = {"hybrid": _HYBRID, **{name: shape.config for name, shape in SHAPES.items()}}
_MODEL = "smollm2"


def main(arguments: Sequence[str] | None = None) -> None:
    """Holds the conversation and prints the table."""
    options = _parser().parse_args(arguments)
    if options.shape == "hybrid" and options.peer and options.gguf is None:
        raise SystemExit("--peer with --shape hybrid takes --gguf FILE, a file of the same shape")
    if options.peer and options.binary is None:
        raise SystemExit("--peer takes --binary FILE, llama.cpp's llama-server")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = options.model
        if options.shape is not None:
            folder = str(scratch / options.shape)
            _write(options.shape, Path(folder))
        tokenizer = load_tokenizer(folder)
        template = _template(options, scratch)
        renderer = ChatRenderer(tokenizer, None if template is None else template.read_text(), "auto")
        prompts = _prompts(options, tokenizer, renderer)
        servers = {
            "ours": stack.enter_context(agent_server.own_server(folder, _own_options(options, template)))
        }
        if options.peer:
            gguf = _peer_file(options, scratch)
            peer = agent_server.llama_server(options.binary, gguf, _peer_options(options, template))
            servers[options.peer] = stack.enter_context(peer)
        report(prompts, {name: partial(_ask, port, options.answer) for name, port in servers.items()})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default=_MODEL, help="a folder with a tokenizer")
    model.add_argument("--shape", choices=_CONFIGS, help="a shape with random weights")
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--instructions", type=int, default=10_000, help="tokens before the first turn")
    parser.add_argument("--answer", type=int, default=16, help="tokens that each request generates")
    parser.add_argument("--no-reasoning", dest="reasoning", action="store_false")
    parser.add_argument("--template", type=Path, help="a chat template (default: see above)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--peer", choices=["llama.cpp"])
    parser.add_argument("--binary", type=Path, help="the peer's server")
    parser.add_argument("--gguf", type=Path, help="the model that the peer reads")
    return parser


def _write(shape: str, folder: Path) -> None:
    config = {**_CONFIGS[shape], "max_position_embeddings": _CONTEXT}
    save_random_model(AutoConfig.for_model(**config), folder)
    load_tokenizer(_MODEL).save_pretrained(folder)


def _template(options: argparse.Namespace, scratch: Path) -> Path | None:
    """Returns the file of the template; None: the model's own."""
    if options.template is not None or (options.shape is None and options.model != _MODEL):
        return None if options.template is None else Path(options.template)
    file = scratch / "template.jinja"
    file.write_text(TEMPLATE)
    return file


def _own_options(options: argparse.Namespace, template: Path | None) -> list[str]:
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    longer = (
        [] if options.model != _MODEL else ["--hf-overrides", f'{{"max_position_embeddings": {_CONTEXT}}}']
    )
    cache = ["--kv-cache-dtype", options.kv_cache_dtype]
    own = [] if template is None else ["--chat-template", str(template)]
    return [*threads, *(longer if options.shape is None else ()), *cache, *own]


def _peer_file(options: argparse.Namespace, scratch: Path) -> Path:
    if options.gguf is not None or options.shape is None:
        return options.gguf or smollm2_file()
    from bench.gguf_writer import write_random  # needs the package gguf

    file, shape = scratch / "peer.gguf", SHAPES[options.shape]
    config = {**shape.config, "max_position_embeddings": _CONTEXT}
    write_random(file, dataclasses.replace(shape, config=config), smollm2_file())
    return file


def _peer_options(options: argparse.Namespace, template: Path | None) -> list[str]:
    threads = [] if options.threads is None else ["-t", str(options.threads)]
    own = [] if template is None else ["--chat-template-file", str(template)]
    longer = ["--override-kv", f"llama.context_length=int:{_CONTEXT}"]
    is_own_file = options.gguf is None and options.shape is None
    return [*threads, *own, "-c", str(_CONTEXT), "-np", "1", *(longer if is_own_file else ())]


def _prompts(
    options: argparse.Namespace, tokenizer: Any, renderer: ChatRenderer
) -> Iterator[tuple[Request, list[int]]]:
    """Yields every request with the tokens of its prompt."""

    def tokens(messages: list[dict[str, Any]]) -> list[int]:
        given = [
            {"reasoning" if name == "reasoning_content" else name: value for name, value in message.items()}
            for message in messages
        ]
        text, _ = renderer.render(ChatInput(given, tools(), {}))
        ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False).input_ids)

    around = len(tokens([{"role": "system", "content": ""}, {"role": "user", "content": ""}]))
    prompt = instructions(max(0, options.instructions - around), count)
    for request in requests(prompt, options.turns, options.reasoning):
        yield request, tokens(request.messages)


def _ask(port: int, answer: int, request: Request) -> Cost:
    return agent_server.chat(port, request.messages, tools(), answer)


def report(
    prompts: Iterator[tuple[Request, list[int]]], servers: dict[str, Callable[[Request], Cost]]
) -> dict[str, list[Cost]]:
    """Sends each request to every server in turn, and prints what it took.

    Returns:
        The costs of all requests, by server.
    """
    print("turn  after  server     prompt    known      hit   first, ms   total, ms")
    costs: dict[str, list[Cost]] = {name: [] for name in servers}
    earlier: list[list[int]] = []
    known = 0
    for number, (request, tokens) in enumerate(prompts):
        shared = max((_common(tokens, before) for before in earlier), default=0)
        earlier.append(tokens)
        known += shared
        for name in sorted(servers, reverse=bool(number % 2)):
            cost = servers[name](request)
            costs[name].append(cost)
            _line(f"{request.turn:4d}  {request.last:5s}", name, cost, shared)
    for name, each in costs.items():
        later = each[1:]
        if later:
            sums = (
                sum(getattr(cost, field) for cost in later) for field in ("prompt", "hit", "first", "total")
            )
            _line("all after 1", name, Cost(*sums), known)
    return costs


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _line(head: str, name: str, cost: Cost, known: int) -> None:
    print(
        f"{head}  {name:9s} {cost.prompt:7d}  {known / cost.prompt:6.1%}  {cost.hit / cost.prompt:7.1%}"
        f"   {1e3 * cost.first:9.1f}   {1e3 * cost.total:9.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
