"""`LLM`: many prompts answered at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch_armllm.engine.outputs import RequestOutput
from torch_armllm.engine.preprocess import Prompt
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.chat_template import render_chat
from torch_armllm.llm.base import LLMBase
from torch_armllm.system.progress import progress_bar
from torch_armllm.system.sigint import interrupts_held

Prompts = Prompt | Sequence[Prompt]
"""One prompt or several; a list of integers is one prompt."""
Conversation = list[dict[str, Any]]


class LLM(LLMBase):
    """A model that answers prompts in batches; names and defaults are vLLM's.

    Args:
        model: ``smollm2``, a checkpoint's folder, a name on the model hub, or a model, patched or not.
        tokenizer: or its folder or name; None: the model's own.
        dtype: of the weights that are loaded; ``auto`` is the checkpoint's own.
        quantization: ``int4``, another scheme, a `torch_armllm.Recipe`, or None to keep the weights as they
            are.
        skip_tokenizer_init: goes without a tokenizer: prompts and answers are tokens.
        progress: shows bars while the model is loaded and quantized.
        settings: of `EngineConfig`: ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``,
            ``kv_cache_memory``, ``kv_cache_dtype``, ``enable_prefix_caching``, ``seed``, …; no rates are
            logged unless ``disable_log_stats=False``: there is a bar.

    Attributes:
        llm_engine: what computes the answers.
        model: patched.  Of a folder of packed weights that was loaded before, there is only an engine until
            somebody asks for the model.

    Raises:
        ValueError: a setting is unknown, or does not fit the model or the memory.
        OSError: there is no such checkpoint.
    """

    _DEFAULTS = {"disable_log_stats": True}

    def _begin(self) -> None:
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, as many at once as fit.

        Ctrl-C ends all of them; so does an error in one.

        Args:
            prompts: one or several: texts, tokens, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.
            sampling_params: for all, or one for each; None: `get_default_sampling_params`.
            use_tqdm: whether a bar shows what is done; or what makes the bar.
            priority: of each prompt, lower ones first.

        Returns:
            The prompts' outputs, in their order.

        Raises:
            ValueError: a prompt cannot be served (the message says which), or the lists differ in length.
        """
        some = as_prompt_list(prompts)
        params = self._params(sampling_params, len(some))
        priorities = _one_each("priority", priority, len(some), 0)
        done: dict[str, RequestOutput] = {}
        make_bar = use_tqdm if callable(use_tqdm) else partial(progress_bar, show=use_tqdm)
        names = self._names(len(some))
        with (
            make_bar(total=len(some), desc="Processed prompts", dynamic_ncols=True) as bar,
            closing(self._run(names, some, params, priorities)) as outputs,
        ):
            read = written = 0
            for output in outputs:
                done[output.request_id] = output
                read += len(output.prompt_token_ids)
                written += sum(len(answer.token_ids) for answer in output.outputs)
                spent = bar.format_dict.get("elapsed") or 0.0
                if spent > 0:
                    speeds = f"input: {read / spent:.2f} toks/s, output: {written / spent:.2f} toks/s"
                    bar.set_postfix_str(f"est. speed {speeds}", refresh=False)
                bar.update(1)
        return [done[name] for name in names]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers conversations.  What two of them begin with alike is read once (the prefix cache).

        Args:
            messages: one conversation, a list of ``{"role": …, "content": …}``, or several.
            sampling_params: see `generate`.
            use_tqdm: see `generate`.
            chat_template: instead of the tokenizer's own.
            add_generation_prompt: ends the prompt with what begins an answer.
            continue_final_message: leaves the last message open, to be continued.
            tools: that the template describes to the model.
            chat_template_kwargs: further variables of the template.

        Raises:
            ValueError: see `generate`; or there is no template, or it refuses a conversation.
        """
        several = messages if messages and isinstance(messages[0], list) else [messages]
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **(chat_template_kwargs or {}),
        }
        options |= {n: v for n, v in (("chat_template", chat_template), ("tools", tools)) if v is not None}
        prompts = []
        for index, conversation in enumerate(several):
            with _named("conversation", index, len(several)):
                prompts.append(render_chat(self._tokenizer, list(conversation), **options))  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput, None, None]:
        """Answers one prompt and gives its output after every step; closing the iterator aborts it.

        Args:
            prompt: see `generate`.
            sampling_params: see `generate`; its ``output_kind`` says what the outputs hold.

        Raises:
            ValueError: the prompt cannot be served.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._run(self._names(1), [prompt], [params], [0])

    def _run(
        self,
        names: Sequence[str],
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priorities: Sequence[int],
    ) -> Generator[RequestOutput, None, None]:
        """Submits all prompts, and takes steps until they are done; whatever happens, none stays behind."""
        engine = self.llm_engine
        if engine.has_unfinished_requests():
            raise ValueError("this LLM is answering already; end that first, or use AsyncLLM")
        with interrupts_held() as let_through:
            try:
                for index, request in enumerate(zip(names, prompts, params, priorities, strict=True)):
                    with _named("prompt", index, len(names)):
                        engine.add_request(*request)
                    let_through()
                while engine.has_unfinished_requests():
                    outputs = engine.step()
                    let_through()
                    yield from outputs
            finally:
                engine.abort_request(names)

    def _names(self, count: int) -> list[str]:
        return [str(next(self._numbers)) for _ in range(count)]

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            one = self.get_default_sampling_params() if given is None else given
            return [replace(one, output_kind=RequestOutputKind.FINAL_ONLY)] * count
        several = _one_each("sampling_params", given, count, None)
        return [replace(one, output_kind=RequestOutputKind.FINAL_ONLY) for one in several]


def as_prompt_list(prompts: Prompts) -> list[Prompt]:
    """Prompts as a list of single ones."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    several = list(prompts)
    if several and all(isinstance(token, int) for token in several):
        return [several]  # type: ignore[list-item]
    return several  # type: ignore[return-value]


def _one_each(name: str, given: Sequence[Any] | None, count: int, default: Any) -> list[Any]:
    if given is None:
        return [default] * count
    if len(given) != count:
        raise ValueError(f"{name} has {len(given)} entries for {count} prompts; give one for each")
    return list(given)


@contextmanager
def _named(noun: str, index: int, count: int) -> Iterator[None]:
    """Says in an error which of several prompts is meant."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise ValueError(f"{noun} {index}: {error}" if count > 1 else str(error)) from error
