"""Which models the embedded engine can run: asked of the model, then proven by running it."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch

from ..errors import ConfigError
from .decoder import Decoder
from .kv_cache import register_grouped_attention
from .sampler import SamplingParams
from .torch_engine import Engine, Request


def check_architecture(model: Any, max_context: int) -> None:
    """Refuses what the row cache cannot represent.

    Raises :class:`ConfigError` naming the model and the reason: positions that cannot be given, layers that are not attention over keys and values, or a
    sliding window shorter than the context.
    """
    config: Any = model.config.get_text_config()
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    missing = [wanted for wanted in ("position_ids", "attention_mask", "past_key_values", "logits_to_keep") if wanted not in parameters]
    if missing:
        raise ConfigError(f"{name} cannot be sampled by actors.sampler.kind torch: its forward takes no {missing[0]}; use a decoder-only model")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if foreign := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"{name} cannot be sampled by actors.sampler.kind torch: it has {foreign[0]} layers, which keep no keys and values per token")
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in kinds or (not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True))
    if slides and window is not None and window < max_context:
        raise ConfigError(
            f"{name} attends to {window} tokens in its sliding layers, fewer than the context of {max_context}; lower actors.sampling.max_trajectory_tokens"
        )


def probe(engine: Engine, model: Any) -> None:
    """Runs two requests of different length, in two turns, and compares every log-probability with a plain forward of the model.

    Then, where the model allows it, attention is switched to one that reads shared key-value heads in place, and proven again. Leaves the engine empty.
    Raises :class:`ConfigError` where the engine and the plain forward disagree.
    """
    difference = _difference(engine)
    tolerance = 1e-3 if engine.dtype in (torch.float32, torch.float64) else 0.25
    if not difference < tolerance:
        raise ConfigError(
            f"{type(model).__name__} cannot be sampled by actors.sampler.kind torch: its log-probabilities differ from a plain forward by {difference:.2g}"
        )
    _speed_up(engine, model, tolerance)


def _speed_up(engine: Engine, model: Any, tolerance: float) -> None:
    """Switches to the fastest forward that gives the same numbers; what does not is undone, and the plain one stays."""
    with torch.inference_mode(mode=False):
        engine.decoder = Decoder.of(model)
    if engine.decoder is not None:
        if _difference(engine) < tolerance:
            return
        engine.decoder = None
    original = model.config._attn_implementation
    if original != "sdpa" or not getattr(model, "_supports_attention_backend", False):
        return
    expected = engine.score(_probe_ids(engine, 12, 3))
    model.set_attn_implementation(register_grouped_attention())
    moved = np.abs(np.subtract(engine.score(_probe_ids(engine, 12, 3)), expected)).max()
    if not (moved < tolerance and _difference(engine) < tolerance):
        model.set_attn_implementation(original)


def _difference(engine: Engine) -> float:
    """Largest gap in log-probability between tokens sampled by the engine and a plain forward over the same tokens."""
    worst = 0.0
    histories = {f"probe-{index}": _probe_ids(engine, num, index) for index, num in enumerate((7, 3))}
    for turn in range(2):
        for session, prompt in histories.items():
            engine.submit(Request(session, prompt, SamplingParams(max_tokens=3 + turn, seed=turn)))
        while engine.busy:
            for request, completion in engine.step():
                whole = np.concatenate([request.prompt_ids, completion.token_ids])
                expected = engine.score(whole)[len(request.prompt_ids) :]
                worst = max(worst, float(np.abs(completion.logprobs - expected).max()))
                histories[request.session] = np.concatenate([whole, _probe_ids(engine, 4, turn)])
    for session in histories:
        engine.release(session)
    for key in engine.counters:
        engine.counters[key] = 0.0
    return worst


def _probe_ids(engine: Engine, num: int, seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, engine.vocab_size, num).astype(np.int32)
