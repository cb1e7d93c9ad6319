"""What the next step computes: bookkeeping without a tensor."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch_armllm.engine.block_manager import BlockManager
from torch_armllm.engine.outputs import FinishReason
from torch_armllm.engine.policy import Policy, PriorityPolicy
from torch_armllm.engine.request import Answer, Request, Status
from torch_armllm.engine.step import Scheduled, Step

_Place = tuple[float, int, int]
"""Rank, arrival and index of an answer: smaller ones are served first."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of a step; see `EngineConfig`.

    Attributes:
        preemption: what happens to blocks that are taken away: ``recompute`` forgets them, ``swap`` copies
            them to swap memory where that has room.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 2048
    enable_chunked_prefill: bool = True
    preemption: Literal["recompute", "swap"] = "recompute"

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_model_len < 2:
            raise ValueError(
                f"max_num_seqs = {self.max_num_seqs} and max_model_len = {self.max_model_len} leave no room "
                "for a prompt and an answer: give at least 1 and 2"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than max_num_seqs = "
                f"{self.max_num_seqs}: every running answer takes a token of each step"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} is less than max_model_len = "
                f"{self.max_model_len}: raise it, or let prompts be read in chunks (enable_chunked_prefill)"
            )
        if self.preemption not in ("recompute", "swap"):
            raise ValueError(f"preemption = {self.preemption!r}: it is 'recompute' or 'swap'")


class Scheduler:
    """Fills steps: a token for every answer that is being written, then prompts into what is left.

    A prompt is admitted when there are blocks for all of it, and gets them at once; only the tokens of
    answers ask for blocks later. When there are none, the last running answer in the policy's order gives
    up its own. Who is scheduled in a step comes before all that may still be preempted in it, and in a step
    with a preemption nobody is admitted: so no block that the step moves changes hands twice.

    Attributes:
        max_length: most tokens of a prompt and its answer: `max_model_len`, or what all blocks hold.
        preemptions: how often an answer lost its blocks.
    """

    def __init__(self, config: SchedulerConfig, blocks: BlockManager, policy: Policy | None = None) -> None:
        self.config = config
        self.blocks = blocks
        self.policy = policy if policy is not None else PriorityPolicy()
        self.max_length = min(config.max_model_len, blocks.num_blocks * blocks.block_size)
        self.preemptions = 0
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._places: dict[Answer, _Place] = {}
        self._place = self._places.__getitem__
        self._waiting: list[Answer] = []
        self._running: list[Answer] = []
        self._forked: list[Answer] = []
        self._slots: dict[Answer, list[int]] = {}
        self._seats = 0
        self._refused: tuple[Answer, int] | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._requests)

    @property
    def running(self) -> int:
        """Answers that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Answers that were not admitted yet, or lost what was computed."""
        return len(self._waiting) - len(self._slots)

    @property
    def swapped(self) -> int:
        """Answers whose blocks lie in swap memory."""
        return len(self._slots)

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            ValueError: its name is taken, or it can never be served.
        """
        length, n = len(request.prompt_token_ids), request.params.n
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} is not finished: give the new one another name")
        if length == 0:
            raise ValueError(f"request {request.request_id!r} has no prompt: give at least one token")
        if length >= self.max_length:
            limit = "max_model_len" if self.max_length == self.config.max_model_len else "the KV cache"
            raise ValueError(
                f"the prompt of request {request.request_id!r} has {length} tokens; {limit} allows "
                f"{self.max_length} with at least one of an answer: shorten it"
                + ("" if limit == "max_model_len" else ", or give more kv_cache_memory")
            )
        if n > self.config.max_num_seqs:
            raise ValueError(
                f"request {request.request_id!r} wants n = {n} answers; max_num_seqs is "
                f"{self.config.max_num_seqs}: ask for fewer, or raise it"
            )
        (answer,) = request.answers
        self._requests[request.request_id] = request
        self._places[answer] = (self.policy.rank(request), self._arrivals, 0)
        self._arrivals += 1
        insort(self._waiting, answer, key=self._place)

    def abort(self, request_id: str) -> Request | None:
        """Ends all answers of a request; None where there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for answer in request.answers:
            if answer.status is not Status.FINISHED:
                self.finish(answer, "abort")
        return request

    def finish(self, answer: Answer, reason: FinishReason) -> None:
        """Ends an answer and lets go of all it holds."""
        if answer.status is Status.RUNNING:
            self._leave(self._running, answer)
            self._seats -= self._seats_of(answer)
            self.blocks.deallocate(answer.blocks)
            answer.blocks.clear()
        else:
            assert answer.status is not Status.FINISHED
            self._leave(self._waiting, answer)
            self.blocks.deallocate_slots(self._slots.pop(answer, ()))
        answer.draft.clear()
        answer.status, answer.finish_reason = Status.FINISHED, reason
        del self._places[answer]
        if answer.request.finished:
            del self._requests[answer.request.request_id]

    def schedule(self) -> Step:
        """The next step; it has something to compute while there are unfinished requests."""
        step = Step()
        left = self._schedule_answers(step)
        left = self._schedule_prompts(step, left)
        if left and self._waiting and not step.preempted:
            self._admit(step, left)
        assert step.scheduled or not self._requests
        return step

    def fork(self, answer: Answer) -> list[Answer]:
        """The other ones of `n` answers, to a prompt that the step at hand has read to its end."""
        request = answer.request
        assert answer.status is Status.RUNNING and len(request.answers) == 1 and answer.output_length == 0
        rank, arrival, _ = self._places[answer]
        siblings = [
            Answer(
                request,
                index,
                list(request.prompt_token_ids),
                blocks=self.blocks.share(answer.blocks),
                computed=answer.prompt_length,
                status=Status.RUNNING,
            )
            for index in range(1, request.params.n)
        ]
        request.answers += siblings
        for sibling in siblings:
            self._places[sibling] = (rank, arrival, sibling.index)
            insort(self._running, sibling, key=self._place)
        self._forked += siblings
        return siblings

    def complete(self, step: Step, drawn: Mapping[Answer, Sequence[int]]) -> None:
        """Enters what a step computed and what was drawn: the tokens that a draft guessed right, and one."""
        for answer, start, count in step.scheduled:
            if answer.status is Status.RUNNING:
                self._advance(answer, start, start + count, drawn.get(answer, ()))
                if answer.draft:
                    self._roll_back(answer)
        for answer in self._forked:
            if answer.status is Status.RUNNING:
                self._advance(answer, answer.computed, answer.computed, drawn.get(answer, ()))
        self._forked.clear()

    def _schedule_answers(self, step: Step) -> int:
        """Takes all answers that are being written into a step; returns how many tokens are left."""
        size, left = self.blocks.block_size, self.config.max_num_batched_tokens
        spare = left - len(self._running)
        for answer in self._running:  # whose end is cut off by preemption
            start = answer.computed
            if len(answer.token_ids) - start > 1:
                answer.draft.clear()
                continue
            ready = start % size and not self.blocks.is_shared(answer.blocks[-1])
            if not ready and not self._extend(answer, step):
                break
            count = 1
            if answer.draft:
                drafted = self._fit_draft(answer, spare)
                spare -= drafted
                count += drafted
            step.scheduled.append(Scheduled(answer, start, count))
            left -= count
        return left

    def _schedule_prompts(self, step: Step, left: int) -> int:
        """Goes on with prompts that were admitted before; returns how many tokens are left."""
        for answer in self._running:
            if left == 0:
                break
            rest = len(answer.token_ids) - answer.computed
            if rest > 1:
                count = min(rest, left)
                step.scheduled.append(Scheduled(answer, answer.computed, count))
                left -= count
        return left

    def _extend(self, answer: Answer, step: Step) -> bool:
        """Gives an answer a block of its own for its next position; False where it lost those it had."""
        table, index = answer.blocks, answer.computed // self.blocks.block_size
        while index == len(table) or self.blocks.is_shared(table[index]):
            if self.blocks.free:
                if index == len(table):
                    table += self.blocks.allocate(1)
                else:
                    self._copy(answer, index, step)
                return True
            victim = self._running[-1]
            self._preempt(victim, step)
            if victim is answer:
                return False
        return True

    def _copy(self, answer: Answer, index: int, step: Step) -> None:
        """Copies a block before it is written."""
        shared = answer.blocks[index]
        (own,) = self.blocks.allocate(1)
        step.copies.append((shared, own))
        answer.blocks[index] = own
        self.blocks.deallocate([shared])

    def _fit_draft(self, answer: Answer, most: int) -> int:
        """Cuts a draft off to what there is room for, without taking a block from anybody."""
        known, size = len(answer.token_ids), self.blocks.block_size
        count = max(0, min(len(answer.draft), most, self.max_length - known))
        while len(answer.blocks) * size < known + count and self.blocks.free > len(self._running):
            answer.blocks += self.blocks.allocate(1)
        count = min(count, len(answer.blocks) * size - known)
        del answer.draft[count:]
        return count

    def _preempt(self, answer: Answer, step: Step) -> None:
        """Takes all blocks from an answer."""
        self._leave(self._running, answer)
        self._seats -= self._seats_of(answer)
        used = -(-answer.computed // self.blocks.block_size)
        if self.config.preemption == "swap" and used <= self.blocks.free_slots:
            slots = self.blocks.allocate_slots(used)
            step.swaps_out += zip(answer.blocks, slots, strict=False)
            self._slots[answer] = slots
            answer.status = Status.SWAPPED
        else:
            answer.computed = 0
            answer.status = Status.WAITING
        self.blocks.deallocate(answer.blocks)
        answer.blocks.clear()
        answer.draft.clear()
        insort(self._waiting, answer, key=self._place)
        step.preempted.append(answer)
        answer.request.metrics.preemptions += 1
        self.preemptions += 1

    def _admit(self, step: Step, left: int) -> None:
        """Gives blocks to those who wait, in order, until one does not fit."""
        if self._refused is not None:
            answer, free = self._refused
            if answer is self._waiting[0] and self.blocks.free - self._seats <= free:
                return
            self._refused = None
        while left and self._waiting:
            answer = self._waiting[0]
            seats = self._seats_of(answer)
            if self._seats + seats > self.config.max_num_seqs:
                break
            count = self._seat(answer, left, step)
            if count == 0:
                break
            del self._waiting[0]
            insort(self._running, answer, key=self._place)
            self._seats += seats
            answer.status = Status.RUNNING
            step.scheduled.append(Scheduled(answer, answer.computed, count))
            left -= count

    def _seat(self, answer: Answer, left: int, step: Step) -> int:
        """Gives an answer blocks for all its tokens, and returns how many the step computes; 0: no room."""
        blocks, size, known = self.blocks, self.blocks.block_size, len(answer.token_ids)
        slots = self._slots.get(answer)
        wanted = known if slots is None else answer.computed
        # The logits of all the prompt's positions are wanted: none of them may be skipped.
        if answer.params.prompt_logprobs is not None and slots is None:
            wanted = 0
        found = blocks.find(answer.token_ids, wanted)
        computed = min(len(found) * size, known - 1) if slots is None else answer.computed
        count = known - computed
        if count > left:
            if not self.config.enable_chunked_prefill:
                return 0
            count = left
        missing = -(-known // size) - len(found)
        # The last token of a prompt that was found to its end is computed again, for its logits.
        again = computed < len(found) * size and blocks.count_free(found[-1:]) == 0
        # Running answers will want further blocks: one for each stays free.
        if missing + again + blocks.count_free(found) + self._seats > blocks.free:
            self._refused = (answer, blocks.free - self._seats)
            return 0
        answer.blocks = blocks.share(found)
        if again:
            self._copy(answer, len(found) - 1, step)
        answer.blocks += blocks.allocate(missing)
        if slots is not None:
            held = answer.blocks[: len(slots)]
            step.swaps_in += list(zip(slots, held, strict=True))[len(found) :]
            blocks.deallocate_slots(self._slots.pop(answer))
            blocks.fill(answer.blocks, answer.token_ids, len(found) * size, computed)
        else:
            answer.computed = computed
            self._count_found(answer, wanted)
        return count

    def _count_found(self, answer: Answer, wanted: int) -> None:
        cache = self.blocks.cache
        if cache is not None:
            cache.tokens_asked += wanted
            cache.tokens_found += answer.computed
        if answer.request.metrics.preemptions == 0:
            answer.request.num_cached_tokens = answer.computed

    def _advance(self, answer: Answer, start: int, end: int, tokens: Sequence[int]) -> None:
        """Positions ``start`` to ``end`` were computed, as far as they hold what is known now."""
        answer.token_ids.extend(tokens)
        answer.computed = computed = min(end, len(answer.token_ids) - 1)
        size = self.blocks.block_size
        if computed // size != start // size:
            self.blocks.fill(answer.blocks, answer.token_ids, start, computed)

    def _roll_back(self, answer: Answer) -> None:
        """Gives back the blocks of what was guessed wrongly."""
        answer.draft.clear()
        keep = -(-len(answer.token_ids) // self.blocks.block_size)
        self.blocks.deallocate(answer.blocks[keep:])
        del answer.blocks[keep:]

    def _seats_of(self, answer: Answer) -> int:
        """How many answers it will become."""
        return answer.params.n - len(answer.request.answers) + 1

    def _leave(self, queue: list[Answer], answer: Answer) -> None:
        """Takes an answer out of one of the two queues."""
        index = bisect_left(queue, self._places[answer], key=self._place)
        assert queue[index] is answer
        del queue[index]
