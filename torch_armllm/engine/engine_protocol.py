"""The protocol of engines of every kind, as `LLM`, `AsyncLLM`, a server and the engine's thread use it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from torch_armllm.engine.disk.session_files import SessionFiles
from torch_armllm.engine.errors import OnFailure
from torch_armllm.engine.reports.stats import EngineStats
from torch_armllm.engine.text.preprocess import NewRequest, Preprocessor
from torch_armllm.lora.adapter_table import PreparedAdapter
from torch_armllm.lora.request import LoRARequest

R_contra = TypeVar("R_contra", contravariant=True)


class Engine(Protocol[R_contra]):
    """Computes requests, step by step; its outputs have a ``request_id`` and ``finished``.

    Attributes:
        aborts_later: True if the last outputs of aborted requests come with a later step.
        stats: statistics; of the first replica where there are several.
    """

    stats: EngineStats
    aborts_later: bool = False

    def add_request(self, new: R_contra) -> None:
        """Submits a request."""
        ...

    def abort_request(self, request_ids: str | Iterable[str]) -> list[Any]:
        """Ends requests; unknown ids are ignored."""
        ...

    def step(self) -> list[Any]:
        """Computes a step; a `StepFailedError` ends some requests, any other error ends the engine."""
        ...

    def has_unfinished_requests(self) -> bool:
        """True if there is anything to compute."""
        ...

    def all_stats(self) -> list[EngineStats]:
        """Returns the statistics of the engine, or of each replica."""
        return [self.stats]

    def wake(self) -> None:
        """Ends a step that waits for outputs of other processes; any thread may call it."""
        return

    def on_failure(self, method: OnFailure) -> None:
        """Calls a method, which is kept weakly, once a process has failed that every step needs."""
        return

    def close(self) -> None:
        """Ends the processes that end no other way."""
        return


class TextEngine(Engine[NewRequest], Protocol):
    """An engine that generates.

    Attributes:
        preprocessor: turns prompts into requests.
    """

    preprocessor: Preprocessor

    def has_lora(self, lora_request: LoRARequest) -> bool:
        """True if there is nothing to `prepare_lora`; any thread may ask."""
        ...

    def prepare_lora(self, lora_request: LoRARequest) -> PreparedAdapter | None:
        """Reads and checks an adapter, unless it is loaded; any thread may call it while steps run."""
        ...

    def add_lora(self, lora_request: LoRARequest, prepared: PreparedAdapter | None = None) -> None:
        """Loads an adapter before a request asks for it."""
        ...

    def remove_lora(self, lora_id: int) -> None:
        """Unloads an adapter."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forgets the prefix cache in memory; False, and nothing is changed, while requests run."""
        ...

    def release_cache(self) -> int:
        """Gives the memory of the KV cache back to the system until it is written; returns its bytes."""
        ...

    def session_files(self) -> SessionFiles:
        """Returns what saves and loads conversations; raises ValueError if nothing does."""
        ...
