"""Prompts: texts and chat messages as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch_armllm.chat_format.chat_renderer import ChatInput, ChatRenderer
from torch_armllm.chat_format.conversation import Conversation
from torch_armllm.chat_format.template_switches import template_switches
from torch_armllm.engine.images.chat import render_media
from torch_armllm.engine.images.reader import PictureReader
from torch_armllm.engine.media.media import MOST_BYTES_TOGETHER, Opened, open_media
from torch_armllm.engine.media.media_access import MediaAccess
from torch_armllm.engine.media.media_budget import HeldMedia, MediaBudget
from torch_armllm.engine.text.chat_template import NOT_VARIABLES, tokenized_chat
from torch_armllm.engine.text.content_format import ContentFormat
from torch_armllm.engine.text.prompt_limit import PromptLimit
from torch_armllm.engine.text.tokenization import Tokenization
from torch_armllm.server.errors import ApiError, bad_request
from torch_armllm.server.infill.prompt import ExtraFile, InfillPrompts
from torch_armllm.server.middleware.warnings import note_warnings
from torch_armllm.server.protocol.chat import Message
from torch_armllm.system.panics import PANICS_AS_ERRORS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
_PLAIN = Tokenization()
_MEDIA_THREADS = 2
"""Threads that read and decode media, so that a slow host does not delay every other image."""


class ChatTemplateInput(Protocol):
    """The fields of a request that a chat template reads."""

    messages: Any
    add_generation_prompt: bool
    continue_final_message: bool

    def template_variables(self) -> dict[str, Any]:
        """Returns the variables of the template that the request sets."""
        ...


class PromptBuilder:
    """Tokenizes texts and chat messages in a thread of its own, and decodes media in other ones.

    Args:
        tokenizer: the model's tokenizer.
        chat_template: replaces the tokenizer's own template.
        limit: bounds the characters of a prompt.
        reader: returns the reader of the model's media; None: it takes none.
        media: what URLs of media may name; None: the media themselves are in the URLs.
        content_format: form of the contents that the template reads.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None,
        limit: PromptLimit,
        reader: Callable[[], PictureReader] | None = None,
        media: MediaAccess | None = None,
        content_format: ContentFormat = "auto",
    ) -> None:
        self.tokenizer = tokenizer
        self._reader = reader
        self._media = media or MediaAccess()
        self._limit = limit
        self._content_format = content_format
        self.template = str(chat_template or tokenizer.chat_template or "")
        self._template_option = {} if chat_template is None else {"chat_template": chat_template}
        self._renderer = ChatRenderer(tokenizer, chat_template, content_format)
        self._infill: InfillPrompts | None = None
        self._thread = ThreadPoolExecutor(1, "armllm-tokenizer")
        self._media_threads = ThreadPoolExecutor(_MEDIA_THREADS, "armllm-media")
        self._budget = MediaBudget(MOST_BYTES_TOGETHER)
        if self.template:
            self._thread.submit(self._renderer.traits)  # the first conversation does not wait for them

    def switches(self) -> list[str]:
        """Returns the names of the variables that the chat template reads and a request may set."""
        return list(template_switches(self._renderer.template()))

    async def from_messages(
        self, body: ChatTemplateInput, tools: Sequence[Any] | None = None
    ) -> dict[str, Any]:
        """Builds the prompt of a conversation.

        Args:
            body: the request.
            tools: tools that the template describes to the model.

        Raises:
            ApiError: there is no template, or it rejects the messages.
        """
        messages = [_message(message) for message in body.messages]
        contents = [message.text() for message in body.messages]
        texts = [*contents, *(message.get("reasoning", "") for message in messages)]
        self._check_size(sum(map(len, texts)), "messages")
        variables = body.template_variables()
        if reserved := NOT_VARIABLES & set(variables):
            text = f"chat_template_kwargs sets {', '.join(sorted(reserved))}; give template variables only"
            raise ApiError(400, text, "chat_template_kwargs")
        given = ChatInput(
            messages,
            [tool.model_dump(exclude_none=True) for tool in tools or ()],
            variables,
            body.add_generation_prompt and not body.continue_final_message,
            body.continue_final_message,
        )
        if any(message.has_media for message in body.messages):
            return await self._with_media(given)

        def rendered() -> tuple[dict[str, Any], list[str]]:
            text, warnings = self._renderer.render(given)
            return tokenized_chat(self.tokenizer, text, self._limit), warnings

        prompt, warnings = await self.run(rendered, "messages")
        note_warnings(warnings)
        return prompt

    async def _with_media(self, given: ChatInput) -> dict[str, Any]:
        threads = self._media_threads

        def opened() -> tuple[PictureReader, Conversation, list[dict[str, Any]], Opened]:
            if self._reader is None:
                raise ValueError("this model takes no pictures, sound or videos")
            reader = self._reader()  # a model that takes none says so before anything is read
            fitted = self._renderer.fitted(given, keep_contents=True)
            files = open_media(fitted.messages, self._media, reader.taken, MOST_BYTES_TOGETHER)
            return reader, fitted, *files

        reader, fitted, converted, files = await self.run(opened, "messages", threads)
        note_warnings(fitted.warnings)
        options: dict[str, Any] = {
            **fitted.variables,
            **self._template_option,
            "content_format": self._content_format,
            "add_generation_prompt": given.begins,
            "continue_final_message": given.continues,
        }
        held = await self._budget.hold(sum(each.nbytes for media in files.values() for each in media))
        try:
            await self.run(lambda: _decode(files, held), "messages", threads)
            shown = reader, self.tokenizer, converted, held, self._limit
            return await self.run(lambda: render_media(*shown, **options), "messages")
        except BaseException:
            held.release()
            raise

    async def from_text(
        self, text: str, how: Tokenization = _PLAIN, most: int | None = None
    ) -> dict[str, Any]:
        """Builds the prompt of a text.

        Args:
            text: the text.
            how: it is tokenized.
            most: tokens to which it is cut; None: it is not.

        Raises:
            ApiError: the text is too long to be tokenized.
        """
        self._check_size(len(text), "prompt")

        def tokens() -> dict[str, Any]:
            return {"prompt": text, "prompt_token_ids": how.ids(self.tokenizer, text, most)}

        return await self.run(tokens, "prompt")

    def infill(self, param: str) -> InfillPrompts:
        """Returns what builds prompts for the middle of a text.

        Args:
            param: the request's field that asks for it.

        Raises:
            ApiError: the model has no tokens for it.
        """
        if self._infill is None:
            self._infill = InfillPrompts(self.tokenizer)
        if self._infill.tokens is None:
            message = (
                "this model cannot fill in: its tokenizer has no tokens such as <|fim_prefix|>, "
                "<|fim_suffix|> and <|fim_middle|>; use a model of code that has, such as Qwen2.5-Coder"
            )
            raise ApiError(400, message, param, "no_fim_tokens")
        return self._infill

    async def from_infill(
        self, prefix: str, suffix: str, extra: Sequence[ExtraFile], begun: str, most: int
    ) -> dict[str, Any]:
        """Builds the prompt for the middle of a text; see `InfillPrompts.build`.

        Raises:
            ApiError: the texts are too long to be tokenized, or the model has no tokens for it.
        """
        prompts = self.infill("input_suffix")
        self._check_size(len(prefix) + len(suffix) + len(begun), "input_prefix")
        self._check_size(sum(len(each.text) + len(each.name) for each in extra), "input_extra")

        def tokens() -> dict[str, Any]:
            ids = prompts.build(prefix, suffix, extra, begun, most)
            return {"prompt": prefix, "prompt_token_ids": ids}

        return await self.run(tokens, "input_prefix")

    async def decode(self, tokens: list[int]) -> str:
        """Returns the text of token ids, special tokens included.

        Raises:
            ApiError: a token id is unknown.
        """
        last = max(self.tokenizer.get_vocab().values())
        if max(tokens, default=0) > last:
            message = f"token id {max(tokens)} is out of range: the tokenizer's ids end at {last}"
            raise ApiError(400, message, "tokens")
        return await self.run(lambda: str(self.tokenizer.decode(tokens)), "tokens")

    def close(self) -> None:
        """Ends the thread."""
        for threads in (self._thread, self._media_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _check_size(self, characters: int, param: str) -> None:
        try:
            self._limit.check(characters)
        except ValueError as error:
            raise bad_request(error, param) from error

    async def run(self, work: Callable[[], T], param: str, threads: ThreadPoolExecutor | None = None) -> T:
        """Runs work in the thread, or in others; its errors are those of a request field.

        Raises:
            ApiError: the work failed over its input.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(
                threads or self._thread, PANICS_AS_ERRORS(work)
            )
        except (ValueError, TypeError, UnicodeError, ImportError) as error:
            raise bad_request(error, param) from error


def _decode(opened: Opened, held: HeldMedia) -> None:
    """Decodes media into those that a request holds."""
    for modality, media in opened.items():
        held[modality] = [each.decoded() for each in media]


def _message(message: Message) -> dict[str, Any]:
    """Converts a message to a dictionary; its form is not yet that of the template."""
    content = message.parts() if isinstance(message.content, list) else message.content
    converted: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            converted[name] = value
    if (reasoning := message.reasoning_content or message.reasoning) and message.role == "assistant":
        converted["reasoning"] = reasoning
    if message.tool_calls:
        converted["tool_calls"] = [
            call.model_dump(exclude_none=True, exclude={"index"}) for call in message.tool_calls
        ]
    return converted
