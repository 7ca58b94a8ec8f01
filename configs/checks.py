"""Cross-checks of a configuration: values that are each allowed and together cannot run, or would wait for ever.

The schema bounds every key alone; here is what needs two keys, the files of a model, or the numbers of this machine. Nothing is written.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import math
import os
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from ..errors import ConfigError, MissingExtra
from .learner_schema import FsdpPolicy, Lora
from .run_folder import Run
from .schema import Config, Env, FolderModel, RayLauncher, TinyModel

_TINY_HEAD_DIM = 32
_TINY_VOCABULARY = 264
_SOCKET_PATH_BYTES = 107
_SAFETENSORS_HEADER_BYTES = 100_000_000
"""The format's own bound on its header."""
_GROUP_BASELINES = ("mean", "grpo", "rloo", "opo", "batch_std")
_TOKEN_MODES = ("gae", "vtrace", "whiten")
_VALUE_MODES = ("gae", "vtrace")
_WEIGHTED_BY_SAMPLER = ("minirl", "dppo_tv", "dppo_kl", "m2po", "topr")
"""Losses whose gradient carries the ratio to the policy that sampled, whatever their anchor."""


def check_config(config: Config) -> None:
    """Refuses a configuration whose parts contradict one another.

    Raises :class:`ConfigError` with every contradiction in one line: the values, the bound, the remedy.
    """
    problems = [
        *_envs(config),
        *_staleness(config),
        *_waits(config),
        *_lengths(config),
        *_ranks(config),
        *_sampling(config),
        *_model(config),
        *_learning(config),
        *_advantages(config),
        *_evaluation(config),
        *_endpoint(config),
        *_launcher(config),
    ]
    if problems:
        raise ConfigError("; ".join(problems))


def check_machine(run: Run) -> None:
    """Refuses a run for which this machine lacks a library, a free port, room for its weights, or a short enough temporary path.

    Raises :class:`ConfigError`, :class:`MissingExtra`.
    """
    check_tracking(run.config)
    check_adapters(run.config.learner.policy.lora)
    launcher = run.config.launcher
    if not isinstance(launcher, RayLauncher) or launcher.address is None:  # on a cluster the buffer may be elsewhere
        _check_port(run.config.buffer.endpoint)
    if run.config.buffer.endpoint == "ipc":
        length = len(os.fsencode(str(run.socket_folder / "buffer")))
        if length > _SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the Unix socket {run.socket_folder / 'buffer'} needs {length} bytes, the system allows {_SOCKET_PATH_BYTES}; "
                "set TMPDIR to a shorter folder, or use buffer.endpoint=tcp://127.0.0.1:PORT"
            )
    files = run.config.weights.channel == "files"
    base = next(parent for parent in run.weights_folder.parents if parent.is_dir())
    retain = 0 if run.config.evaluation is None else run.config.evaluation.retain
    num_slots = (3 if files else run.config.actors.num + 2) + retain
    needed, free = weights_bytes(config=run.config) * num_slots, os.statvfs(base)
    free_bytes = free.f_bavail * free.f_frsize
    if needed > free_bytes:
        why = f"{num_slots} versions" if files else f"{num_slots} slots for actors.num {run.config.actors.num}"
        why += f" and evaluation.retain {retain}" if retain else ""
        remedy = f"free some, or enlarge it (mount -o remount,size=... {base}), use fewer actors, a smaller model, or weights.channel=files"
        raise ConfigError(
            f"{base} has {free_bytes / 2**20:,.0f} MiB free, the weights channel needs {needed / 2**20:,.0f} MiB ({why}); "
            f"{'free some, or choose another folder (folder=PATH)' if files else remedy}"
        )


def check_tracking(config: Config) -> None:
    """Raises :class:`MissingExtra` where rows are to go to a library that is not installed."""
    if config.tracking.wandb is not None and importlib.util.find_spec("wandb") is None:
        raise MissingExtra("tracking.wandb needs wandb, not installed here: pip install 'rollstream[wandb]', or leave tracking.wandb out")


def check_adapters(lora: Lora | None) -> None:
    """Raises :class:`MissingExtra` where adapters are to be trained and their library is not installed."""
    if lora is not None and importlib.util.find_spec("peft") is None:
        raise MissingExtra("learner.policy.lora needs peft, not installed here: pip install 'rollstream[lora]', or leave learner.policy.lora out")


def weights_bytes(config: Config) -> int:
    """Bytes of one version of the weights as published, float32."""
    if isinstance(config.model, FolderModel):
        return 4 * sum(_safetensors_elements(path) for path in Path(config.model.path).expanduser().glob("*.safetensors"))
    return 4 * _tiny_elements(config.model)


def missing_folder_remedy(path: str) -> str:
    """What to do about a ``model.path`` that is no folder: most often it is a hub id."""
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path):
        return f"if it is a hub id, fetch it first (rollstream models fetch {path}) and give the folder that prints; a run downloads nothing"
    return "give the local folder of a Hugging Face model"


def _envs(config: Config) -> Iterator[str]:
    ids = [env.id for env in config.envs]
    for place, env_id in enumerate(ids):
        if env_id in ids[:place]:
            yield f"env.{place}.id {env_id} is listed twice; give one of them the sum of their weights, or register it under a second id with other kwargs"
    if isinstance(config.env, Env) and config.env.weight != 1:
        yield f"env.weight {config.env.weight:g} with one environment: it is a share relative to others; leave it out, or write env as a list"


def _staleness(config: Config) -> Iterator[str]:
    buffer = config.buffer
    if buffer.depth > buffer.max_lag:
        yield (
            f"buffer.depth {buffer.depth} is larger than buffer.max_lag {buffer.max_lag}: actors may lead by more batches than may be trained, so the "
            f"learner would wait for ever; lower buffer.depth to {buffer.max_lag} or raise buffer.max_lag to {buffer.depth}"
        )
    if buffer.group_deadline_s is not None and buffer.min_group > config.learner.group_size:
        yield (
            f"buffer.min_group {buffer.min_group} is larger than learner.group_size {config.learner.group_size}: every group that meets "
            f"buffer.group_deadline_s would be dropped; lower buffer.min_group to at most {config.learner.group_size}"
        )


def _waits(config: Config) -> Iterator[str]:
    stall_s, episode_s = config.buffer.stall_timeout_s, config.actors.episode_timeout_s
    if stall_s <= episode_s:
        yield (
            f"buffer.stall_timeout_s {stall_s:g} is not longer than actors.episode_timeout_s {episode_s:g}: one slow episode would end the run; raise it above "
            f"{episode_s:g} or lower the other"
        )


def _lengths(config: Config) -> Iterator[str]:
    longest = config.actors.sampling.max_trajectory_tokens
    positions = _max_positions(config)
    if positions is not None and longest > positions:
        remedy = "raise model.max_positions or lower" if isinstance(config.model, TinyModel) else "lower"
        yield f"actors.sampling.max_trajectory_tokens {longest} is longer than the model's {positions} positions; {remedy} it"
    if longest > (budget := config.learner.tokens_per_micro_batch):
        yield (
            f"learner.tokens_per_micro_batch {budget} is smaller than actors.sampling.max_trajectory_tokens {longest}: the longest trajectory would fit "
            f"in no micro-batch; raise it to at least {longest}"
        )
    overlong = config.learner.advantage.overlong
    if overlong is not None and overlong.buffer > overlong.max_len:
        yield f"learner.advantage.overlong.buffer {overlong.buffer} is larger than its max_len {overlong.max_len}; lower it"


def _sampling(config: Config) -> Iterator[str]:
    sampling = config.actors.sampling
    remedy = "the log-probabilities that are recorded would not be those of the policy that learns; set it back, cut sampling belongs to evaluation"
    if sampling.top_p < 1:
        yield f"actors.sampling.top_p {sampling.top_p} must be 1 in training: {remedy}"
    if sampling.top_k > 0:
        yield f"actors.sampling.top_k {sampling.top_k} must be 0 in training: {remedy}"


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if isinstance(model, TinyModel) and model.num_heads % model.num_kv_heads:
        yield f"model.num_heads {model.num_heads} is not a multiple of model.num_kv_heads {model.num_kv_heads}; each key-value head serves whole query heads"
    if isinstance(model, FolderModel) and not Path(model.path).expanduser().is_dir():
        yield f"model.path {model.path} is not a folder; {missing_folder_remedy(model.path)}"


def _learning(config: Config) -> Iterator[str]:
    mode, size = config.learner.advantage.mode, config.learner.group_size
    if size < 2 and mode in (*_GROUP_BASELINES, "none"):
        yield (
            f"learner.group_size {size} with learner.advantage.mode {mode}: a trajectory is compared with the others of its group, and there are none, so "
            "every advantage would be 0; use group_size >= 2, or advantage.mode gae, vtrace or whiten"
        )
    policy = config.learner.policy
    if policy.lora is not None and policy.lora.dropout and policy.activation_checkpointing:
        yield (
            f"learner.policy.lora.dropout {policy.lora.dropout} with learner.policy.activation_checkpointing: layers computed again would drop other inputs; "
            "set dropout 0, or activation_checkpointing false"
        )
    checkpoint = config.learner.checkpoint
    if checkpoint.keep_every is not None and checkpoint.keep_every % checkpoint.every:
        yield (
            f"learner.checkpoint.keep_every {checkpoint.keep_every} is not a multiple of learner.checkpoint.every {checkpoint.every}: most of those versions "
            f"would never be written; use {-(-checkpoint.keep_every // checkpoint.every) * checkpoint.every}"
        )
    if (shares := config.learner.updates.mini_batches) > (groups := config.learner.batch_groups):
        yield f"learner.updates.mini_batches {shares} is larger than learner.batch_groups {groups}: a mini-batch holds whole groups; lower it to {groups}"
    for index, rule in enumerate(config.learner.loss.correction):
        if rule.low is not None and rule.high is not None and rule.low > rule.high:
            yield f"learner.loss.correction.{index}: low {rule.low} is above high {rule.high}; swap them"


def _advantages(config: Config) -> Iterator[str]:
    learner = config.learner
    loss, mode = learner.loss, learner.advantage.mode
    if mode in _VALUE_MODES and learner.value is None:
        yield f"learner.advantage.mode {mode} needs values and learner.value is null; add learner.value: {{}}"
    if learner.value is not None and mode in (*_GROUP_BASELINES, "none", "whiten"):
        yield f"learner.value is set and learner.advantage.mode {mode} reads no values; leave it out, or use mode gae or vtrace"
    if mode in _TOKEN_MODES and config.buffer.degenerate != "keep":
        yield (
            f"buffer.degenerate {config.buffer.degenerate} with learner.advantage.mode {mode}: a group of equal rewards teaches there as well, since no group "
            "is a baseline; use buffer.degenerate keep"
        )
    if mode == "vtrace" and (loss.old == "mu" or loss.correction or loss.kind in _WEIGHTED_BY_SAMPLER):
        yield (
            f"learner.advantage.mode vtrace carries the ratio to the policy that sampled, and so do learner.loss.kind {loss.kind} with old {loss.old} and "
            f"{len(loss.correction)} correction rules: it would count twice; use kind pg or ppo, old prox, correction []"
        )
    if loss.kl_in == "reward" and (loss.kl is None or loss.kl_is):
        yield f"learner.loss.kl_in reward with kl {loss.kl or 'null'} and kl_is {str(loss.kl_is).lower()}: it needs kl (k1 is the usual one), and kl_is false"


def _evaluation(config: Config) -> Iterator[str]:
    evaluation = config.evaluation
    if evaluation is None:
        return
    ids = [env.id for env in evaluation.envs]
    for env_id in sorted({env_id for env_id in ids if ids.count(env_id) > 1}):
        yield f"evaluation.envs: {env_id} stands there {ids.count(env_id)} times; give it once, or register it under another id with other arguments"
    if evaluation.k and (largest := max(evaluation.k)) > evaluation.samples:
        yield (
            f"evaluation.k asks for pass@{largest}, evaluation.samples {evaluation.samples} gives fewer trajectories per task; raise evaluation.samples to "
            f"{largest} or leave {largest} out of evaluation.k"
        )
    longest, positions = config.evaluators().sampling.max_trajectory_tokens, _max_positions(config)
    if positions is not None and longest > positions:
        remedy = "raise model.max_positions or lower" if isinstance(config.model, TinyModel) else "lower"
        yield f"evaluation.sampling.max_trajectory_tokens {longest} is longer than the model's {positions} positions; {remedy} it"


def _ranks(config: Config) -> Iterator[str]:
    policy, learner = config.learner.policy, config.learner
    if not isinstance(policy, FsdpPolicy):
        return
    if policy.ranks > (num := learner.batch_groups * learner.group_size):
        yield (
            f"learner.policy.ranks {policy.ranks} is larger than the {num} trajectories of a batch (learner.batch_groups {learner.batch_groups} times "
            f"learner.group_size {learner.group_size}): a trajectory is computed by one rank, so some would never have any; lower it to {num} or less"
        )
    if policy.ranks > 1 and learner.device.startswith("cuda:"):
        yield f"learner.device {learner.device} with learner.policy.ranks {policy.ranks}: ranks need a GPU each; say cuda, and rank r takes cuda:r"


def _endpoint(config: Config) -> Iterator[str]:
    endpoint = config.buffer.endpoint
    if endpoint == "ipc":
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not 1 <= int(port) <= 65535:
        yield f"buffer.endpoint {endpoint}: port {int(port)} is not between 1 and 65535; choose one that is free, or ipc"
    try:
        if host != "localhost":
            ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        yield f"buffer.endpoint {endpoint}: {host} is no address; give one of this machine's own, 0.0.0.0 for all of them, 127.0.0.1 for none but this machine"


_OWN_KEYS = {"CPU": "cpus", "GPU": "gpus", "object_store_memory": ""}
"""What Ray counts by itself, and the key that asks for it; nothing of a run goes through the object store."""


def _launcher(config: Config) -> Iterator[str]:
    launcher = config.launcher
    if not isinstance(launcher, RayLauncher):
        return
    port = (launcher.address or "").rpartition(":")[2]
    if port.isdigit() and not 1 <= int(port) <= 65535:
        yield f"launcher.address {launcher.address}: port {int(port)} is not between 1 and 65535; ray start --head prints the cluster's"
    evaluation, policy = config.evaluation, config.learner.policy
    used = {"learner": ("learner.device", config.learner.device), "actor": ("actors.device", config.actors.device)}
    if evaluation is not None:
        used["evaluator"] = ("evaluation.device", config.actors.device if evaluation.device is None else evaluation.device)
    needs = {"buffer": launcher.buffer, "learner": launcher.learner, "actor": launcher.actor, "evaluator": launcher.evaluator}
    for role, (key, device) in used.items():
        if device != "cpu" and needs[role].gpus == 0:
            yield f"{key} {device} with launcher.{role}.gpus 0: Ray hides every GPU from such a process; set launcher.{role}.gpus to 1, or {key} to cpu"
    for role, need in needs.items():
        if need.gpus > 1 and need.gpus % 1:
            yield f"launcher.{role}.gpus {need.gpus:g}: above 1 Ray grants whole GPUs only; use {int(need.gpus)} or {int(need.gpus) + 1}"
        for name in sorted(need.custom.keys() & _OWN_KEYS.keys()):
            yield f"launcher.{role}.custom.{name}: use launcher.{role}.{_OWN_KEYS[name]}" if _OWN_KEYS[name] else f"launcher.{role}.custom.{name}: leave it out"
    if isinstance(policy, FsdpPolicy) and policy.ranks > 1 and config.learner.device == "cuda" and 0 < launcher.learner.gpus < 1:
        yield f"launcher.learner.gpus {launcher.learner.gpus:g} with learner.policy.ranks {policy.ranks}: nccl needs a GPU for each rank alone; set it to 1"


def _check_port(endpoint: str) -> None:
    if endpoint == "ipc":
        return
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.socket(socket.AF_INET6 if host.startswith("[") else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(f"buffer.endpoint {endpoint} cannot be used: {reason}; stop what listens there, choose another port, or use ipc") from None


def _max_positions(config: Config) -> int | None:
    """Longest sequence the model takes; None where its folder does not say."""
    if isinstance(config.model, TinyModel):
        return config.model.max_positions
    try:
        values = json.loads((Path(config.model.path).expanduser() / "config.json").read_text(encoding="utf-8"))
        return int(values.get("text_config", values)["max_position_embeddings"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None  # the check of the model's folder says what is wrong with it


def _tiny_elements(model: TinyModel) -> int:
    attention = 2 * model.hidden_size * _TINY_HEAD_DIM * (model.num_heads + model.num_kv_heads) + 2 * _TINY_HEAD_DIM
    block = attention + 3 * model.hidden_size * 2 * model.hidden_size + 2 * model.hidden_size
    return _TINY_VOCABULARY * model.hidden_size + model.num_layers * block + model.hidden_size


def _safetensors_elements(path: Path) -> int:
    """Elements of every tensor in the file, from its header: 8 bytes of length, then JSON."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _SAFETENSORS_HEADER_BYTES:
                raise ValueError("the header is longer than the format allows")
            header = cast("dict[str, dict[str, Any]]", json.loads(file.read(length)))
        return sum(math.prod(int(size) for size in tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, struct.error):
        raise ConfigError(f"model.path: {path} is not a readable safetensors file; copy the model again") from None
