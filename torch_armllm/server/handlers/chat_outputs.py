"""Outputs of a conversation: reasoning, content and tool calls, as they are generated."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch_armllm.chat_format.deltas import OutputDelta, OutputParser
from torch_armllm.chat_format.first_call import FirstCall
from torch_armllm.chat_format.format import ReasoningFormat
from torch_armllm.chat_format.prompt_part import begins_in
from torch_armllm.chat_format.rendering import marks_with
from torch_armllm.engine.outputs import CompletionOutput, RequestOutput
from torch_armllm.engine.sampling_params import FreeReasoning, SamplingParams
from torch_armllm.server.errors import ApiError
from torch_armllm.server.handlers.sampling_params import beam_search_params, sampling_params, tokenization
from torch_armllm.server.handlers.usage import Usage
from torch_armllm.server.protocol.chat import ChatRequest
from torch_armllm.server.reasoning.token_count import reasoning_tokens
from torch_armllm.server.served_model import ServedModel
from torch_armllm.server.tools.choice import ToolUse, tool_use

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatChoice:
    """Parsing state of one of a request's ``n`` outputs.

    Args:
        use: the request's use of tools.
        parser: of the output.
        reasoning: markers of the reasoning, whose tokens are counted; None: they are not.
        opened: True if the output begins within the reasoning.
        tokenizer: counts the tokens of the reasoning.
    """

    def __init__(
        self,
        use: ToolUse,
        parser: OutputParser,
        reasoning: ReasoningFormat | None,
        opened: bool,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._use = use
        self._parser = parser
        self._marks, self._opened, self._tokenizer = reasoning, opened, tokenizer
        self._has_calls = False
        self._tokens: list[int] = []
        self.num_reasoning_tokens = 0

    def parse(self, completion: CompletionOutput) -> OutputDelta:
        """Returns the reasoning, the text and the tool calls that an output adds."""
        parsed = self._parser.feed(completion.text)
        if completion.finished:
            parsed = parsed.joined(self._parser.finish(completion.finish_reason))
        if not self._use.parallel:  # half a marker may have come before the output was ended
            parsed.calls = [call for call in parsed.calls if call.index == 0]
            parsed.content = "" if self._has_calls else parsed.content
        self._has_calls = self._has_calls or bool(parsed.calls)
        if self._marks is not None:
            self._tokens += completion.token_ids
            if completion.finished:
                self.num_reasoning_tokens = reasoning_tokens(
                    self._tokens, self._marks, self._opened, self._tokenizer
                )
        return parsed

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Returns OpenAI's finish reason; None while the output is not finished."""
        if completion.finish_reason == "stop" and self._has_calls:
            return self._use.finish_reason
        return completion.finish_reason


class ChatOutputs:
    """Generates the outputs of one conversation.

    Args:
        served: the model.
        body: the request.
        request_id: names the request in the engine.

    Attributes:
        choices: the outputs' parsing states, once the prompt is known.
        last: the latest output; None before the first.
        params: the sampling parameters.
        usage: tokens so far.

    Raises:
        ApiError: the request is invalid.
    """

    def __init__(self, served: ServedModel, body: ChatRequest, request_id: str) -> None:
        self._served = served
        self._body = body
        self._id = request_id
        self._use = tool_use(body, served.chat_format)
        self._marks = None if served.chat_format.keeps_reasoning else served.chat_format.format.reasoning
        self.params = self._make_params()
        self._beams = beam_search_params(body, self.params, None, served.max_model_len)
        self._tokenization, self._most = tokenization(body, self.params, served.max_model_len)
        self.choices: list[ChatChoice] = []
        self.usage = Usage()
        self.last: RequestOutput | None = None

    def _make_params(self) -> SamplingParams:
        body, served = self._body, self._served
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        more: dict[str, Any] = {"logprobs": logprobs, **self._use.settings}
        special = getattr(served.prompts.tokenizer, "all_special_tokens", ())
        if marks_with(served.chat_format.format, special):
            more["skip_special_tokens"] = False
        return sampling_params(body, served.defaults, max_tokens, served.settings.max_tokens, **more)

    async def prompt(self) -> dict[str, Any]:
        """Returns the prompt of the request."""
        prompt = await self._served.prompts.from_messages(self._body, self._use.tools)
        if self._most is not None:
            if "multi_modal_data" in prompt:
                message = "truncate_prompt_tokens is not for conversations with pictures; leave it out"
                raise ApiError(400, message, "truncate_prompt_tokens")
            prompt["prompt_token_ids"] = self._tokenization.cut(prompt["prompt_token_ids"], self._most)
        return prompt

    async def __call__(self) -> AsyncGenerator[list[tuple[CompletionOutput, OutputDelta]], None]:
        """Yields what each step adds, after the request was admitted."""
        served, body = self._served, self._body
        with served.admission.admit(self.params.num_sequences):
            prompt = await self.prompt()
            generated = served.generate(prompt, self._begin(prompt), self._id, body.priority, self._beams)
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    self.usage.add(output)
                    self.last = output
                    added = [(each, self.choices[each.index].parse(each)) for each in output.outputs]
                    if self._marks is not None:
                        self.usage.reasoning = sum(choice.num_reasoning_tokens for choice in self.choices)
                    yield added

    def _begin(self, prompt: dict[str, Any]) -> SamplingParams:
        """Creates the choices; returns the parameters: a structure begins after the reasoning."""
        body, served = self._body, self._served.chat_format
        last, continued = body.messages[-1], None
        if body.continue_final_message:
            continued = last.text()
            if not continued and (last.reasoning_content or last.reasoning) and self._marks is not None:
                continued = self._marks.begin  # a message without content goes on within its reasoning
        part = begins_in(served.format, prompt["prompt"], continued)
        opened, tokenizer = part == "reasoning", self._served.prompts.tokenizer
        for _ in range(self.params.n):
            parser = self._use.parser(served, part, continued is not None)
            self.choices.append(ChatChoice(self._use, parser, self._marks, opened, tokenizer))
        params = self.params
        if self._use.ends_with_call:
            params = replace(params, text_end=FirstCall(served.format, self._use.schemas, part))
        structure = params.structured_outputs
        marks = served.format.reasoning if self._use.demands else self._marks
        if marks is None or structure is None:
            return params
        free = FreeReasoning(None if opened else marks.begin, marks.end)
        return replace(params, structured_outputs=replace(structure, reasoning=free))
