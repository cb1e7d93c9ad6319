"""`LLM`: offline inference of many prompts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from typing_extensions import Unpack

from torch_armllm.engine.disk.session_files import SessionFiles
from torch_armllm.engine.media.media import has_media
from torch_armllm.engine.outputs import FailedOutput, RequestOutput
from torch_armllm.engine.sampling_params import RequestOutputKind, SamplingParams
from torch_armllm.engine.text.content_format import ContentFormat
from torch_armllm.engine.text.preprocess import NewRequest, Prompt
from torch_armllm.engine.text.tokenization import Tokenization
from torch_armllm.llm.base import check_sleep_level
from torch_armllm.llm.beam_search import BeamSearch, BeamSearchOutput, BeamSearchParams
from torch_armllm.llm.calls.call_arguments import ForeignArguments, check_arguments
from torch_armllm.llm.calls.chat_call import ChatCall, ChatOptions
from torch_armllm.llm.calls.prompt_list import (
    Prompts,
    adapters_of,
    as_prompt_list,
    named_errors,
    one_each,
    priorities_of,
)
from torch_armllm.llm.pooling_calls import PoolingCalls
from torch_armllm.lora.request import LoRARequest
from torch_armllm.system.forks import warn_if_forked
from torch_armllm.system.progress import progress_bar
from torch_armllm.system.sigint import interrupts_held

Conversation = list[dict[str, Any]]


class LLM(PoolingCalls):
    """A model that completes prompts in batches, or pools them; names and defaults are vLLM's.

    Args:
        model: ``smollm2``, a checkpoint's folder, a name on the model hub, or a model, patched or not.
        tokenizer: a tokenizer, its folder or name; None: the model's own.
        dtype: of the loaded weights; ``auto``: the checkpoint's own.
        quantization: ``int4``, another scheme, a `torch_armllm.Recipe`, or None to keep the weights as they
            are; ``auto`` is ``int4``, except for ``smollm2``, a 4-bit file, whose integers are kept.
        skip_tokenizer_init: runs without a tokenizer: prompts and outputs are token ids.
        progress: shows progress bars while the model is loaded and quantized.
        runner: ``generate`` or ``pooling``; ``auto``: what the model's files say: a class that does not
            generate, or a pooling module of sentence-transformers, pools.
        pooler_config: for pooling models, instead of what the files say: ``pooling_type`` (``LAST``, ``CLS``,
            ``MEAN``, ``MAX``) and ``normalize``.
        hf_overrides: fields to replace in config.json, such as ``{"rope_parameters": {…}}``.
        verify: compares every tensor with the checksum that was saved with it, for a folder that this package
            wrote; this reads all of it.
        revision: branch, tag or commit of a model on the hub; None: the default branch.
        trust_remote_code: False; True is refused, as code of a checkpoint is never run.
        kv_cache_memory_bytes: vLLM's name of ``kv_cache_memory``.
        settings: of `EngineConfig`: ``max_model_len``, ``max_num_seqs``, ``max_num_batched_tokens``,
            ``kv_cache_memory``, ``kv_cache_dtype``, ``enable_prefix_caching``, ``seed``, …; no rates are
            logged unless ``disable_log_stats=False``: there is a bar.

    Attributes:
        llm_engine: the engine.
        model: the patched model.  If the engine was restored from the plan cache, the model is loaded at the
            first access.

    Raises:
        ValueError: a setting is unknown, or does not fit the model or the memory.
        OSError: the checkpoint is not found.
    """

    _DEFAULTS = {"disable_log_stats": True}

    def _start(self) -> None:
        self._numbers = itertools.count()
        self._asleep = False

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | int | None = None,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Unpack[ForeignArguments],
    ) -> list[RequestOutput]:
        """Generates completions of prompts, batched as far as they fit.

        Ctrl-C, or an error in one prompt, aborts all of them.

        Args:
            prompts: one or several: text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.
            sampling_params: for all prompts, or one per prompt; None: `get_default_sampling_params`.
            use_tqdm: True shows a progress bar; a callable makes the bar.
            priority: for all prompts, or one per prompt; lower values run first.
            lora_request: the adapter for all prompts, or one per prompt, None for the model alone; needs
                ``enable_lora=True``.
            tokenization_kwargs: ``truncate_prompt_tokens``, or ``truncation`` and ``max_length``,
                ``truncation_side`` and ``add_special_tokens``; see `Tokenization`.
            others: vLLM's further arguments, which are refused with the reason.

        Returns:
            One output per prompt, in order.

        Raises:
            ValueError: a prompt cannot be served (the message names it), or the lists differ in length.
        """
        check_arguments("generate", others)
        self._check_generates("generate")
        prompt_list = as_prompt_list(prompts)
        params = self._params(sampling_params, len(prompt_list))
        prompt_list = self._tokenized(prompt_list, Tokenization.of(tokenization_kwargs), params)
        priorities = priorities_of(priority, len(prompt_list))
        adapters = adapters_of(lora_request, len(prompt_list))
        done: dict[str, RequestOutput] = {}
        make_bar = use_tqdm if callable(use_tqdm) else partial(progress_bar, show=use_tqdm)
        each = zip(self._names(len(prompt_list)), prompt_list, params, priorities, adapters, strict=True)
        requests = [NewRequest(*one) for one in each]
        with (
            make_bar(total=len(prompt_list), desc="Processed prompts", dynamic_ncols=True) as bar,
            closing(self._run(requests)) as outputs,
        ):
            input_tokens = output_tokens = 0
            for output in outputs:
                done[output.request_id] = output
                input_tokens += len(output.prompt_token_ids)
                output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
                spent = bar.format_dict.get("elapsed") or 0.0
                if spent > 0:
                    rates = [f"{count / spent:.2f} toks/s" for count in (input_tokens, output_tokens)]
                    bar.set_postfix_str(f"est. speed input: {rates[0]}, output: {rates[1]}", refresh=False)
                bar.update(1)
        return [done[request.request_id] for request in requests]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        tool_call_parser: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | int | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        **others: Unpack[ForeignArguments],
    ) -> list[RequestOutput]:
        """Generates replies to conversations; common beginnings share their prefill (prefix cache).

        Conversations are brought into a form that the template shows whole, as the server does; what the
        model sees otherwise than it was given is logged as a warning.  `CompletionOutput.message` of each
        output has its reasoning, content and tool calls, in the format that the template writes.  With tools,
        and where special tokens mark reasoning, `text` holds special tokens.

        Args:
            messages: one conversation, a list of ``{"role": …, "content": …}``, or several; contents may hold
                images, ``{"type": "image_url", …}`` or ``{"type": "image_pil", "image_pil": image}``, and
                sound, ``{"type": "input_audio", …}``, ``{"type": "audio_url", …}`` or ``{"type": "audio",
                "audio": samples or (samples, rate)}``.
            sampling_params: see `generate`.
            use_tqdm: see `generate`.
            chat_template: instead of the tokenizer's own.
            chat_template_content_format: form of the contents that the template reads: ``string``, a text;
                ``openai``, a list of parts; ``auto``: found by its loops.
            add_generation_prompt: appends the template's start of a reply.
            continue_final_message: leaves the last message open, so that the model continues it.
            tools: tools that the template describes to the model: ``{"type": "function", "function": {"name":
                …, "description": …, "parameters": …}}``, or Python functions with docstrings.
            tool_call_parser: format of the calls, by vLLM's names; None: derived from the template.
            chat_template_kwargs: further variables of the template.
            lora_request: see `generate`.
            priority: for all conversations, or one per conversation; lower values run first.
            tokenization_kwargs: see `generate`; the template writes the special tokens.
            others: see `generate`.

        Raises:
            ValueError: see `generate`; or there is no template, or it rejects a conversation; or there are
                tools, and the model's format of calls is not known.
        """
        check_arguments("chat", others)
        if (tokenization_kwargs or {}).get("add_special_tokens"):
            raise ValueError("the template writes the special tokens of a conversation: leave them out")
        self._check_generates("chat")
        several = messages if messages and isinstance(messages[0], list) else [messages]
        options = ChatOptions(
            chat_template,
            chat_template_content_format,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
            tool_call_parser,
            self.reasoning_parser,
        )
        call = ChatCall(self._tokenizer, options)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(several):
            with named_errors("conversation", index, len(several)):
                prompts.append(self.chat_prompt(call, conversation))  # type: ignore[arg-type]
        params = [call.params(each) for each in self._params(sampling_params, len(prompts))]
        outputs = self.generate(
            prompts,
            params,
            use_tqdm,
            priority,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        for prompt, conversation, one, output in zip(prompts, several, params, outputs, strict=True):
            for completion in output.outputs if one.detokenize else ():
                completion.message = call.message(completion, prompt["prompt"], conversation)  # type: ignore
        return outputs

    def chat_prompt(self, call: ChatCall, conversation: Conversation) -> Prompt:
        """Returns the prompt of a conversation.

        Args:
            call: renders it.
            conversation: may hold images, sound and videos.

        Raises:
            ValueError: the template rejects it, or the model does not take what it holds.
        """
        if not has_media(conversation):
            return call.prompt(conversation)
        reader = self.picture_reader()  # a model that takes none says so before anything is decoded
        return call.media_prompt(conversation, reader, self.media_access)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Completes one prompt and yields its output after every step; closing the iterator aborts it.

        Args:
            prompt: see `generate`.
            sampling_params: see `generate`; its ``output_kind`` defines the contents of the outputs.
            lora_request: the adapter; None: the model alone.

        Raises:
            ValueError: the prompt cannot be served.
        """
        self._check_generates("stream")
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        (name,) = self._names(1)
        return self._run([NewRequest(name, prompt, params, lora_request=lora_request)])

    def beam_search(
        self,
        prompts: Prompts,
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
        **others: Unpack[ForeignArguments],
    ) -> list[BeamSearchOutput]:
        """Finds the most probable completions of prompts by beam search.

        The beams of all prompts are computed together; what they have in common comes from the prefix cache.

        Args:
            prompts: see `generate`; pictures are not taken.
            params: width and length of the search.
            lora_request: the adapter for all prompts; None: the model alone.
            use_tqdm: shows a progress bar of the tokens.
            others: see `generate`.

        Returns:
            One output per prompt, in order.

        Raises:
            ValueError: a prompt cannot be served.
        """
        check_arguments("beam_search", others)
        self._check_generates("beam_search")
        prompt_list = as_prompt_list(prompts)
        token_ids = []
        for index, prompt in enumerate(prompt_list):
            with named_errors("prompt", index, len(prompt_list)):
                token_ids.append(list(self.llm_engine.preprocessor.token_ids(prompt)))

        search = BeamSearch(token_ids, params, self.eos_token_ids)
        for _ in progress_bar(range(params.max_tokens), show=use_tqdm, desc="Beam search", unit="token"):
            if not (beams := search.beams):
                break
            search.advance(self.generate(beams, search.step, use_tqdm=False, lora_request=lora_request))
        found = search.finish()
        if self._tokenizer is not None:
            for output in found:
                for beam in output.sequences:
                    beam.text = str(self._tokenizer.decode(beam.tokens))
        return found

    def reset_prefix_cache(self) -> bool:
        """Forgets the prefix cache in memory; returns False, and changes nothing, while requests run."""
        self._check_generates("reset_prefix_cache")
        return self.llm_engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Gives the memory of the KV cache back to the system until `wake_up`, and forgets the prefix cache.

        Args:
            level: 1; the weights stay. vLLM's level 2 discards them, too: delete the `LLM` for that.

        Raises:
            ValueError: the level is another, or this `LLM` is generating.
        """
        self._check_generates("sleep")
        check_sleep_level(level)
        if not self.reset_prefix_cache():
            raise ValueError("this LLM is generating; finish that first")
        self.llm_engine.release_cache()
        self._asleep = True

    def wake_up(self) -> None:
        """Ends `sleep`: prompts are computed again."""
        self._asleep = False

    def save_session(self, path: str | PathLike[str], prompt: Prompt) -> None:
        """Saves what is computed of a conversation, for `load_session` in another process.

        What is not in the prefix cache any more is computed first.

        Args:
            path: of the file; an existing one is replaced.
            prompt: the conversation: text, token ids, ``{"prompt": …}`` or ``{"prompt_token_ids": …}``.

        Raises:
            ValueError: the conversation cannot be served, the cache has no room for it, or the model has no
                prefix cache.
            OSError: the file cannot be written.
        """
        files = self._session_files()
        token_ids = self.llm_engine.preprocessor.token_ids(prompt)
        if not files.holds(token_ids):
            self.generate(token_ids, SamplingParams(max_tokens=1), use_tqdm=False)
        files.save(Path(path), token_ids)

    def load_session(self, path: str | PathLike[str]) -> list[int]:
        """Loads a conversation that `save_session` saved, so that prompts that begin with it start at once.

        Returns:
            Its token ids.

        Raises:
            ValueError: the file is of another model or damaged, or the cache has no room for it.
            OSError: the file cannot be read.
        """
        return self._session_files().load(Path(path))

    def _session_files(self) -> SessionFiles:
        self._check_generates("a session")
        engine = self.llm_engine
        if engine.has_unfinished_requests():
            raise ValueError("this LLM is generating; finish that first")
        return self._sessions

    def _run(self, requests: Sequence[NewRequest]) -> Generator[RequestOutput, None, None]:
        """Submits all requests and runs steps until they finish; aborts the rest in case of an error."""
        warn_if_forked()
        engine = self.llm_engine
        if self._asleep:
            raise ValueError("this LLM sleeps: call wake_up first")
        if engine.has_unfinished_requests():
            raise ValueError("this LLM is already generating; finish that first, or use AsyncLLM")
        with interrupts_held() as let_through:
            try:
                for index, request in enumerate(requests):
                    with named_errors("prompt", index, len(requests)):
                        engine.add_request(request)
                    let_through()
                while engine.has_unfinished_requests():
                    outputs = engine.step()
                    let_through()
                    for output in outputs:
                        if isinstance(output, FailedOutput):
                            raise output.error
                        yield output
            finally:
                engine.abort_request([request.request_id for request in requests])
                while engine.has_unfinished_requests():  # replicas say later that they have ended
                    engine.step()

    def _tokenized(
        self, prompts: list[Prompt], how: Tokenization, params: Sequence[SamplingParams]
    ) -> list[Prompt]:
        if how.is_plain:
            return prompts
        tokenized = []
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            with named_errors("prompt", index, len(prompts)):
                tokenized.append(self.llm_engine.preprocessor.tokenized(prompt, how, one.max_tokens))
        return tokenized

    def _names(self, count: int) -> list[str]:
        return [str(next(self._numbers)) for _ in range(count)]

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            one = self.get_default_sampling_params() if params is None else params
            return [replace(one, output_kind=RequestOutputKind.FINAL_ONLY)] * count
        several = one_each("sampling_params", params, count, None)
        return [replace(one, output_kind=RequestOutputKind.FINAL_ONLY) for one in several]
