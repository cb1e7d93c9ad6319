"""A simulated engine: it executes scheduler steps on a memory that records the context of every position."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from torch_armllm.engine.request import Request, Sequence, Status
from torch_armllm.engine.sampling_params import SamplingParams
from torch_armllm.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from torch_armllm.engine.scheduling.step import Step
from torch_armllm.kv_cache.block_manager import BlockManager

VOCABULARY = 3


def next_token(text: list[int], index: int) -> int:
    """Simulates the model: returns the token sampled after a context, for output ``index``."""
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
    """A scheduler with a simulated KV cache, stepped as the engine does; checks invariants in every step."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self.blocks = blocks
        self.scheduler = Scheduler(config, blocks)
        self.memory: list[list[int]] = [[-1] * blocks.block_size for _ in range(blocks.num_blocks)]
        self.swap: list[list[int]] = [[-1] * blocks.block_size for _ in range(blocks.swap_blocks)]
        self.states = [-1] * (0 if blocks.states is None else len(blocks.states))
        self.swapped_states = [-1] * len(blocks.swapped_states)
        self.texts: dict[tuple[int, int], int] = {}
        self.known: dict[Sequence, list[int]] = {}
        self.requests: list[Request] = []
        self.live: list[Request] = []
        self.steps: list[Step] = []
        self.last_admissible: Sequence | None = None
        self.stages = config.pipeline_stages
        self.under_way: deque[Step] = deque()

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests.append(request)
        self.live.append(request)
        return request

    def step(
        self,
        draft: Callable[[Sequence], list[int]] = lambda sequence: [],
        abort: str | None = None,
    ) -> Step:
        """Runs a step; ``abort`` names a request that is aborted while the step is computed.

        In a pipeline it begins a step, if any can begin, and ends the oldest one if the pipeline is full.
        """
        self.check()
        before = {a: a.computed for r in self.live for a in r.sequences if a.status is Status.RUNNING}
        step = self.scheduler.schedule()
        self.steps.append(step)
        self.check_limits(step, before)
        self.execute(step)
        if self.stages == 1:
            if abort is not None:
                self.scheduler.abort(abort)
            self.end(step, draft)
            return step
        if step.scheduled:
            self.scheduler.begin(step)
            self.under_way.append(step)
        if len(self.under_way) == self.stages or (self.under_way and not step.scheduled):
            self.end(self.under_way.popleft(), draft)
        if abort is not None:
            self.drain()
            self.scheduler.abort(abort)
        self.check()
        return step

    def drain(self) -> None:
        """Ends all steps that are under way."""
        while self.under_way:
            self.end(self.under_way.popleft(), lambda sequence: [])

    def end(self, step: Step, draft: Callable[[Sequence], list[int]]) -> None:
        """Samples tokens of a step, and completes it."""
        sampled: dict[Sequence, list[int]] = {}
        for scheduled in step.scheduled:
            sequence = scheduled.sequence
            if not scheduled.samples or sequence.status is not Status.RUNNING:
                continue
            sampled[sequence] = self.draw(sequence, scheduled.num_draft)
            if len(sequence.request.sequences) < sequence.params.n:
                for sibling in self.scheduler.fork(sequence):
                    sampled[sibling] = self.draw(sibling, 0)
        self.scheduler.complete(step, sampled)
        self.scheduler.record_time(step, (7 * len(self.steps)) % 11 / 10)
        for sequence in sampled:
            max_tokens = sequence.params.max_tokens
            assert max_tokens is not None
            if sequence.output_length >= max_tokens or len(sequence.token_ids) >= self.scheduler.max_length:
                self.scheduler.finish(sequence, "length")
            else:
                sequence.draft = draft(sequence)
        self.check()

    def draw(self, sequence: Sequence, drafted: int) -> list[int]:
        """Returns the accepted draft tokens and one further token."""
        known, sampled = list(sequence.token_ids), []
        for draft_token in [*sequence.draft[:drafted], None]:
            token = next_token(known, sequence.index)
            known.append(token)
            sampled.append(token)
            if token != draft_token:
                break
        max_tokens = sequence.params.max_tokens
        assert max_tokens is not None
        return sampled[: max_tokens - sequence.output_length]

    def run(self, steps: int = 1000) -> None:
        while self.scheduler.has_unfinished:
            assert steps, "the run does not end"
            steps -= 1
            self.step()

    def execute(self, step: Step) -> None:
        memory, swap = self.memory, self.swap
        for block, slot in step.swaps_out:
            swap[slot] = list(memory[block])
        for slot, block in step.swaps_in:
            memory[block] = list(swap[slot])
        # Copying blocks in order or all in parallel must have the same result.
        parallel = [(to, list(memory[block])) for block, to in step.copies]
        for block, to in step.copies:
            memory[to] = list(memory[block])
        for to, stored in parallel:
            assert memory[to] == stored
        for sequence, start, count in step.scheduled:
            numbers = self.number(sequence)
            for position in range(start, start + count):
                block, place = self.find(sequence, position)
                assert not self.blocks.is_shared(block) and not self.is_cached(block)
                memory[block][place] = numbers[position]
        for scheduled in step.scheduled:
            self.check_memory(scheduled.sequence, scheduled.end)
        if self.blocks.states is not None:
            self.execute_states(step)

    def execute_states(self, step: Step) -> None:
        """Moves states, and replaces the state of each prefix by that of the longer prefix."""
        states, swapped = self.states, self.swapped_states
        for kind, source, target in step.state_moves:
            targets = swapped if kind == "swap_out" else states
            targets[target] = (swapped if kind == "swap_in" else states)[source]
        written: list[int] = []
        for sequence, start, count in step.scheduled:
            numbers = self.number(sequence)
            assert sequence.state is not None
            assert not start or states[sequence.state] == numbers[start - 1]
            saves = {n: slot for n, slot in sequence.saves.items() if start < n <= start + count}
            assert step.saves_states or not saves
            written += [sequence.state, *saves.values()]
            for length, slot in saves.items():
                states[slot] = numbers[length - 1]
            states[sequence.state] = numbers[start + count - 1]
        assert len(written) == len(set(written))

    def is_cached(self, block: int) -> bool:
        return self.blocks.prefix_cache is not None and self.blocks.prefix_cache._keys[block] is not None

    def number(self, sequence: Sequence) -> list[int]:
        """Returns a number for the prefix at each position of a sequence and its draft tokens."""
        known = self.known.setdefault(sequence, [])
        del known[sequence.computed :]  # rejected draft tokens
        text = sequence.token_ids + sequence.draft
        for token in text[len(known) :]:
            link = (known[-1] if known else 0, token)
            known.append(self.texts.setdefault(link, len(self.texts) + 1))
        return known

    def check_memory(self, sequence: Sequence, end: int) -> None:
        """Checks that every position a sequence attends to holds exactly its own context."""
        stored = [place for block in sequence.blocks for place in self.memory[block]]
        assert stored[:end] == self.number(sequence)[:end]

    def find(self, sequence: Sequence, position: int) -> tuple[int, int]:
        place = position % self.blocks.block_size
        return sequence.blocks[position // self.blocks.block_size], place

    def check_limits(self, step: Step, before: dict[Sequence, int]) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        idle = not self.scheduler.has_unfinished or self.under_way
        assert 0 < step.token_count <= config.max_num_batched_tokens or idle
        sequences = [s.sequence for s in step.scheduled]
        assert len(set(sequences)) == len(sequences) <= config.max_num_seqs
        # a decoding sequence is part of every step, unless it was preempted
        for sequence in before:
            writing = len(sequence.token_ids) - before[sequence] == 1
            decoded = sequence in sequences or sequence in step.preempted
            assert not writing or decoded or self.stages > 1
        # a step that preempts admits only sequences of higher priority than all preempted ones: no thrashing
        rank = {a: scheduler._keys[a][0] for a in [*sequences, *step.preempted]}
        for sequence in set(sequences) - before.keys():
            assert all(rank[sequence] < rank[other] for other in step.preempted)
        for sequence in sequences:
            others = (s.sequence for each in self.under_way for s in each.scheduled if s.samples)
            assert sequence not in others
        admissible = self.admissible(step) if self.stages == 1 else None
        assert admissible is None or admissible is not self.last_admissible
        self.last_admissible = admissible
        assert all(len(s.sequence.draft) == s.num_draft for s in step.scheduled)
        for sequence, start, count in step.scheduled:
            assert sequence.status is Status.RUNNING and start == sequence.computed and count > 0
            assert start + count <= self.scheduler.max_length
            whole = start + count >= len(sequence.token_ids)
            assert whole or config.enable_chunked_prefill

    def admissible(self, step: Step) -> Sequence | None:
        """Returns the first waiting sequence if preempting lower priorities would admit it, else None.

        The scheduler may delay such a sequence by one step at most.
        """
        scheduler, blocks = self.scheduler, self.blocks
        full = step.token_count == scheduler.config.max_num_batched_tokens
        limited = scheduler.config.max_step_time is not None or not scheduler.config.enable_chunked_prefill
        if not scheduler._waiting or step.preempted or full or limited:
            return None
        first = scheduler._waiting[0]
        rank = scheduler._keys[first][0]
        preceding = [a for a in scheduler._running if scheduler._keys[a][0] <= rank]
        slots = [a.params.n - len(a.request.sequences) + 1 for a in (*preceding, first)]
        needed = -(-len(first.token_ids) // blocks.block_size) + sum(slots[:-1])
        blocks_held = {block for sequence in preceding for block in sequence.blocks}
        fits = sum(slots) <= scheduler.config.max_num_seqs and needed + len(blocks_held) <= blocks.num_blocks
        return first if fits and len(preceding) < len(scheduler._running) else None

    def check(self) -> None:
        """Checks that every block is free, cached, or referenced by exactly the tables that contain it."""
        blocks, scheduler = self.blocks, self.scheduler
        self.live = [request for request in self.live if not request.finished]
        sequences = [a for r in self.live for a in r.sequences]
        references = Counter(block for a in sequences for block in a.blocks)
        assert [references[b] for b in range(blocks.num_blocks)] == blocks._references
        idle = list(blocks.prefix_cache._idle) if blocks.prefix_cache is not None else []
        assert sorted([*blocks._free, *idle, *references]) == list(range(blocks.num_blocks))
        swap_slots = [s for swapped_blocks in scheduler._tables.swapped.values() for s in swapped_blocks]
        assert sorted([*blocks.swap._free, *swap_slots]) == list(range(blocks.swap_blocks))
        by_status = {status: [a for a in sequences if a.status is status] for status in Status}
        assert set(scheduler._running) == set(by_status[Status.RUNNING])
        assert set(scheduler._waiting) == {*by_status[Status.WAITING], *by_status[Status.SWAPPED]}
        assert set(scheduler._tables.swapped) == set(by_status[Status.SWAPPED])
        assert scheduler._tables._arriving.keys() <= scheduler._under_way
        counts = (scheduler.running, scheduler.waiting, scheduler.swapped)
        assert counts == tuple(len(by_status[s]) for s in (Status.RUNNING, Status.WAITING, Status.SWAPPED))
        assert set(scheduler._keys) == {a for a in sequences if a.status is not Status.FINISHED}
        assert set(scheduler._requests) == {r.request_id for r in self.live}
        slots_in_use = sum(a.params.n - len(a.request.sequences) + 1 for a in scheduler._running)
        assert slots_in_use == scheduler._slots <= scheduler.config.max_num_seqs
        for queue in (scheduler._running, scheduler._waiting):
            assert [*queue] == sorted(queue, key=scheduler._key)
        for sequence in sequences:
            if sequence.status is not Status.RUNNING:
                assert not sequence.blocks and not sequence.draft
            else:
                text = sequence.token_ids + sequence.draft * (sequence in scheduler._under_way)
                assert len(sequence.blocks) == -(-len(text) // blocks.block_size) or (
                    sequence.computed % blocks.block_size == 0
                )
                self.check_memory(sequence, sequence.computed)
        if blocks.prefix_cache is not None:
            self.check_cache()
        if blocks.states is not None:
            self.check_slots(sequences)

    def check_slots(self, sequences: list[Sequence]) -> None:
        """Checks that every state slot is free, a checkpoint, saved, or that of one sequence."""
        slots = self.blocks.states
        assert slots is not None
        own = [a.state for a in sequences if a.state is not None and a.status is Status.RUNNING]
        assert len(own) == self.scheduler.running
        saved = [slot for a in sequences for slot in a.saves.values()]
        assert len(saved) == slots.saved <= slots.spare
        checkpoints = list(slots._checkpoints.values())
        assert sorted([*own, *saved, *checkpoints, *slots._free]) == list(range(len(slots)))
        assert all(slots._references[slot] == 1 for slot in (*own, *saved))
        swapped = [a.state for a in sequences if a.status is Status.SWAPPED]
        every = sorted([slot for slot in (*swapped, *self.blocks.swapped_states._free) if slot is not None])
        assert every == list(range(len(self.blocks.swapped_states)))
        assert all(a.state is None for a in sequences if a.status is Status.WAITING)
        tables = self.scheduler._tables.states
        assert tables is not None
        assert {*tables._planned, *tables._rolling} <= {*self.scheduler._running, *self.scheduler._waiting}

    def check_cache(self) -> None:
        """Checks that every cached block holds exactly the tokens of its key."""
        cache = self.blocks.prefix_cache
        assert cache is not None and 0 <= cache.tokens_hit <= cache.tokens_queried
        numbers = {0: 0}
        for (content, tokens), block in sorted(cache._blocks.items(), key=lambda kv: cache._contents[kv[1]]):
            assert cache._keys[block] == (content, tokens)
            if content in numbers:  # the block before it may have been evicted and reused
                number = numbers[content]
                for token, stored in zip(tokens, self.memory[block], strict=True):
                    number = self.texts[number, token]
                    assert stored == number
                numbers[cache._contents[block]] = number
        if self.blocks.states is not None:
            checkpoints = self.blocks.states._checkpoints
            assert checkpoints.keys() <= {cache._contents[block] for block in cache._blocks.values()}
            for content, slot in checkpoints.items():
                assert content not in numbers or self.states[slot] == numbers[content]

    def check_end(self) -> None:
        """Checks that all blocks are free and every output equals that of a sequence that runs alone."""
        assert not self.scheduler.has_unfinished and not self.scheduler._keys
        assert self.blocks.free == self.blocks.num_blocks
        assert self.blocks.swap.free == self.blocks.swap_blocks
        if self.blocks.states is not None:
            assert self.blocks.states.free == len(self.blocks.states)
            assert self.blocks.swapped_states.free == len(self.blocks.swapped_states)
        for request in self.requests:
            assert request.finished
            for sequence in request.sequences:
                assert sequence.token_ids[: sequence.prompt_length] == request.prompt_token_ids
                for length in range(sequence.prompt_length, len(sequence.token_ids)):
                    text = sequence.token_ids[:length]
                    assert sequence.token_ids[length] == next_token(text, sequence.index)


def simulation(
    num_blocks: int = 64, *, block_size: int = 4, swap_blocks: int = 0, caching: bool = True, **limits: object
) -> Simulation:
    config = SchedulerConfig(**{"max_model_len": 64, **limits})  # type: ignore[arg-type]
    return Simulation(config, BlockManager(num_blocks, block_size, swap_blocks, caching))


def counts(step: Step) -> list[tuple[str, int, int]]:
    return [(s.sequence.request.request_id, s.start, s.count) for s in step.scheduled]
