"""An engine without a model: executes steps on a memory that remembers which text every position holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch_armllm.engine.request import Answer, Request, Status
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from torch_armllm.engine.step import Step
from torch_armllm.kv_cache.block_manager import BlockManager

VOCABULARY = 3


def next_token(text: list[int], index: int) -> int:
    """What the model that this stands for draws behind a text, for answer ``index``."""
    return hash((index, len(text), *text[-12:])) // 7 % VOCABULARY


def request(
    name: str,
    prompt: list[int],
    *,
    n: int = 1,
    priority: int = 0,
    max_tokens: int = 8,
    prompt_logprobs: int | None = None,
) -> Request:
    params = SamplingParams(n=n, max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    return Request(name, prompt, params, seed=0, priority=priority)


class Simulation:
    """A scheduler, the memory it rules, and what an engine does around it."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.scheduler = Scheduler(config, blocks)
        self.memory: list[list[int]] = [[-1] * blocks.block_size for _ in range(blocks.num_blocks)]
        self.swap: list[list[int]] = [[-1] * blocks.block_size for _ in range(blocks.swap_blocks)]
        self.texts: dict[tuple[int, int], int] = {}
        self.known: dict[Answer, list[int]] = {}
        self.requests: list[Request] = []
        self.live: list[Request] = []
        self.steps: list[Step] = []
        self.last_overlooked: Answer | None = None

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests.append(request)
        self.live.append(request)
        return request

    def step(
        self,
        draft: Callable[[Answer], list[int]] = lambda answer: [],
        abort: str | None = None,
    ) -> Step:
        """One step; ``abort`` names a request that goes while the step is computed."""
        self.check()
        before = {a: a.computed for r in self.live for a in r.answers if a.status is Status.RUNNING}
        step = self.scheduler.schedule()
        self.steps.append(step)
        self.check_limits(step, before)
        self.execute(step)
        if abort is not None:
            self.scheduler.abort(abort)
        drawn: dict[Answer, list[int]] = {}
        for scheduled in step.scheduled:
            answer = scheduled.answer
            if not scheduled.draws or answer.status is not Status.RUNNING:
                continue
            drawn[answer] = self.draw(answer, scheduled.draft_count)
            if len(answer.request.answers) < answer.params.n:
                for sibling in self.scheduler.fork(answer):
                    drawn[sibling] = self.draw(sibling, 0)
        self.scheduler.complete(step, drawn)
        self.scheduler.note_time(step, (7 * len(self.steps)) % 11 / 10)
        for answer in drawn:
            most = answer.params.max_tokens
            assert most is not None
            if answer.output_length >= most or len(answer.token_ids) >= self.scheduler.max_length:
                self.scheduler.finish(answer, "length")
            else:
                answer.draft = draft(answer)
        self.check()
        return step

    def draw(self, answer: Answer, drafted: int) -> list[int]:
        """The accepted beginning of a draft and one token more."""
        known, drawn = list(answer.token_ids), []
        for guess in [*answer.draft[:drafted], None]:
            token = next_token(known, answer.index)
            known.append(token)
            drawn.append(token)
            if token != guess:
                break
        most = answer.params.max_tokens
        assert most is not None
        return drawn[: most - answer.output_length]

    def run(self, steps: int = 1000) -> None:
        while self.scheduler.has_unfinished:
            assert steps, "it does not end"
            steps -= 1
            self.step()

    def execute(self, step: Step) -> None:
        memory, swap = self.memory, self.swap
        for block, slot in step.swaps_out:
            swap[slot] = list(memory[block])
        for slot, block in step.swaps_in:
            memory[block] = list(swap[slot])
        # One after the other or all at once: both must give the same.
        at_once = [(to, list(memory[block])) for block, to in step.copies]
        for block, to in step.copies:
            memory[to] = list(memory[block])
        for to, held in at_once:
            assert memory[to] == held
        for answer, start, count in step.scheduled:
            numbers = self.number(answer)
            for position in range(start, start + count):
                block, place = self.find(answer, position)
                assert not self.blocks.is_shared(block) and not self.can_be_found(block)
                memory[block][place] = numbers[position]
        for scheduled in step.scheduled:
            self.check_memory(scheduled.answer, scheduled.end)

    def can_be_found(self, block: int) -> bool:
        return self.blocks.cache is not None and self.blocks.cache._keys[block] is not None

    def number(self, answer: Answer) -> list[int]:
        """For each position of an answer and its draft a number for the text up to there."""
        known = self.known.setdefault(answer, [])
        del known[answer.computed :]  # behind it stood a draft
        text = answer.token_ids + answer.draft
        for token in text[len(known) :]:
            link = (known[-1] if known else 0, token)
            known.append(self.texts.setdefault(link, len(self.texts) + 1))
        return known

    def check_memory(self, answer: Answer, end: int) -> None:
        """Every position that an answer attends to holds exactly its own text."""
        held = [place for block in answer.blocks for place in self.memory[block]]
        assert held[:end] == self.number(answer)[:end]

    def find(self, answer: Answer, position: int) -> tuple[int, int]:
        place = position % self.blocks.block_size
        return answer.blocks[position // self.blocks.block_size], place

    def check_limits(self, step: Step, before: dict[Answer, int]) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        assert 0 < step.token_count <= config.max_num_batched_tokens or not self.scheduler.has_unfinished
        answers = [s.answer for s in step.scheduled]
        assert len(set(answers)) == len(answers) <= config.max_num_seqs
        # Whoever is being written takes part in every step, unless it lost its blocks.
        for answer in before:
            writing = len(answer.token_ids) - before[answer] == 1
            assert not writing or answer in answers or answer in step.preempted
        # Where nobody was let in for it, nobody comes in who would move the blocks once more.
        rank = {a: scheduler._places[a][0] for a in [*answers, *step.preempted]}
        for answer in set(answers) - before.keys():
            assert all(rank[answer] < rank[other] for other in step.preempted)
        overlooked = self.overlooked(step)
        assert overlooked is None or overlooked is not self.last_overlooked
        self.last_overlooked = overlooked
        assert all(len(s.answer.draft) == s.draft_count for s in step.scheduled)
        for answer, start, count in step.scheduled:
            assert answer.status is Status.RUNNING and start == answer.computed and count > 0
            assert start + count <= self.scheduler.max_length
            whole = start + count >= len(answer.token_ids)
            assert whole or config.enable_chunked_prefill

    def overlooked(self, step: Step) -> Answer | None:
        """Who waits although worse ranked ones hold all that it lacks: for a step at most."""
        scheduler, blocks = self.scheduler, self.blocks
        full = step.token_count == scheduler.config.max_num_batched_tokens
        limited = scheduler.config.max_step_time is not None or not scheduler.config.enable_chunked_prefill
        if not scheduler._waiting or step.preempted or full or limited:
            return None
        first = scheduler._waiting[0]
        rank = scheduler._places[first][0]
        better = [a for a in scheduler._running if scheduler._places[a][0] <= rank]
        seats = [a.params.n - len(a.request.answers) + 1 for a in (*better, first)]
        needed = -(-len(first.token_ids) // blocks.block_size) + sum(seats[:-1])
        kept = {block for answer in better for block in answer.blocks}
        fits = sum(seats) <= scheduler.config.max_num_seqs and needed + len(kept) <= blocks.num_blocks
        return first if fits and len(better) < len(scheduler._running) else None

    def check(self) -> None:
        """Every block is free, findable or held by exactly those that have it in their tables."""
        blocks, scheduler = self.blocks, self.scheduler
        self.live = [request for request in self.live if not request.finished]
        answers = [a for r in self.live for a in r.answers]
        held = Counter(block for a in answers for block in a.blocks)
        assert [held[b] for b in range(blocks.num_blocks)] == blocks._references
        idle = list(blocks.cache._idle) if blocks.cache is not None else []
        assert sorted([*blocks._free, *idle, *held]) == list(range(blocks.num_blocks))
        slots = [s for taken in scheduler._tables.swapped.values() for s in taken]
        assert sorted([*blocks._free_slots, *slots]) == list(range(blocks.swap_blocks))
        by_status = {status: [a for a in answers if a.status is status] for status in Status}
        assert set(scheduler._running) == set(by_status[Status.RUNNING])
        assert set(scheduler._waiting) == {*by_status[Status.WAITING], *by_status[Status.SWAPPED]}
        assert set(scheduler._tables.swapped) == set(by_status[Status.SWAPPED])
        assert not scheduler._tables._arriving
        counts = (scheduler.running, scheduler.waiting, scheduler.swapped)
        assert counts == tuple(len(by_status[s]) for s in (Status.RUNNING, Status.WAITING, Status.SWAPPED))
        assert set(scheduler._places) == {a for a in answers if a.status is not Status.FINISHED}
        assert set(scheduler._requests) == {r.request_id for r in self.live}
        seats = sum(a.params.n - len(a.request.answers) + 1 for a in scheduler._running)
        assert seats == scheduler._seats <= scheduler.config.max_num_seqs
        for queue in (scheduler._running, scheduler._waiting):
            assert [*queue] == sorted(queue, key=scheduler._place)
        for answer in answers:
            if answer.status is not Status.RUNNING:
                assert not answer.blocks and not answer.draft
            else:
                assert len(answer.blocks) == -(-len(answer.token_ids) // blocks.block_size) or (
                    answer.computed % blocks.block_size == 0
                )
                self.check_memory(answer, answer.computed)
        if blocks.cache is not None:
            self.check_cache()

    def check_cache(self) -> None:
        """Whoever is found holds exactly the text that it is found by."""
        cache = self.blocks.cache
        assert cache is not None and 0 <= cache.tokens_found <= cache.tokens_asked
        numbers = {0: 0}
        for (content, tokens), block in sorted(cache._blocks.items(), key=lambda kv: cache._contents[kv[1]]):
            assert cache._keys[block] == (content, tokens)
            if content in numbers:  # the block in front may have been given to another text
                number = numbers[content]
                for token, held in zip(tokens, self.memory[block], strict=True):
                    number = self.texts[number, token]
                    assert held == number
                numbers[cache._contents[block]] = number

    def check_end(self) -> None:
        """Everything is let go, and every answer is what it is alone."""
        assert not self.scheduler.has_unfinished and not self.scheduler._places
        assert self.blocks.free == self.blocks.num_blocks
        assert self.blocks.free_slots == self.blocks.swap_blocks
        for request in self.requests:
            assert request.finished
            for answer in request.answers:
                assert answer.token_ids[: answer.prompt_length] == request.prompt_token_ids
                for length in range(answer.prompt_length, len(answer.token_ids)):
                    text = answer.token_ids[:length]
                    assert answer.token_ids[length] == next_token(text, answer.index)


def simulation(
    num_blocks: int = 64, *, block_size: int = 4, swap_blocks: int = 0, caching: bool = True, **limits: object
) -> Simulation:
    config = SchedulerConfig(**{"max_model_len": 64, **limits})  # type: ignore[arg-type]
    return Simulation(config, BlockManager(num_blocks, block_size, swap_blocks, caching))


def counts(step: Step) -> list[tuple[str, int, int]]:
    return [(s.answer.request.request_id, s.start, s.count) for s in step.scheduled]
