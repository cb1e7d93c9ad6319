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

import dataclasses
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from transformers import AutoConfig

from bench import agent_conversation, agent_server
from bench.agent_conversation import TEMPLATE, Request, tools
from bench.agent_server import Cost
from bench.case import run
from bench.peers.shapes import SHAPES
from bench.peers.work import shared
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


@dataclass(frozen=True)
class Setup:
    """A conversation's model and servers, as the options of `agent` name them."""

    model: str
    shape: str | None
    template: Path | None
    threads: int | None
    kv_cache_dtype: str
    gguf: Path | None


def agent(
    *,
    model: Annotated[str, "a folder with a tokenizer"] = _MODEL,
    shape: Annotated[str | None, f"a shape with random weights: {', '.join(_CONFIGS)}"] = None,
    turns: int = 20,
    instructions: Annotated[int, "tokens before the first turn"] = 10_000,
    answer: Annotated[int, "tokens that each request generates"] = 16,
    no_reasoning: bool = False,
    template: Annotated[Path | None, "a chat template (default: see above)"] = None,
    threads: int | None = None,
    kv_cache_dtype: str = "auto",
    peer: Literal["llama.cpp"] | None = None,
    binary: Annotated[Path | None, "the peer's server"] = None,
    gguf: Annotated[Path | None, "the model that the peer reads"] = None,
) -> None:
    setup = Setup(model, shape, template, threads, kv_cache_dtype, gguf)
    if shape == "hybrid" and peer and gguf is None:
        raise SystemExit("--peer with --shape hybrid takes --gguf FILE, a file of the same shape")
    if peer and binary is None:
        raise SystemExit("--peer takes --binary FILE, llama.cpp's llama-server")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = model
        if shape is not None:
            folder = str(scratch / shape)
            _write(shape, Path(folder))
        tokenizer, shown = load_tokenizer(folder), _template(setup, scratch)
        renderer = ChatRenderer(tokenizer, None if shown is None else shown.read_text(), "auto")
        prompts = _prompts(instructions, turns, not no_reasoning, tokenizer, renderer)
        servers = {"ours": stack.enter_context(agent_server.own_server(folder, _own_options(setup, shown)))}
        if peer and binary:
            theirs = agent_server.llama_server(
                binary, _peer_file(setup, scratch), _peer_options(setup, shown)
            )
            servers[peer] = stack.enter_context(theirs)
        report(prompts, {name: partial(_ask, port, answer) for name, port in servers.items()})


def _write(shape: str, folder: Path) -> None:
    config = {**_CONFIGS[shape], "max_position_embeddings": _CONTEXT}
    save_random_model(AutoConfig.for_model(**config), folder)
    load_tokenizer(_MODEL).save_pretrained(folder)


def _template(setup: Setup, scratch: Path) -> Path | None:
    """Returns the file of the template; None: the model's own."""
    if setup.template is not None or (setup.shape is None and setup.model != _MODEL):
        return None if setup.template is None else Path(setup.template)
    file = scratch / "template.jinja"
    file.write_text(TEMPLATE)
    return file


def _own_options(setup: Setup, template: Path | None) -> list[str]:
    threads = [] if setup.threads is None else ["--threads", str(setup.threads)]
    longer = [] if setup.model != _MODEL else ["--hf-overrides", f'{{"max_position_embeddings": {_CONTEXT}}}']
    cache = ["--kv-cache-dtype", setup.kv_cache_dtype]
    own = [] if template is None else ["--chat-template", str(template)]
    return [*threads, *(longer if setup.shape is None else ()), *cache, *own]


def _peer_file(setup: Setup, scratch: Path) -> Path:
    if setup.gguf is not None or setup.shape is None:
        return setup.gguf or smollm2_file()
    from bench.gguf_writer import write_random  # needs the package gguf

    file, shape = scratch / "peer.gguf", SHAPES[setup.shape]
    config = {**shape.config, "max_position_embeddings": _CONTEXT}
    write_random(file, dataclasses.replace(shape, config=config), smollm2_file())
    return file


def _peer_options(setup: Setup, template: Path | None) -> list[str]:
    threads = [] if setup.threads is None else ["-t", str(setup.threads)]
    own = [] if template is None else ["--chat-template-file", str(template)]
    longer = ["--override-kv", f"llama.context_length=int:{_CONTEXT}"]
    is_own_file = setup.gguf is None and setup.shape is None
    return [*threads, *own, "-c", str(_CONTEXT), "-np", "1", *(longer if is_own_file else ())]


def _prompts(
    length: int, turns: int, reasoning: bool, tokenizer: Any, renderer: ChatRenderer
) -> Iterator[tuple[Request, list[int]]]:
    """Yields every request with the tokens of its prompt, of which ``length`` stand before the first turn."""

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
    prompt = agent_conversation.instructions(max(0, length - around), count)
    for request in agent_conversation.requests(prompt, turns, reasoning):
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
        begin = max((shared(tokens, before) for before in earlier), default=0)
        earlier.append(tokens)
        known += begin
        for name in sorted(servers, reverse=bool(number % 2)):
            cost = servers[name](request)
            costs[name].append(cost)
            _line(f"{request.turn:4d}  {request.last:5s}", name, cost, begin)
    for name, each in costs.items():
        later = each[1:]
        if later:
            sums = (
                sum(getattr(cost, field) for cost in later) for field in ("prompt", "hit", "first", "total")
            )
            _line("all after 1", name, Cost(*sums), known)
    return costs


def _line(head: str, name: str, cost: Cost, known: int) -> None:
    print(
        f"{head}  {name:9s} {cost.prompt:7d}  {known / cost.prompt:6.1%}  {cost.hit / cost.prompt:7.1%}"
        f"   {1e3 * cost.first:9.1f}   {1e3 * cost.total:9.1f}",
        flush=True,
    )


if __name__ == "__main__":
    run(agent)
