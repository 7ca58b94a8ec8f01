"""Playing one episode: what is recorded, and every way it can end."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash

from rollstream import models
from rollstream.actors.endings import LENGTH_AFTER, MAX_KINDS, Endings
from rollstream.actors.env_pool import EnvPool
from rollstream.actors.invalid import FIRST, WINDOW, InvalidShare
from rollstream.actors.record import Record
from rollstream.actors.rollout import Player, Renderers, sampling_seed
from rollstream.actors.sampler import Completion, SamplingParams
from rollstream.actors.scripted_sampler import ScriptedSampler
from rollstream.buffer.columns import Rows, encode
from rollstream.buffer.facts import facts
from rollstream.buffer.manifest import Manifest
from rollstream.buffer.types import Trajectory
from rollstream.buffer.wire import Lease
from rollstream.configs.schema import Actors, Sampling
from rollstream.envs.chat import ChatEnv, Message, Turn
from rollstream.envs.registry import register
from rollstream.errors import EnvError, InfraError, WeightsError

TOKENIZER: Any = models.build_tiny_tokenizer(4096)
END = TOKENIZER.eos_token_id


class Echo(ChatEnv):
    """Answers every turn, scores some, and misbehaves in the way its argument asks for."""

    max_turns = 3

    def __init__(self, trouble: str = "") -> None:
        if trouble == "constructor":
            raise RuntimeError("no database")
        self.trouble = trouble
        self.heard: list[str] = []

    def start(self, task: int) -> str:
        if self.trouble == "start":
            raise ValueError("no such task")
        self.heard = []
        return f"task {task} seed {self.np_random.integers(1000)}"

    async def respond(self, message: Message) -> Turn:
        self.heard.append(message["content"])
        turn = len(self.heard)
        if self.trouble == "raise" and turn == 2:
            raise ZeroDivisionError("one over none")
        if self.trouble == "infra" and turn == 2:
            raise InfraError("the tool server is down")
        if self.trouble == "hang" and turn == 2:
            await asyncio.sleep(60)
        if self.trouble == "done" and turn == 2:
            return Turn("bye", reward=1.0, done=True, reward_parts={"answer": 1.0}, metrics={"success": 1.0})
        if self.trouble == "long":
            return Turn("word " * 50)
        return Turn("go on", reward=None if turn == 1 else 0.25)


register("test-rollout/Echo-v0", Echo)


class Guided(ScriptedSampler):
    """A scripted sampler that notes what it was given, and can change version, or fail, at a turn."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(vocab_size=len(TOKENIZER), **settings)
        self.prompts: list[tuple[list[int], SamplingParams, str]] = []
        self.released: list[str] = []
        self.versions: list[int] = []
        self.failure: Exception | None = None

    async def generate(self, prompt_ids: Any, params: SamplingParams, *, session: str) -> Completion:
        if self.failure is not None:
            raise self.failure
        if self.versions:
            self._held = (0, self.versions.pop(0))
        self.prompts.append((list(prompt_ids), params, session))
        return await super().generate(prompt_ids, params, session=session)

    async def release(self, session: str) -> None:
        self.released.append(session)
        await super().release(session)


@pytest.fixture
async def guided() -> AsyncIterator[Guided]:
    sampler = Guided(mean_tokens=4)
    await sampler.load(Manifest(0, 5, xxhash.xxh3_128_hexdigest(b""), 0, 0, []), memoryview(b""))
    yield sampler
    await sampler.close()


def lease(**changes: Any) -> Lease:
    return Lease(**{
        "lineage": 0, "group_id": 4, "sequence": 4, "attempt": 0, "purpose": "train", "env_id": "test-rollout/Echo-v0",
        "task_index": 11, "seed": 3, "members": [0, 1], "admit_version": 5, **changes,
    })  # fmt: skip


def player(sampler: Any, trouble: str = "", *, timeout_s: float = 30.0, turn: int = 32, total: int = 512, run_seed: int = 0) -> Player:
    actors = Actors(episode_timeout_s=timeout_s, sampling=Sampling(max_turn_tokens=turn, max_trajectory_tokens=total))
    return Player(sampler, Renderers(TOKENIZER), EnvPool({"test-rollout/Echo-v0": {"trouble": trouble}}), actors, run_seed, "actor-0")


def check(trajectory: Trajectory) -> Trajectory:
    """Every trajectory, however it ended, is one the buffer stores."""
    (fact,) = facts(Rows(encode([trajectory])))
    assert fact.status == trajectory.status
    return trajectory


async def test_what_the_sampler_was_given_is_the_prefix_of_what_is_stored(guided: Guided) -> None:
    trajectory = check(await player(guided).play(lease(), 0))
    (segment,) = trajectory.segments
    stored = segment.token_ids.tolist()
    assert len(guided.prompts) == 3
    for prompt, _, _ in guided.prompts:
        assert stored[: len(prompt)] == prompt
    assert trajectory.stop_reason == "turns"


async def test_only_sampled_tokens_are_trained_and_carry_log_probabilities(guided: Guided) -> None:
    (segment,) = (await player(guided).play(lease(), 0)).segments
    spans = np.split(np.arange(segment.num_tokens), segment.turn_starts[1:])
    assert segment.turn_roles == ("user", "assistant") * 3
    for role, span in zip(segment.turn_roles, spans, strict=True):
        sampled = role == "assistant"
        assert set(segment.loss_mask[span]) == {int(sampled)}
        assert ((segment.behaviour_logprobs[span] < 0) == sampled).all()
    assert segment.token_ids[spans[1][-1]] == END


async def test_rewards_are_kept_per_turn_and_summed_and_null_is_not_zero(guided: Guided) -> None:
    trajectory = await player(guided).play(lease(), 0)
    assert trajectory.segments[0].turn_rewards == (None, None, None, 0.25, None, 0.25)
    assert trajectory.reward == 0.5


async def test_an_episode_that_ends_its_task_is_terminated_with_its_parts_and_metrics(guided: Guided) -> None:
    trajectory = check(await player(guided, "done").play(lease(), 1))
    assert (trajectory.status, trajectory.stop_reason, trajectory.error) == ("terminated", "terminated", "")
    assert trajectory.reward == 1.0
    assert trajectory.reward_parts == {"answer": 1.0}
    assert trajectory.env_metrics["success"] == 1.0
    assert trajectory.key == (0, 4, 1, 0)
    assert trajectory.actor_id == "actor-0"
    assert [message["role"] for message in json.loads(trajectory.messages)] == ["user", "assistant", "user", "assistant"]
    assert 0 <= trajectory.sampler_s + trajectory.env_s <= trajectory.finished_at - trajectory.started_at + 0.01


async def test_members_share_the_task_and_the_reset_seed_and_differ_in_sampling(guided: Guided) -> None:
    playing = player(guided)
    first, second = await asyncio.gather(playing.play(lease(), 0), playing.play(lease(), 1))
    opening = int(first.segments[0].turn_starts[1])
    assert first.segments[0].token_ids[:opening].tolist() == second.segments[0].token_ids[:opening].tolist()
    assert first.segments[0].token_ids.tolist() != second.segments[0].token_ids.tolist()


async def test_an_episode_played_again_elsewhere_is_the_same(guided: Guided) -> None:
    first = await player(guided).play(lease(), 0)
    await player(guided).play(lease(group_id=9), 0)
    again = await player(guided).play(lease(), 0)
    assert first.segments[0].token_ids.tolist() == again.segments[0].token_ids.tolist()


def test_sampling_seeds_differ_in_everything_they_are_made_of() -> None:
    varied = [(0, lease(), 0, 0), (1, lease(), 0, 0), (0, lease(group_id=5), 0, 0), (0, lease(attempt=1), 0, 0), (0, lease(purpose="eval"), 0, 0),
              (0, lease(), 1, 0), (0, lease(), 0, 1)]  # fmt: skip
    seeds = [sampling_seed(*parts) for parts in varied]
    assert len(set(seeds)) == len(seeds)
    assert seeds == [sampling_seed(*parts) for parts in varied]
    assert all(0 <= seed < 2**128 for seed in seeds)


@pytest.mark.parametrize(
    ("trouble", "reason", "error"),
    [
        ("raise", "env", "respond raised ZeroDivisionError: one over none"),
        ("infra", "infra", "the tool server is down"),
        ("start", "env", "start raised ValueError: no such task"),
        ("constructor", "env", "constructor raised RuntimeError: no database"),
        ("hang", "infra", "did not answer before actors.episode_timeout_s"),
    ],
)
async def test_trouble_in_the_environment_costs_the_episode_and_is_never_reward_zero(guided: Guided, trouble: str, reason: str, error: str) -> None:
    trajectory = check(await player(guided, trouble, timeout_s=0.3).play(lease(), 0))
    assert (trajectory.status, trajectory.stop_reason) == ("failed", reason)
    assert trajectory.reward is None
    assert error in trajectory.error
    assert guided.running == 0
    assert guided.released == ["0/train/4/0/0"]


async def test_a_sampler_at_the_deadline_is_cut_and_the_tokens_so_far_are_kept() -> None:
    sampler = Guided(mean_tokens=1e9, token_delay_s=0.002)
    await sampler.load(Manifest(0, 0, xxhash.xxh3_128_hexdigest(b""), 0, 0, []), memoryview(b""))
    trajectory = check(await player(sampler, timeout_s=0.2, turn=100_000, total=200_000).play(lease(), 0))
    assert (trajectory.status, trajectory.stop_reason, trajectory.reward) == ("truncated", "time", 0.0)
    assert trajectory.num_trained_tokens > 0


async def test_a_turn_cut_by_its_budget_is_given_to_the_environment_as_it_is(guided: Guided) -> None:
    sampler = Guided(mean_tokens=1e9)
    await sampler.load(Manifest(0, 0, xxhash.xxh3_128_hexdigest(b""), 0, 0, []), memoryview(b""))
    playing = player(sampler, turn=6)
    trajectory = check(await playing.play(lease(), 0))
    assert trajectory.stop_reason == "turns"
    (segment,) = trajectory.segments
    cut = int(segment.turn_starts[2])
    assert segment.token_ids[cut] == END, "the end of turn that the policy did not sample is appended"
    assert segment.loss_mask[cut] == 0
    assert segment.loss_mask.sum() == 18


async def test_an_episode_out_of_tokens_within_a_turn_is_truncated_for_length() -> None:
    sampler = Guided(mean_tokens=1e9)
    await sampler.load(Manifest(0, 0, xxhash.xxh3_128_hexdigest(b""), 0, 0, []), memoryview(b""))
    trajectory = check(await player(sampler, turn=64, total=40).play(lease(), 0))
    assert (trajectory.status, trajectory.stop_reason, trajectory.num_tokens) == ("truncated", "length", 40)


async def test_an_observation_without_room_for_an_answer_is_left_out(guided: Guided) -> None:
    trajectory = check(await player(guided, "long", total=200).play(lease(), 0))
    assert (trajectory.status, trajectory.stop_reason) == ("truncated", "length")
    assert trajectory.num_tokens < 200
    assert trajectory.segments[0].loss_mask[-1] == 1


async def test_a_prompt_as_long_as_the_budget_is_truncated_before_the_sampler_is_asked(guided: Guided) -> None:
    trajectory = check(await player(guided, total=5).play(lease(), 0))
    assert (trajectory.status, trajectory.stop_reason, trajectory.num_tokens, trajectory.num_trained_tokens) == ("truncated", "length", 5, 0)
    assert guided.prompts == []


async def test_the_budget_never_exceeds_what_is_left_of_the_context(guided: Guided) -> None:
    guided.max_context = 90
    trajectory = await player(guided, total=512, turn=64).play(lease(), 0)
    assert all(len(prompt) + params.max_tokens <= 90 for prompt, params, _ in guided.prompts)
    assert trajectory.num_tokens <= 90


async def test_tokens_carry_the_version_that_sampled_them_and_prompts_that_of_the_token_before(guided: Guided) -> None:
    guided.versions = [5, 7, 7]
    trajectory = await player(guided).play(lease(), 0)
    (segment,) = trajectory.segments
    first, second = int(segment.turn_starts[1]), int(segment.turn_starts[3])
    assert segment.version_starts.tolist() == [0, second]
    assert segment.version_values.tolist() == [5, 7]
    assert set(segment.token_versions()[first:second]) == {5}
    assert trajectory.version_range() == (5, 7)


async def test_weights_that_go_back_during_an_episode_make_it_invalid(guided: Guided) -> None:
    guided.versions = [5, 4, 4]
    trajectory = check(await player(guided).play(lease(), 0))
    assert (trajectory.status, trajectory.stop_reason) == ("failed", "infra")
    assert "went back from version 5 to 4" in trajectory.error


async def test_a_sampler_that_fails_is_the_actors_failure_and_not_the_episodes(guided: Guided) -> None:
    guided.failure = WeightsError("not the weights it claims")
    with pytest.raises(WeightsError, match="not the weights"):
        await player(guided).play(lease(), 0)
    assert guided.released == ["0/train/4/0/0"]


async def test_environments_are_used_again_after_a_good_episode_only(guided: Guided) -> None:
    good, bad = player(guided), player(guided, "raise")
    await good.play(lease(), 0)
    kept = good.envs.take("test-rollout/Echo-v0")
    assert getattr(kept, "heard", None), "the very instance that was played"
    await bad.play(lease(), 0)
    assert not getattr(bad.envs.take("test-rollout/Echo-v0"), "heard", None), "a new instance"
    good.envs.give_back(kept, "test-rollout/Echo-v0")
    good.envs.close()


def test_a_record_without_tokens_still_makes_a_row() -> None:
    segment = Record(version=3).segment()
    assert (segment.num_tokens, segment.num_trained_tokens, segment.version_values.tolist()) == (1, 0, [3])


def failed(error: str) -> Trajectory:
    return Trajectory(
        key=(0, 0, 0, 0), env_id="a/B-v0", task_index=0, seed=0, purpose="train", segments=(), reward=None, status="failed", stop_reason="env", error=error,
    )  # type: ignore[arg-type]  # fmt: skip


def passed() -> Trajectory:
    return Trajectory(
        key=(0, 0, 0, 0), env_id="a/B-v0", task_index=0, seed=0, purpose="train", segments=(), reward=1.0, status="terminated", stop_reason="terminated",
    )  # type: ignore[arg-type]  # fmt: skip


def test_too_many_invalid_episodes_stop_the_run_with_reasons_and_the_commonest_error() -> None:
    guard = InvalidShare(0.5)
    for _ in range(WINDOW):
        guard.count(passed())
    for index in range(50):
        guard.count(failed("odd" if index % 10 == 0 else "no such key"))
    with pytest.raises(EnvError, match=r"51 of the last 100 episodes of a/B-v0 failed \(51 env\).*\(46×\): no such key"):
        guard.count(failed("no such key"))
    assert (guard.num_episodes, guard.num_invalid) == (151, 51)


def test_few_episodes_say_nothing_and_a_bound_of_one_allows_everything() -> None:
    strict, lenient = InvalidShare(0.0), InvalidShare(1.0)
    strict.count(passed())
    for _ in range(WINDOW - 2):
        strict.count(failed("x"))
    for _ in range(WINDOW * 2):
        lenient.count(failed("x"))
    with pytest.raises(EnvError):
        strict.count(failed("x"))


def test_the_first_sixteen_episodes_of_an_actor_must_not_all_fail() -> None:
    guard, mixed = InvalidShare(0.5), InvalidShare(0.5)
    for _ in range(FIRST - 1):
        guard.count(failed("no such key"))
    with pytest.raises(EnvError, match=r"16 of the first 16 episodes of a/B-v0 failed \(16 env\).*\(16×\): no such key"):
        guard.count(failed("no such key"))
    mixed.count(passed())
    for _ in range(FIRST * 2):
        mixed.count(failed("no such key"))


async def test_the_first_failure_of_each_kind_is_logged_with_line_and_trace(guided: Guided, caplog: pytest.LogCaptureFixture) -> None:
    made = player(guided, "raise")
    for member in range(3):
        await made.play(lease(), member)
    records = [record for record in caplog.records if record.levelname == "WARNING" and record.name.endswith("endings")]
    assert len(records) == 1
    assert re.search(r"episode=failed status=failed stop_reason=env env=test-rollout/Echo-v0 error=.*\(test_rollout\.py, line \d+\)", records[0].getMessage())
    assert "Traceback" in caplog.text
    assert "in respond" in caplog.text


def test_failures_with_ever_new_texts_stop_being_logged(caplog: pytest.LogCaptureFixture) -> None:
    endings = Endings()
    for number in range(MAX_KINDS * 2):
        endings.failed(EnvError(f"number {number}"), "env", "a/B-v0")
    assert len(caplog.records) == MAX_KINDS
    assert caplog.records[-1].getMessage().endswith("further_kinds=not_logged")


def test_episodes_cut_for_length_are_told_once_with_the_remedy(caplog: pytest.LogCaptureFixture) -> None:
    endings = Endings()
    cut = msgspec.structs.replace(passed(), status="truncated", stop_reason="length")
    for _ in range(LENGTH_AFTER // 2):
        endings.count(passed())
        endings.count(cut)
    assert not caplog.records, "exactly half is not more than half"
    for _ in range(5):
        endings.count(cut)
    assert len(caplog.records) == 1
    assert "actors.sampling.max_trajectory_tokens" in caplog.text
    assert "actors.sampling.max_turn_tokens" in caplog.text


def test_environments_that_cannot_be_closed_cost_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = EnvPool({})
    monkeypatch.setattr(Echo, "close", lambda _: sys.exit(4))
    for env in [pool.take("test-rollout/Echo-v0") for _ in range(3)]:
        pool.give_back(env, "test-rollout/Echo-v0")
    pool.close()
    assert len(caplog.records) == 1
    assert "close=failed" in caplog.text
    assert "SystemExit: 4" in caplog.text
