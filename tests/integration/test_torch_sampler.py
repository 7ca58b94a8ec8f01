"""The embedded sampler against plain forwards of the same model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rollstream.actors import torch_sampler
from rollstream.actors.draw import draw, kept
from rollstream.actors.sampler import Completion, SamplingParams
from rollstream.actors.torch_sampler import OnPush, TorchSampler
from rollstream.buffer.manifest import Manifest, TensorSpec
from rollstream.errors import ConfigError, WeightsError

VOCABULARY = 60
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "head_dim": 8})),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, sliding_window=256, layer_types=["sliding_attention", "full_attention"])),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=2, n_head=2, initializer_range=0.2)),
}


def build(name: str = "qwen3", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return MODELS[name]().eval()


def pack(model: Any, version: int, lineage: int = 0, names: list[str] | None = None) -> tuple[Manifest, memoryview]:
    """A manifest and its bytes, laid out as the weights channel does."""
    content = bytearray()
    specs: list[TensorSpec] = []
    for name, parameter in model.named_parameters():
        if names is None or name in names:
            raw = parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            specs.append(TensorSpec(name, str(parameter.dtype).removeprefix("torch."), tuple(parameter.shape), len(content), len(raw)))
            content += raw + bytes(-len(raw) % 64)
    return Manifest(lineage, version, xxhash.xxh3_128_hexdigest(bytes(content)), 0, len(content), specs), memoryview(bytes(content))


async def sampler_of(model: Any, *, version: int = 0, **settings: Any) -> TorchSampler:
    sampler = TorchSampler(model, **settings)
    await sampler.load(*pack(model, version))
    return sampler


def scores(model: Any, token_ids: list[int], num: int, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    """Log-probabilities of the last ``num`` tokens by one plain forward."""
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([token_ids])).logits[0].float() / temperature, -1)
    return logprobs[-num - 1 : -1].gather(1, torch.tensor(token_ids[-num:])[:, None])[:, 0].numpy()


def prompt(num: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, num).tolist()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.0005)


@pytest.mark.parametrize("name", list(MODELS))
async def test_log_probabilities_equal_a_plain_forward_over_ragged_turns_and_evictions(name: str) -> None:
    sampler, reference = await sampler_of(build(name), max_batch=5), build(name)
    worst = 0.0

    async def converse(index: int) -> None:
        nonlocal worst
        ids = prompt(1 + index * 5, index)
        for turn in range(3):
            params = SamplingParams(max_tokens=2 + index, seed=index * 10 + turn, stop_ids=frozenset({1, 2}), temperature=0.7 + 0.1 * index)
            completion = await sampler.generate(ids, params, session=f"session {index}")
            ids = ids + completion.token_ids.tolist()
            worst = max(worst, float(np.abs(scores(reference, ids, len(completion.token_ids), params.temperature) - completion.logprobs).max()))
            ids += prompt(1 + 3 * turn, turn)

    await asyncio.gather(*(converse(index) for index in range(9)))
    await sampler.close()
    assert worst < 1e-5


@pytest.mark.parametrize("name", list(MODELS))
async def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    model = build(name)
    ids = prompt(12)
    with torch.no_grad():
        expected = (
            build(name)
            .generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, 12, dtype=torch.long), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0
            )[0, 12:]
            .tolist()
        )
    sampler = await sampler_of(model)
    others = [sampler.generate(prompt(3 + i, i), SamplingParams(max_tokens=20, seed=i), session=f"{i}") for i in range(3)]
    completion, *_ = await asyncio.gather(sampler.generate(ids, SamplingParams(max_tokens=30, seed=0, temperature=0.0), session="greedy"), *others)
    await sampler.close()
    assert completion.token_ids.tolist() == expected
    np.testing.assert_allclose(completion.logprobs, scores(build(name), ids + expected, 30), atol=1e-5)


async def test_a_later_turn_prefills_only_its_new_tokens() -> None:
    sampler = await sampler_of(build())
    first = await sampler.generate(prompt(20), SamplingParams(max_tokens=5, seed=0), session="a")
    before = sampler.counters["prefill_tokens"]
    await sampler.generate(prompt(20) + first.token_ids.tolist() + prompt(4, 1), SamplingParams(max_tokens=5, seed=0), session="a")
    await sampler.close()
    # The last sampled token has no keys and values yet, so it is computed together with the four new ones.
    assert (before, sampler.counters["prefill_tokens"]) == (20, 25)


async def test_a_turn_whose_history_was_rewritten_reuses_only_the_common_prefix() -> None:
    sampler, reference = await sampler_of(build()), build()
    first = await sampler.generate(prompt(20), SamplingParams(max_tokens=5, seed=0), session="a")
    rewritten = prompt(20)[:12] + prompt(9, 3)
    before = sampler.counters["prefill_tokens"]
    second = await sampler.generate(rewritten, SamplingParams(max_tokens=6, seed=1), session="a")
    again = await sampler.generate(rewritten, SamplingParams(max_tokens=6, seed=1), session="a")
    await sampler.close()
    assert len(first.token_ids) == 5
    assert 9 <= sampler.counters["prefill_tokens"] - before <= 10
    np.testing.assert_allclose(second.logprobs, scores(reference, rewritten + second.token_ids.tolist(), 6), atol=1e-5)
    np.testing.assert_array_equal(second.token_ids, again.token_ids)


async def test_many_sessions_coming_and_going_keep_their_own_rows() -> None:
    """Rows are swapped to the front, evicted and grown while all this happens; every log-probability still fits its own history."""
    sampler, reference = await sampler_of(build(), max_batch=24), build()
    results: list[tuple[list[int], Completion]] = []

    async def converse(index: int) -> None:
        ids = prompt(1 + index % 7, index)
        for turn in range(4):
            completion = await sampler.generate(ids, SamplingParams(max_tokens=1 + (index * 7 + turn * 5) % 23, seed=index), session=f"{index}")
            results.append((ids, completion))
            ids = ids + completion.token_ids.tolist() + prompt(1 + turn, turn)
            await asyncio.sleep(0.001 * (index % 5))
        await sampler.release(f"{index}")

    await asyncio.gather(*(converse(index) for index in range(40)))
    await sampler.close()
    for ids, completion in results[::5]:
        np.testing.assert_allclose(completion.logprobs, scores(reference, ids + completion.token_ids.tolist(), len(completion.token_ids)), atol=1e-5)


async def test_top_k_and_top_p_are_scored_under_the_renormalised_distribution() -> None:
    sampler, reference = await sampler_of(build()), build()
    params = SamplingParams(max_tokens=40, seed=3, temperature=1.3, top_k=8, top_p=0.7)
    completion = await sampler.generate(prompt(6), params, session="a")
    await sampler.close()
    ids = prompt(6) + completion.token_ids.tolist()
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0].double() / 1.3
    for position, (token, logprob) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True), start=5):
        probabilities = np.sort(torch.softmax(logits[position], -1).numpy())[::-1][:8]
        probabilities /= probabilities.sum()
        num = int(np.searchsorted(np.cumsum(probabilities), 0.7)) + 1
        order = torch.argsort(logits[position], descending=True)[:num].tolist()
        assert token in order
        assert np.exp(logprob) == pytest.approx(probabilities[order.index(token)] / probabilities[:num].sum(), abs=1e-5)


# --- weights ------------------------------------------------------------------------------------------------------------------------


async def push_in_the_middle(on_push: OnPush) -> tuple[list[int], Completion, list[int], Completion, TorchSampler]:
    """A running completion and an idle session live through a push from weights of seed 0 to weights of seed 1."""
    sampler = await sampler_of(build(seed=0), version=1, on_push=on_push)
    idle = prompt(10, 5)
    idle += (await sampler.generate(idle, SamplingParams(max_tokens=5, seed=0), session="idle")).token_ids.tolist() + prompt(3, 6)
    ids = prompt(8)
    running = asyncio.ensure_future(sampler.generate(ids, SamplingParams(max_tokens=120, seed=4), session="running"))
    before = sampler.counters["tokens"]
    await until(lambda: sampler.counters["tokens"] > before + 10)
    await sampler.load(*pack(build(seed=1), 2))
    later = await sampler.generate(idle, SamplingParams(max_tokens=5, seed=0), session="idle")
    completion = await running
    await sampler.close()
    return ids, completion, idle, later, sampler


async def test_recompute_continues_exactly_under_the_new_weights() -> None:
    ids, completion, idle, later, _ = await push_in_the_middle("recompute")
    num_new = int((completion.versions == 2).sum())
    assert 0 < num_new < 120
    whole = ids + completion.token_ids.tolist()
    np.testing.assert_allclose(completion.logprobs[-num_new:], scores(build(seed=1), whole, num_new), atol=1e-5)
    np.testing.assert_allclose(completion.logprobs[:-num_new], scores(build(seed=0), whole[:-num_new], 120 - num_new), atol=1e-5)
    np.testing.assert_allclose(later.logprobs, scores(build(seed=1), idle + later.token_ids.tolist(), 5), atol=1e-5)


async def test_keep_goes_on_with_what_was_computed_under_the_old_weights() -> None:
    """The difference to a plain forward is what the correction weights of the learner are for; that there is one shows that nothing was recomputed."""
    ids, completion, idle, later, sampler = await push_in_the_middle("keep")
    num_new = int((completion.versions == 2).sum())
    assert 0 < num_new < 120
    whole = ids + completion.token_ids.tolist()
    assert np.abs(completion.logprobs[-num_new:] - scores(build(seed=1), whole, num_new)).max() > 1e-2
    assert np.abs(later.logprobs - scores(build(seed=1), idle + later.token_ids.tolist(), 5)).max() > 1e-2
    assert sampler.counters["prefill_tokens"] == 10 + 8 + 4


async def test_drain_finishes_what_runs_before_it_loads() -> None:
    _, completion, idle, later, _ = await push_in_the_middle("drain")
    assert set(completion.versions) == {1}
    assert set(later.versions) == {2}
    np.testing.assert_allclose(later.logprobs, scores(build(seed=1), idle + later.token_ids.tolist(), 5), atol=1e-5)


async def test_scores_are_those_of_the_weights_held_now() -> None:
    sampler = await sampler_of(build(seed=0))
    ids = prompt(15)
    before = await sampler.score(ids)
    await sampler.load(*pack(build(seed=1), 1))
    after = await sampler.score(ids)
    await sampler.close()
    np.testing.assert_allclose(before[1:], scores(build(seed=0), ids, 14), atol=1e-5)
    np.testing.assert_allclose(after[1:], scores(build(seed=1), ids, 14), atol=1e-5)


async def test_what_is_asked_while_weights_are_copied_in_is_sampled_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = await sampler_of(build(seed=0), version=3)
    copying, go_on = threading.Event(), threading.Event()
    copy_in = torch_sampler.copy_in

    def slow_copy(*arguments: Any) -> None:
        copying.set()
        assert go_on.wait(10)
        copy_in(*arguments)

    monkeypatch.setattr(torch_sampler, "copy_in", slow_copy)
    loading = asyncio.create_task(sampler.load(*pack(build(seed=1), 4)))
    await asyncio.to_thread(copying.wait, 10)
    asked = asyncio.create_task(sampler.generate(prompt(5), SamplingParams(max_tokens=4, seed=1), session="a"))
    await asyncio.sleep(0.01)
    assert sampler.held == (0, 3)
    go_on.set()
    completion = await asked
    await loading
    assert completion.versions.tolist() == [4] * 4
    assert np.allclose(completion.logprobs, scores(build(seed=1), [*prompt(5), *completion.token_ids.tolist()], 4), atol=1e-5)
    await sampler.close()


async def test_weights_of_another_model_are_refused_and_silence_the_sampler() -> None:
    names = [name for name, _ in build().named_parameters()]
    cases: list[tuple[tuple[Manifest, memoryview], str]] = [
        (pack(build("llama"), 1), "lacks"),
        (pack(build(), 1, names=names[1:]), "lacks 1 parameters of the sampler's model, among them model.embed_tokens.weight"),
        (pack(build().bfloat16(), 1), "float32 .* in the sampler's model, bfloat16"),
    ]
    for given, reason in cases:
        sampler = await sampler_of(build())
        with pytest.raises(WeightsError, match=reason):
            await sampler.load(*given)
        assert sampler.held is None
        with pytest.raises(WeightsError, match=reason):
            await sampler.generate([1], SamplingParams(max_tokens=1, seed=0), session="a")
        await sampler.close()


async def test_a_fingerprint_that_disagrees_after_the_copy_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the bytes had gone somewhere else than where the model computes."""
    sampler = await sampler_of(build())
    monkeypatch.setattr("rollstream.actors.torch_sampler.copy_in", lambda *_: None)
    with pytest.raises(WeightsError, match="fingerprint"):
        await sampler.load(*pack(build(seed=1), 1))
    assert sampler.held is None
    await sampler.close()


async def test_weights_that_give_no_finite_logits_produce_no_token() -> None:
    broken = build()
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    sampler = await sampler_of(build())
    await sampler.load(*pack(broken, 9))
    with pytest.raises(WeightsError, match="version 9 gives logits that are not finite"):
        await sampler.generate([1, 2], SamplingParams(max_tokens=3, seed=0), session="a")
    assert sampler.held is None
    await sampler.close()


# --- architectures ----------------------------------------------------------------------------------------------------------------------


def test_models_that_keep_no_keys_and_values_are_refused() -> None:
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="MambaForCausalLM cannot be sampled"):
        TorchSampler(model)  # type: ignore[arg-type]


def test_a_sliding_window_shorter_than_the_context_is_refused_and_a_shorter_context_is_not() -> None:
    config = Gemma3TextConfig(**SHAPE, sliding_window=32, layer_types=["sliding_attention", "full_attention"])
    with pytest.raises(ConfigError, match="attends to 32 tokens in its sliding layers, fewer than the context of 256"):
        TorchSampler(Gemma3ForCausalLM(config))
    assert TorchSampler(Gemma3ForCausalLM(config), max_tokens=32).max_context == 32


def test_half_precision_models_sample_too() -> None:
    async def sample() -> Completion:
        sampler = await sampler_of(build().bfloat16())
        completion = await sampler.generate(prompt(9), SamplingParams(max_tokens=12, seed=0), session="a")
        await sampler.close()
        return completion

    completion = asyncio.run(sample())
    expected = scores(build().bfloat16(), prompt(9) + completion.token_ids.tolist(), 12)
    assert np.abs(completion.logprobs - expected).max() < 0.25


# --- drawing ----------------------------------------------------------------------------------------------------------------------------


def test_draws_follow_the_distribution_and_never_take_an_impossible_token() -> None:
    logits = torch.tensor([0.0, -torch.inf, 1.0, -torch.inf, 2.0, -torch.inf]).repeat(20_000, 1)
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    uniforms[:2] = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs = draw(logits, torch.ones(20_000), None, None, uniforms)
    expected = torch.softmax(torch.tensor([0.0, 1.0, 2.0]), -1)
    shares = torch.bincount(tokens, minlength=6).double() / 20_000
    assert shares[[1, 3, 5]].sum() == 0
    torch.testing.assert_close(shares[[0, 2, 4]], expected.double(), atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs.exp(), expected[tokens // 2])
    assert tokens[:2].tolist() == [0, 4]


def test_kept_tokens_are_the_fewest_that_reach_the_mass_and_ties_go_to_the_lower_id() -> None:
    logprobs = torch.log(torch.tensor([[0.1, 0.4, 0.1, 0.4], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]))
    found = kept(logprobs, torch.tensor([3, 2, 0]), torch.tensor([1.0, 1.0, 0.6], dtype=torch.float64))
    assert found.tolist() == [[True, True, False, True], [True, True, False, False], [True, False, False, False]]
