"""The prefix cache on disk: the same bits after a restart, whatever happens to its files."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_armllm
from tests.engine import test_recurrent_models as recurrent
from tests.support.engines import drain, engine_with_blocks, make_engine, submit
from tests.support.exact_outputs import GREEDY, exact_outputs, prompt, small_engine
from tests.support.models import tiny
from torch_armllm import LLM, SamplingParams
from torch_armllm.engine.config import EngineConfig
from torch_armllm.engine.llm_engine import LLMEngine
from torch_armllm.kv_cache.disk import counter, reader, writer
from torch_armllm.kv_cache.disk.disk_cache import DiskCounts, DiskPrefixCache
from torch_armllm.server.metrics import ServerMetrics

TEXT = prompt(150, 1)
LONGER = TEXT + prompt(40, 2)
FULL = 128
"""Tokens of the blocks that a request for `TEXT` may find."""

MakeEngine = Callable[..., LLMEngine]


@functools.cache
def expected(tokens: int = len(TEXT)) -> Any:
    return exact_outputs(make_engine(), [LONGER[:tokens]])


def disk_of(engine: LLMEngine) -> DiskPrefixCache:
    assert engine.disk is not None
    return engine.disk


def kept(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def written(folder: Path, make: MakeEngine = make_engine, **settings: Any) -> Any:
    """Computes `TEXT`, and returns its output when the blocks are on the disk."""
    engine = make(prefix_cache_dir=folder, **settings)
    found = exact_outputs(engine, [TEXT])
    assert disk_of(engine).flush()
    return found


def counts_of(engine: LLMEngine) -> DiskCounts:
    return disk_of(engine).counts()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_restart_finds_the_blocks_and_keeps_the_bits(tmp_path: Path) -> None:
    assert written(tmp_path) == expected()
    restarted = make_engine(prefix_cache_dir=tmp_path)
    assert exact_outputs(restarted, [TEXT]) == expected()
    assert counts_of(restarted).hits == FULL
    assert exact_outputs(restarted, [LONGER]) == expected(len(LONGER))
    assert counts_of(restarted).hits == FULL, "what is in memory is not read again"
    assert disk_of(restarted).flush() and counts_of(restarted).bytes_written > 0, (
        "only what is new is written"
    )


@functools.cache
def int8_model() -> Any:
    model = tiny("llama", torch.bfloat16)
    torch_armllm.patch(model, progress=False, kv_cache_dtype="int8")
    return model


@pytest.mark.parametrize("family", ["kimi_linear, int8 latents", "mamba2", "int8 keys and values"])
def test_states_latents_and_scales_keep_their_bits(family: str, tmp_path: Path) -> None:
    if family == "int8 keys and values":
        make: MakeEngine = functools.partial(small_engine, int8_model())
    else:
        make = functools.partial(recurrent.engine, family)
    first = written(tmp_path, make)
    assert first == exact_outputs(make(enable_prefix_caching=False), [TEXT])
    ((answer, _),) = first[0]
    chat = [TEXT, TEXT + answer + [5, 6], TEXT[:100] + prompt(9, 3)]
    restarted = make(prefix_cache_dir=tmp_path)
    assert exact_outputs(restarted, chat) == exact_outputs(make(enable_prefix_caching=False), chat)
    assert counts_of(restarted).hits >= FULL


def _cut(data: bytes) -> bytes:
    return data[:-100]


def _empty(data: bytes) -> bytes:
    return b""


def _flip(place: int, data: bytes) -> bytes:
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        _cut,
        functools.partial(_flip, -1),
        functools.partial(_flip, 5000),
        functools.partial(_flip, 30),
        _empty,
    ],
    ids=["truncated", "last byte", "payload", "header", "empty"],
)
def test_damaged_file_is_ignored_named_and_removed(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path)
    data = {path: path.read_bytes() for path in kept(tmp_path)}
    for path, each in data.items():
        path.write_bytes(damage(each))
    engine = make_engine(prefix_cache_dir=tmp_path)
    assert exact_outputs(engine, [TEXT]) == expected()
    assert disk_of(engine).flush() and counts_of(engine).hits == 0
    messages = " ".join(warnings_of(caplog))
    named = {path for path in data if str(path) in messages}
    assert named and named == {path for path, each in data.items() if path.read_bytes() == each}


def test_files_may_vanish_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    victim = kept(tmp_path)
    read = reader.read_record

    def remove_first(path: Path, *arguments: Any) -> None:
        victim[2].unlink(missing_ok=True)
        read(path, *arguments)

    monkeypatch.setattr(reader, "read_record", remove_first)
    engine = make_engine(prefix_cache_dir=tmp_path)
    assert exact_outputs(engine, [TEXT]) == expected()


def test_other_model_finds_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    other = tiny("llama", torch.float32, seed=1)
    torch_armllm.patch(other, progress=False)
    engine = small_engine(other, prefix_cache_dir=tmp_path)
    assert exact_outputs(engine, [TEXT]) == exact_outputs(small_engine(other), [TEXT])
    assert counts_of(engine).hits == 0
    assert disk_of(engine).flush() and len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_any_weight_that_changed_makes_another_model(tmp_path: Path) -> None:
    model = tiny("llama", torch.float32)
    torch_armllm.patch(model, progress=False)
    before = disk_of(small_engine(model, prefix_cache_dir=tmp_path)).folder.fingerprint
    plan: Any = small_engine(model).runner.plan  # type: ignore[attr-defined]
    largest = max(plan.program.constants, key=lambda constant: constant.nbytes)
    assert largest.nbytes > 20_000 and largest.is_contiguous()
    largest.view(-1).view(torch.uint8)[1000] ^= 1  # between the bytes that are read one by one
    assert disk_of(small_engine(model, prefix_cache_dir=tmp_path)).folder.fingerprint != before


def test_engines_share_a_folder(tmp_path: Path) -> None:
    block = 17 << 10
    engines = [make_engine(prefix_cache_dir=tmp_path, prefix_cache_size=size * block) for size in (9, 6)]
    texts = [TEXT, prompt(100, 7), prompt(130, 8), TEXT]
    alone = [exact_outputs(make_engine(), [text]) for text in texts]
    for _ in range(2):
        for text, output in zip(texts, alone, strict=True):
            assert all(exact_outputs(engine, [text]) == output for engine in engines)
    assert all(disk_of(engine).flush() for engine in engines)
    size = sum(path.stat().st_size for path in kept(tmp_path))
    assert 0 < size <= 9 * block and counts_of(engines[0]).nbytes == size
    smaller = make_engine(prefix_cache_dir=tmp_path, prefix_cache_size=3 * block)
    assert sum(path.stat().st_size for path in kept(tmp_path)) == counts_of(smaller).nbytes <= 3 * block


def test_files_used_last_stay(tmp_path: Path) -> None:
    engine = make_engine(prefix_cache_dir=tmp_path, prefix_cache_size=10 * (17 << 10))
    others = [prompt(70, seed) for seed in range(20, 26)]
    exact_outputs(engine, [TEXT])
    for text in others:
        exact_outputs(engine, [text])
        exact_outputs(engine, [TEXT])  # found in memory, which counts as a use of the files
        assert disk_of(engine).flush()
    assert counts_of(engine).nbytes <= 10 * (17 << 10)
    restarted = make_engine(prefix_cache_dir=tmp_path)
    assert exact_outputs(restarted, [TEXT]) == expected() and counts_of(restarted).hits == FULL
    exact_outputs(restarted, [others[0]])
    assert counts_of(restarted).hits == FULL


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"prefix_cache_dir = .*file/cache.* cannot be written: .* Name a folder"
    ):
        make_engine(prefix_cache_dir=tmp_path / "file" / "cache")


def test_full_disk_is_said_once_and_files_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer, "write_record", full)
    engine = make_engine(prefix_cache_dir=tmp_path)
    for seed in range(3):
        exact_outputs(engine, [prompt(70, seed)])
        assert disk_of(engine).flush()
    assert exact_outputs(engine, [TEXT]) == expected() and counts_of(engine).hits == FULL
    (message,) = (text for text in warnings_of(caplog) if "prefix cache" in text)
    assert "No space left on device" in message and str(tmp_path) in message


def test_disk_that_has_room_again_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_armllm")
    write, full = writer.write_record, [True]

    def write_if_room(*arguments: Any) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(writer, "write_record", write_if_room)
    monkeypatch.setattr(writer, "_RETRY", 0.0)
    engine = make_engine(prefix_cache_dir=tmp_path)
    for seed in range(2):
        exact_outputs(engine, [prompt(70, seed)])
        assert disk_of(engine).flush()
    assert not kept(tmp_path) and len([text for text in warnings_of(caplog) if "No space" in text]) == 1
    full[0] = False
    exact_outputs(engine, [TEXT])
    assert disk_of(engine).flush() and kept(tmp_path)
    assert f"the prefix cache writes to {tmp_path} again" in caplog.text
    monkeypatch.setattr(writer, "_RETRY", 3600.0)
    full[0] = True
    exact_outputs(engine, [prompt(70, 5)])
    assert disk_of(engine).flush()
    full[0] = False
    exact_outputs(engine, [prompt(70, 6)])
    assert disk_of(engine).flush() and counts_of(engine).bytes_written, "sequences in between are not kept"


def test_folder_that_is_only_readable_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(counter, "open_own", refuse)
    monkeypatch.setattr("torch_armllm.kv_cache.disk.folder.os.utime", refuse)
    engine = make_engine(prefix_cache_dir=tmp_path)
    assert exact_outputs(engine, [TEXT]) == expected() and counts_of(engine).hits == FULL
    (message,) = (text for text in warnings_of(caplog) if "prefix_cache_dir" in text)
    assert "is only read" in message and "Read-only file system" in message


def test_block_that_was_overwritten_is_not_written(tmp_path: Path) -> None:
    engine = engine_with_blocks("llama", 8, prefix_cache_dir=tmp_path)
    disk, manager = disk_of(engine), engine.scheduler.blocks
    take = disk.blocks.take

    def overwrite(block: int) -> Any:
        manager.deallocate(manager.allocate(manager.free))
        return take(block)

    disk.blocks.take = overwrite  # type: ignore[method-assign]
    exact_outputs(engine, [TEXT])
    assert disk.flush() and disk.counts().dropped == 5 and not kept(tmp_path)


def test_prompts_are_read_beside_running_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_armllm.engine.disk.arrivals._STEP_BYTES", 1)
    written(tmp_path)
    texts = [prompt(60, 3), TEXT, TEXT[:70], LONGER]
    alone = [exact_outputs(make_engine(), [text])[0] for text in texts]
    for blocks in (64, 9):
        engine = engine_with_blocks("llama", blocks, prefix_cache_dir=tmp_path / str(blocks))
        exact_outputs(engine, [TEXT])
        assert disk_of(engine).flush()
        engine = engine_with_blocks("llama", blocks, prefix_cache_dir=tmp_path / str(blocks))
        assert exact_outputs(engine, texts) == alone


def test_request_that_waits_for_the_disk_can_be_aborted(tmp_path: Path) -> None:
    written(tmp_path)
    engine = make_engine(prefix_cache_dir=tmp_path)
    submit(engine, [TEXT, TEXT], GREEDY)
    assert engine.stats.gauges().waiting == 2
    (output,) = engine.abort_request("0")
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert len(drain(engine)) == 1 and not engine.has_unfinished_requests()
    submit(engine, [TEXT], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    (scored,) = drain(engine)
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == len(TEXT)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"enable_prefix_caching": False}, "needs enable_prefix_caching"),
        ({"prefix_cache_size": 1000}, "prefix_cache_size = .* is too small"),
    ],
)
def test_settings_that_exclude_it_are_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=reason):
        make_engine(prefix_cache_dir=tmp_path, **settings)
    with pytest.raises(TypeError, match="prefix_cache_dir = 3: give the path"):
        EngineConfig(prefix_cache_dir=3)  # type: ignore[arg-type]


def test_draft_layers_are_refused(tmp_path: Path) -> None:
    from torch_armllm.engine.disk.build import build_disk_cache

    config = EngineConfig(prefix_cache_dir=tmp_path, speculative_config={"method": "mtp"})
    engine = make_engine()
    with pytest.raises(ValueError, match="what MTP and EAGLE-3 layers keep"):
        build_disk_cache("Model", config, engine.runner, engine.scheduler.blocks)


def llm_of(model: Any) -> LLM:
    return LLM(model, skip_tokenizer_init=True, progress=False, kv_cache_memory=4 << 20, max_num_seqs=8)


@pytest.mark.parametrize("family", ["int8 keys and values", "mamba2"])
def test_session_goes_on_in_another_engine(family: str, tmp_path: Path) -> None:
    model = int8_model() if family == "int8 keys and values" else recurrent.model(family)
    path, params = tmp_path / "session", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first = llm_of(model)
    (output,) = first.generate([TEXT], params, use_tqdm=False)
    chat = [*TEXT, *output.outputs[0].token_ids]
    first.save_session(path, chat)
    second = llm_of(model)
    assert second.load_session(path) == chat
    (found,) = second.generate([[*chat, 7]], params, use_tqdm=False)
    (same,) = llm_of(model).generate([[*chat, 7]], params, use_tqdm=False)
    assert found.outputs[0].token_ids == same.outputs[0].token_ids
    assert found.num_cached_tokens == FULL
    blocks = second.llm_engine.scheduler.blocks
    assert blocks.free == blocks.num_blocks

    other = llm_of(recurrent.model("mamba2") if family != "mamba2" else int8_model())
    with pytest.raises(ValueError, match="is a session of another model"):
        other.load_session(path)
    data = path.read_bytes()
    for damaged in (data[:-1], _flip(-1, data), _flip(len(data) // 2, data), _flip(70, data), b"", b"x" * 50):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"is damaged|another model"):
            second.load_session(path)
    assert blocks.free == blocks.num_blocks


def test_metrics_have_the_counts(tmp_path: Path) -> None:
    written(tmp_path)
    engine = make_engine(prefix_cache_dir=tmp_path)
    exact_outputs(engine, [TEXT])
    metrics = ServerMetrics()
    metrics.for_model("tiny", lambda: [engine.stats])
    page = metrics.render().decode()
    values = {"hits_total": FULL, "misses_total": 149 - FULL, "bytes": counts_of(engine).nbytes}
    for name, number in values.items():
        assert f'armllm:prefix_cache_disk_{name}{{engine="0",model_name="tiny"}} {float(number)}' in page
