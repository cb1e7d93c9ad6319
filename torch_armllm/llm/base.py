"""Common base of `LLM` and `AsyncLLM`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import Unpack

from torch_armllm.checkpoint.hub_snapshot import hub_snapshot
from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.disk.session_files import SessionFiles
from torch_armllm.engine.engine_protocol import Engine, TextEngine
from torch_armllm.engine.images.reader import PictureReader
from torch_armllm.engine.media.media_access import MediaAccess
from torch_armllm.engine.media.taken_media import MODALITIES
from torch_armllm.engine.reports.metrics import Metric, read_metrics
from torch_armllm.engine.reports.stats import EngineStats
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.llm.calls.foreign_settings import NO_CODE, missing_attribute
from torch_armllm.llm.loading.cached_loader import load_with_plan_cache
from torch_armllm.llm.loading.engine_facts import EngineFacts
from torch_armllm.llm.loading.load_settings import LLMSettings, split_settings
from torch_armllm.llm.loading.loader import (
    engine_config,
    load_engine,
    load_patched,
    load_pooling_engine,
    verify_checksums,
)
from torch_armllm.llm.ranks.loader import check_backend, load_on_ranks, with_ranks
from torch_armllm.llm.ranks.network import follow_launched, is_launched_follower
from torch_armllm.llm.replicas.loader import load_replicas
from torch_armllm.plan.plan_model import PlanModel
from torch_armllm.pooling.pooling_engine import PoolingEngine
from torch_armllm.pooling.runner import choose_runner
from torch_armllm.system.dtypes import float_dtype
from torch_armllm.system.gc_pause import collection_paused

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from torch_armllm.llm.replicas.replica_set import ReplicaSet


class LLMBase:
    """An engine with its tokenizer and its model.

    If the engine was restored from the plan cache, the model is loaded at the first access to `model`.

    Arguments and errors are those of `torch_armllm.LLM`.

    Attributes:
        llm_engine: the engine; a pooling model has none.
        pooling_engine: the engine of a pooling model; None: the model generates.
        replicas: ``llm_engine``, where that is several engines in other processes; None: it is in this one.
        reasoning_parser: name of the format of reasoning; None: the chat template's.
    """

    llm_engine: TextEngine
    pooling_engine: PoolingEngine | None = None
    replicas: ReplicaSet | None = None
    _engine: Engine[Any]
    _model: Any = None
    _find_facts: Callable[[Any], EngineFacts]
    _load_model: Callable[[], PreTrainedModel]
    _DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Settings that differ from `EngineConfig`'s."""

    def __init__(
        self,
        model: str | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        **settings: Unpack[LLMSettings],
    ) -> None:
        how, pooling, engine = split_settings({**self._DEFAULTS, **settings})
        if how.trust_remote_code:
            raise ValueError(f"trust_remote_code=True is refused: {NO_CODE}")
        if how.kv_cache_memory_bytes is not None:
            if "kv_cache_memory" in engine:
                raise ValueError("kv_cache_memory_bytes is vLLM's name of kv_cache_memory: give one of both")
            engine["kv_cache_memory"] = how.kv_cache_memory_bytes
        if how.revision is not None:
            model = _revised(model, how.revision)
        request = ModelRequest(
            model,
            tokenizer,
            float_dtype(how.dtype),
            how.quantization,
            how.skip_tokenizer_init,
            how.progress,
            how.hf_overrides,
        )
        config = engine_config(engine)
        self.media_access = MediaAccess(config.allowed_media_path, config.allowed_media_domains)
        self.reasoning_parser = (config.reasoning_config or {}).get("reasoning_parser")
        self._model_lock = threading.Lock()
        self._name = model if isinstance(model, str) else str(model.name_or_path)
        if choose_runner(model, pooling.runner) == "pooling":
            self._load_pooling(request, config, pooling.pooler_config, how.verify)
        elif pooling.pooler_config:
            raise ValueError("pooler_config is for pooling models: give runner='pooling'")
        else:
            with collection_paused():  # it imports transformers
                request = request.resolved()
            if how.verify:
                verify_checksums(request.model)
            if config.data_parallel_size > 1:
                self._load_replicas(request, config)
            else:
                self._load_engine(request, config)
        self._start()

    def _load_pooling(
        self, request: ModelRequest, config: EngineConfig, pooler: Mapping[str, Any] | None, verify: bool
    ) -> None:
        if config.logits_processors:
            raise ValueError("logits_processors are for models that generate, and this one pools")
        if verify:
            verify_checksums(request.model)
        if config.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size = {config.data_parallel_size}: replicas of models that pool are not "
                "built yet: leave it out"
            )
        engine, self._model, self._tokenizer = load_pooling_engine(request, config, pooler)
        self._engine = self.pooling_engine = engine
        self._find_facts = partial(EngineFacts.of_pooling, engine, self._tokenizer)

    def _load_replicas(self, request: ModelRequest, config: EngineConfig) -> None:
        replicas, self._tokenizer = load_replicas(request, config)
        self._engine = self.llm_engine = self.replicas = replicas
        self._find_facts, self._load_model = lambda _: replicas.facts, replicas.load_model

    def _load_engine(self, request: ModelRequest, config: EngineConfig) -> None:
        config = with_ranks(request.model, config)
        if is_launched_follower(config):  # rank 0 alone has an engine
            sys.exit(follow_launched(request, config))
        check_backend(request.model, config)
        load = load_engine if config.ranks == 1 else load_on_ranks
        engine, self._model, self._tokenizer = load_with_plan_cache(request, config, load)
        self._engine = self.llm_engine = engine
        self._find_facts = partial(EngineFacts.of, engine, self._tokenizer)
        self._load_model = partial(load_patched, request, config.kv_cache_dtype)

    def _start(self) -> None:
        """Hook for subclasses, called once the engine exists."""

    @property
    def model(self) -> PreTrainedModel:
        """The patched model; loaded at the first access if the engine came from the plan cache.

        Raises:
            ValueError: the model is in other processes.
        """
        with self._model_lock:
            if not self.has_model:
                self._model = self._load_model()
            return self._model

    @property
    def has_model(self) -> bool:
        """True if the model is loaded; False if there is only an engine."""
        return not (self._model is None or isinstance(self._model, PlanModel))

    @property
    def stats(self) -> EngineStats:
        """Statistics of the engine; of the first replica where there are several, see `all_stats`."""
        return self.all_stats()[0]

    def all_stats(self) -> list[EngineStats]:
        """Returns the statistics of the engine, or of each replica."""
        return self._engine.all_stats()

    def get_metrics(self) -> list[Metric]:
        """Returns counters and gauges of the engine, or of each replica, which the label ``engine`` numbers.

        A server's ``/metrics`` has those of requests, too.
        """
        return [
            metric
            for number, stats in enumerate(self.all_stats())
            for metric in read_metrics(stats, self._name, number)
        ]

    @property
    def _facts(self) -> EngineFacts:
        return self._find_facts(self._model)

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the model's vocabulary."""
        return self._facts.vocab_size

    @property
    def hidden_size(self) -> int | None:
        """Width of the hidden states, known without the model; None if its configuration does not say."""
        return self._facts.hidden_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its output together."""
        return self._facts.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once, in all replicas together."""
        return self._facts.max_num_seqs

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV cache and the drafter's; 0 for a model that runs module by module, or pools."""
        return self._facts.kv_bytes

    @property
    def keeps_budgets(self) -> bool:
        """True if thinking budgets can be kept: it is known how the model marks its reasoning."""
        return self._facts.keeps_budgets

    @property
    def promised_bytes(self) -> int:
        """Bytes that the engine may still write: of its KV cache, and of experts that come from the disk."""
        experts = self.stats.experts
        return self.kv_bytes + (0 if experts is None else experts().unfilled)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Returns the tokenizer.

        Raises:
            ValueError: the model runs without a tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("there is no tokenizer")
        return self._tokenizer

    @cached_property
    def _sessions(self) -> SessionFiles:
        return self.llm_engine.session_files()

    def picture_reader(self) -> PictureReader:
        """Returns what reads prompts with pictures.

        Raises:
            ValueError: the model takes none.
        """
        return self.llm_engine.preprocessor.picture_reader()

    if not TYPE_CHECKING:  # checkers know all attributes

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(type(self).__name__, name)

    @property
    def input_modalities(self) -> tuple[str, ...]:
        """Modalities of prompts: ``text``, and those of `MODALITIES` that the model takes."""
        reader = "" if self.pooling_engine is not None else self.llm_engine.preprocessor.pictures
        limits = {} if isinstance(reader, str) else reader.taken.limits
        return ("text", *(modality for modality in MODALITIES if limits.get(modality)))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The model's EOS tokens."""
        return self._facts.eos_token_ids

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters that the model's generation config recommends."""
        return self._facts.defaults


def check_sleep_level(level: int) -> None:
    """Raises ValueError for a level of sleep at which the weights would go, too."""
    if level != 1:
        raise ValueError(
            f"sleep(level={level}) would discard the weights, which the disk gives back in seconds: delete "
            "this LLM and make another, or give level=1"
        )


def _revised(model: str | PreTrainedModel, revision: str) -> str:
    """Returns the folder of a revision of a model on the hub."""
    if not isinstance(model, str):
        raise ValueError(f"revision={revision!r} is for a model that is yet to be loaded: give its name")
    return str(hub_snapshot(model, revision))
