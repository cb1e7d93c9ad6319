"""The session of a process that computes a shard of a model, and the order of what all of them do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch_armllm.checkpoint.model_request import ModelRequest
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.disk.rank_rows import RankRowServer
from torch_armllm.engine.execution.rank_follower import Inbox, follow
from torch_armllm.engine.execution.rank_leader import RankLeader
from torch_armllm.engine.execution.stage_course import LinkedStage
from torch_armllm.engine.execution.thread_team import ThreadTeam, choose_threads
from torch_armllm.engine.images.media_facts import MediaFacts
from torch_armllm.hf.model_kind import ModelKind
from torch_armllm.llm.loading.loader import adapter_slots_of, load_patched
from torch_armllm.llm.ranks.agreement import agree, described
from torch_armllm.llm.ranks.rank_shard import FollowerSettings, RankShard, ShardFacts, compare, rank_shard
from torch_armllm.parallel.rank_group import RankGroup
from torch_armllm.parallel.rank_place import RankPlace
from torch_armllm.parallel.row_link import RowLink
from torch_armllm.parallel.stage_link import StageLink
from torch_armllm.patching.state import patch_state


class RankSession(Protocol):
    """The connections of a process to the others, which run until it is closed.

    All processes call these methods in the same order, that of `load_shard`.
    """

    @property
    def place(self) -> RankPlace:
        """The place of this process."""
        ...

    def gather(self, own: Any) -> list[Any]:
        """Returns what each process gives, in order; none on a process that leaves it to rank 0 to compare.

        Raises:
            ValueError: a process has failed; the message says why.
        """
        ...

    def share(self, own: Any) -> Any:
        """Returns what rank 0 gives."""
        ...

    def open_group(self, whole_experts: bool) -> RankGroup | None:
        """Returns the ranks of this process's stage, which gather columns; None if it is the only one."""
        ...

    def open_link(self, group: RankGroup | None) -> StageLink | None:
        """Returns the connections to the stages before and after; None if there is one stage."""
        ...


class Others(Protocol):
    """Other processes, which this one has started or met."""

    def awaited_failure(self) -> str | None:
        """Returns the reason why a process has failed, once that is known; None if all are well."""
        ...

    def close(self) -> None:
        """Ends the other processes, and closes the connections to them."""
        ...


class LeadingSession(RankSession, Others, Protocol):
    """The session of rank 0."""

    def lead(self, settings: FollowerSettings) -> RankLeader:
        """Tells the other processes the sizes of their caches, and returns what sends them steps."""
        ...


class FollowingSession(RankSession, Protocol):
    """The session of another rank."""

    def follow(self) -> tuple[FollowerSettings, Inbox, RowLink]:
        """Waits for rank 0's settings; returns them, its messages and the connection for bytes of caches."""
        ...


class LoadedShard(NamedTuple):
    """A process's shard of a model, the facts of all that compare them, and its link to other stages."""

    shard: RankShard
    facts: list[ShardFacts]
    link: StageLink | None


def load_whole(session: RankSession, request: ModelRequest, config: EngineConfig) -> ModelKind:
    """Loads the model that is to be sharded, and compares versions and kernels; returns its kind.

    Raises:
        ValueError: the model or a setting does not allow it, or another process differs or has failed.
    """
    model = load_patched(request, config.kv_cache_dtype, adapter_slots_of(config))
    agree(session.gather(described()))
    return patch_state(model).kind


def load_shard(
    session: RankSession, kind: ModelKind, config: EngineConfig, media: MediaFacts | str = ""
) -> LoadedShard:
    """Takes this process's shard of a model, and compares it with those of others.

    Args:
        session: of this process.
        kind: of the whole model.
        config: of the engine.
        media: of the trial with images, videos and sounds in rank 0, which tells the others.

    Raises:
        ValueError: see `load_whole`.
    """
    media = session.share(media)
    group = session.open_group(config.enable_expert_parallel)
    shard = rank_shard(kind, config.kv_cache_dtype, session.place, group, media)
    facts = session.gather(shard.facts)
    compare(facts, session.place.tensor_ranks)
    return LoadedShard(shard, facts, session.open_link(group))


def load_and_follow(session: FollowingSession, request: ModelRequest, config: EngineConfig) -> None:
    """Loads this process's shard of a model, and computes steps until rank 0 ends.

    Raises:
        ValueError: see `load_whole`.
        RuntimeError: a step has failed.
        OSError: rank 0 or another process has gone.
    """
    team = ThreadTeam(choose_threads(config.threads, config.pin_threads))
    team.settle()
    kind = load_whole(session, request, config)
    shard, _, link = load_shard(session, kind, config)
    del kind  # it holds the whole model
    settings, inbox, rows = session.follow()
    executor = shard.executor(settings, None if link is None else LinkedStage(session.place, link))
    with team.at_work():
        follow(session.place.rank, inbox, executor, RankRowServer(executor, rows))


@contextmanager
def closed_after_errors(others: Others) -> Iterator[None]:
    """Ends other processes after an error.

    Raises:
        ValueError: a connection broke, as one of them has failed; the message says why.
    """
    try:
        yield
    except BaseException as error:
        # other errors say what is wrong here
        reason = others.awaited_failure() if isinstance(error, RuntimeError) else None
        others.close()
        if reason is not None:
            raise ValueError(reason) from error
        raise
