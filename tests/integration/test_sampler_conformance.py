"""What every sampler owes its actor, asked of each of them in the same words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.actors.sampler import Sampler, SamplingParams
from rollstream.actors.scripted_sampler import ScriptedSampler
from rollstream.buffer.weights import WeightsReader, WeightsWriter
from rollstream.errors import ConfigError, RollstreamError, WeightsError

CONTEXT = 400
VOCABULARY = 50
STOPS = frozenset({1, 2})

Tensors = list[tuple[str, str, tuple[int, ...], memoryview]]


@dataclass
class Bench:
    """A sampler and a learner's end of the weights channel."""

    sampler: Sampler
    writer: WeightsWriter
    reader: WeightsReader
    tensors: Callable[[int], Tensors]

    async def push(self, version: int, *, lineage: int = 0, damage: bool = False) -> None:
        manifest = self.writer.write(lineage, version, self.tensors(version))
        assert manifest is not None
        with self.reader.open(manifest) as view:
            if damage:
                view = memoryview(bytes([view[0] ^ 1]) + bytes(view[1:]))
            await self.sampler.load(manifest, view)


def scripted() -> tuple[Sampler, Callable[[int], Tensors]]:
    def tensors(version: int) -> Tensors:
        return [("weight", "float32", (4,), memoryview(np.full(4, version, np.float32)))]

    return ScriptedSampler(vocab_size=VOCABULARY, mean_tokens=8, token_delay_s=0.001, max_tokens=CONTEXT), tensors


def embedded() -> tuple[Sampler, Callable[[int], Tensors]]:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rollstream.actors.torch_sampler import TorchSampler

    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def tensors(version: int) -> Tensors:
        return [(name, "float32", tuple(tensor.shape), memoryview((tensor * (1 + version / 10)).numpy()).cast("B")) for name, tensor in start.items()]

    return TorchSampler(model, max_batch=4), tensors


SAMPLERS: dict[str, Callable[[], Any]] = {"scripted": scripted, "torch": embedded}


@pytest.fixture(params=list(SAMPLERS))
async def bench(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Bench]:
    sampler, tensors = SAMPLERS[request.param]()
    writer, reader = WeightsWriter(tmp_path / "weights", num_readers=1), WeightsReader(tmp_path / "weights")
    yield Bench(sampler, writer, reader, tensors)
    await sampler.close()
    reader.close()
    writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def ask(
    sampler: Sampler, *, max_tokens: int = 12, seed: int = 0, session: str = "s", stop_ids: frozenset[int] = frozenset(), prompt: int = 5
) -> Awaitable[Any]:
    return sampler.generate(list(range(3, 3 + prompt)), SamplingParams(max_tokens=max_tokens, seed=seed, stop_ids=stop_ids), session=session)


async def test_a_sampler_without_weights_generates_nothing(bench: Bench) -> None:
    assert bench.sampler.held is None
    with pytest.raises(WeightsError, match="no weights yet"):
        await ask(bench.sampler)


async def test_tokens_log_probabilities_and_versions_have_one_length(bench: Bench) -> None:
    await bench.push(3)
    completion = await ask(bench.sampler, max_tokens=9)
    assert [len(completion.token_ids), len(completion.logprobs), len(completion.versions)] == [9, 9, 9]
    assert (completion.token_ids.dtype, completion.logprobs.dtype, completion.versions.dtype) == (np.int32, np.float32, np.int32)
    assert completion.stop_reason == "length"
    assert set(completion.versions) == {3}
    assert np.isfinite(completion.logprobs).all()
    assert (completion.logprobs <= 0).all()
    assert ((completion.token_ids >= 0) & (completion.token_ids < VOCABULARY)).all()


async def test_a_stop_token_ends_the_completion_and_is_its_last_token(bench: Bench) -> None:
    await bench.push(0)
    completions = [await ask(bench.sampler, max_tokens=300, seed=seed, stop_ids=STOPS, session=f"s{seed}") for seed in range(4)]
    for completion in completions:
        assert completion.stop_reason == "stop"
        assert completion.token_ids[-1] in STOPS
        assert not set(completion.token_ids[:-1]) & STOPS


async def test_equal_seeds_draw_equal_tokens_whatever_else_is_running(bench: Bench) -> None:
    await bench.push(0)
    alone = await ask(bench.sampler, seed=7, max_tokens=20)
    others = [ask(bench.sampler, seed=seed, max_tokens=5 + 7 * seed, prompt=2 + 3 * seed, session=f"other{seed}") for seed in range(6)]
    among, *_ = await asyncio.gather(ask(bench.sampler, seed=7, max_tokens=20, session="again"), *others)
    different = await ask(bench.sampler, seed=8, max_tokens=20, session="third")
    np.testing.assert_array_equal(among.token_ids, alone.token_ids)
    np.testing.assert_allclose(among.logprobs, alone.logprobs, atol=1e-5)
    assert different.token_ids.tolist() != alone.token_ids.tolist()


async def test_new_weights_reach_a_running_completion_between_two_tokens(bench: Bench) -> None:
    await bench.push(1)
    running = asyncio.ensure_future(ask(bench.sampler, max_tokens=300))
    before = bench.sampler.counters["tokens"]
    await until(lambda: bench.sampler.counters["tokens"] > before + 5)
    await bench.push(2)
    assert bench.sampler.held == (0, 2)
    completion = await running
    assert len(completion.token_ids) == 300
    assert set(completion.versions) == {1, 2}
    assert (np.diff(completion.versions) >= 0).all()


async def test_a_version_of_a_later_lineage_is_held_as_such(bench: Bench) -> None:
    await bench.push(5)
    await bench.push(2, lineage=1)
    assert bench.sampler.held == (1, 2)


async def test_weights_that_do_not_match_their_manifest_silence_the_sampler(bench: Bench) -> None:
    await bench.push(1)
    running = asyncio.ensure_future(ask(bench.sampler, max_tokens=300))
    await until(lambda: bench.sampler.running == 1)
    with pytest.raises(WeightsError, match="nothing is sampled"):
        await bench.push(2, damage=True)
    assert bench.sampler.held is None
    with pytest.raises(WeightsError, match="nothing is sampled"):
        await running
    with pytest.raises(WeightsError, match="nothing is sampled"):
        await ask(bench.sampler, session="later")


async def test_an_aborted_completion_returns_what_it_has(bench: Bench) -> None:
    await bench.push(0)
    whole = await ask(bench.sampler, max_tokens=300, session="whole")
    before = bench.sampler.counters["tokens"]
    running = asyncio.ensure_future(ask(bench.sampler, max_tokens=300, session="cut"))
    await until(lambda: bench.sampler.counters["tokens"] > before + 5)
    await bench.sampler.abort("cut")
    completion = await running
    assert completion.stop_reason == "abort"
    assert 0 < len(completion.token_ids) < 300
    np.testing.assert_array_equal(completion.token_ids, whole.token_ids[: len(completion.token_ids)])
    await bench.sampler.abort("cut")
    await bench.sampler.abort("never seen")


async def test_a_cancelled_caller_leaves_the_session_usable(bench: Bench) -> None:
    await bench.push(0)
    running = asyncio.ensure_future(ask(bench.sampler, max_tokens=300))
    await until(lambda: bench.sampler.running == 1)
    await asyncio.sleep(0.005)
    running.cancel()
    await asyncio.wait([running])
    assert bench.sampler.running == 0
    assert len((await ask(bench.sampler, max_tokens=4)).token_ids) == 4


async def test_a_session_has_one_completion_at_a_time(bench: Bench) -> None:
    await bench.push(0)
    first = asyncio.ensure_future(ask(bench.sampler, max_tokens=50))
    await until(lambda: bench.sampler.running == 1)
    with pytest.raises(ConfigError, match="one completion at a time"):
        await ask(bench.sampler)
    assert len((await first).token_ids) == 50


async def test_a_completion_that_cannot_fit_is_refused_and_one_that_just_fits_is_not(bench: Bench) -> None:
    await bench.push(0)
    assert bench.sampler.max_context == CONTEXT
    with pytest.raises(ConfigError, match="exceed the context of 400"):
        await ask(bench.sampler, prompt=5, max_tokens=CONTEXT - 4)
    assert len((await ask(bench.sampler, prompt=5, max_tokens=CONTEXT - 5)).token_ids) == CONTEXT - 5


async def test_an_empty_prompt_is_refused(bench: Bench) -> None:
    await bench.push(0)
    with pytest.raises(ConfigError, match="empty"):
        await ask(bench.sampler, prompt=0)


async def test_a_released_session_starts_from_nothing(bench: Bench) -> None:
    await bench.push(0)
    first = await ask(bench.sampler, seed=1)
    await bench.sampler.release("s")
    await bench.sampler.release("never seen")
    np.testing.assert_array_equal((await ask(bench.sampler, seed=1)).token_ids, first.token_ids)


async def test_every_token_but_the_first_has_a_score(bench: Bench) -> None:
    await bench.push(0)
    scores = await bench.sampler.score([4, 5, 6, 7])
    assert scores[0] == 0
    assert all(score < 0 for score in scores[1:])
    assert len(scores) == 4
    assert await bench.sampler.score([]) == []


async def test_closing_fails_what_runs_and_refuses_what_comes(bench: Bench) -> None:
    await bench.push(0)
    running = asyncio.ensure_future(ask(bench.sampler, max_tokens=300))
    await until(lambda: bench.sampler.running == 1)
    await bench.sampler.close()
    with pytest.raises(RollstreamError, match="closed"):
        await running
    with pytest.raises(RollstreamError, match="closed"):
        await ask(bench.sampler)
    await bench.sampler.release("s")


async def test_counters_only_grow(bench: Bench) -> None:
    await bench.push(0)
    await ask(bench.sampler, max_tokens=10)
    first = bench.sampler.counters
    await ask(bench.sampler, max_tokens=10, session="other")
    second = bench.sampler.counters
    assert set(first) == {"tokens", "decode_steps", "prefill_tokens"}
    assert second["tokens"] == first["tokens"] + 10 == 20
    assert all(second[name] >= first[name] for name in first)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"max_tokens": 0}, "max_tokens"), ({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_k": -1}, "top_k"), ({"seed": -1}, "seed")],
)
def test_sampling_parameters_outside_their_bounds_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        SamplingParams(**{"max_tokens": 1, "seed": 0, **change})
