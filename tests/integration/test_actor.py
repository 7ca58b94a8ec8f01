"""An actor at a real buffer: leases in, weights in, trajectories out, and every way it leaves."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from actor_world import world
from rollstream.buffer.wire import StatusReply
from rollstream.errors import EnvError, WeightsError


def test_an_actor_fills_batch_after_batch_with_the_versions_it_was_given(tmp_path: Path) -> None:
    with world(tmp_path, buffer={"depth": 1, "max_lag": 2}) as made:
        made.publish(0)
        actor = made.actor()
        for version in range(1, 6):
            batch = made.pull(version)
            assert len(batch.trajectories) == 6
            for trajectory in batch.trajectories:
                assert trajectory.status == "terminated"
                assert trajectory.actor_id == "actor-0"
                low, high = trajectory.version_range() or (-1, -1)
                assert version - 1 - 2 <= low <= high <= version - 1
            made.learner.trained(version)
            made.publish(version)
        assert actor.leave() < 2
        assert actor.error is None


def test_an_actor_passes_over_the_older_versions_that_a_resumed_learner_publishes_again(tmp_path: Path) -> None:
    def held(status: StatusReply) -> list[float]:
        return [peer.gauges.get("version", -1.0) for peer in status.peers if peer.role == "actor"]

    with world(tmp_path, env_kwargs={"wait_s": 0.02}, actors={"sampler": {"kind": "scripted", "token_delay_s": 0.005}}) as made:
        made.publish(0)
        actor = made.actor()
        made.pull(1)
        made.learner.trained(1)
        made.publish(1)
        made.until(lambda status: held(status) == [1.0])
        for _ in range(3):
            made.publish(0)
            made.pull(2)
            time.sleep(0.2)
        made.learner.trained(2)
        made.publish(2)
        status = made.until(lambda status: held(status) == [2.0])
        assert made.pull(3).trajectories
        assert (status.counters["invalid_infra"], status.counters["refused"]) == (0, 0)
        assert actor.error is None


def test_two_actors_share_the_leases_and_play_every_member_once(tmp_path: Path) -> None:
    with world(tmp_path, env_kwargs={"wait_s": 0.01}) as made:
        made.publish(0)
        actors = [made.actor("actor-0"), made.actor("actor-1")]
        players: set[str] = set()
        for version in range(1, 9):
            batch = made.pull(version)
            keys = [trajectory.key[1:3] for trajectory in batch.trajectories]
            assert len(set(keys)) == len(keys) == 6
            players |= {trajectory.actor_id for trajectory in batch.trajectories}
            made.learner.trained(version)
            made.publish(version)
        assert players == {"actor-0", "actor-1"}
        assert all(actor.leave() < 2 for actor in actors)


def test_an_actor_does_not_begin_before_it_holds_the_version_its_lease_asks_for(tmp_path: Path) -> None:
    with world(tmp_path, buffer={"depth": 0, "max_lag": 0}) as made:
        made.actor()
        made.until(lambda status: any(peer.waiting_for == "weights v0" for peer in status.peers))
        made.publish(0)
        made.pull(1)
        made.learner.trained(1)
        status = made.until(lambda status: any(peer.waiting_for == "weights v1" for peer in status.peers))
        (peer,) = [peer for peer in status.peers if peer.role == "actor"]
        assert peer.num_leases == 2
        assert peer.counters["episodes"] == 6
        made.publish(1)
        batch = made.pull(2)
        assert {trajectory.version_range() for trajectory in batch.trajectories} == {(1, 1)}


def test_weights_that_cannot_be_proven_end_the_actor_which_produces_nothing(tmp_path: Path) -> None:
    with world(tmp_path) as made:
        manifest = made.writer.write(0, 0, [("weight", "float32", (256,), memoryview(np.zeros(256, np.float32)))])
        assert manifest is not None
        slot = made.run.weights_folder / f"slot-{manifest.slot:03d}"
        with slot.open("r+b") as file:
            file.seek(-8, 2)
            file.write(b"\xff")
        actor = made.actor()
        actor.join(10)
        assert isinstance(actor.error, WeightsError)
        status = made.until(lambda status: not any(peer.num_leases for peer in status.peers))
        assert status.counters.get("episodes", 0) == 0


def test_environments_that_always_fail_end_the_actor_with_reasons(tmp_path: Path) -> None:
    with world(tmp_path, env_kwargs={"broken": True}, buffer={"depth": 60, "max_lag": 120}) as made:
        made.publish(0)
        actor = made.actor()
        actor.join(30)
        assert isinstance(actor.error, EnvError)
        assert "16 of the first 16 episodes of test-actor/Counting-v0 failed (16 env)" in str(actor.error)
        assert "respond raised KeyError: 'answer'" in str(actor.error)


def test_an_actor_asked_to_stop_gives_its_leases_back_at_once(tmp_path: Path) -> None:
    with world(tmp_path, env_kwargs={"wait_s": 30.0}, buffer={"depth": 1}) as made:
        made.publish(0)
        actor = made.actor()
        made.until(lambda status: any(peer.waiting_for == "environment" for peer in status.peers))
        assert actor.leave() < 2
        assert actor.error is None
        made.until(lambda status: not any(peer.num_leases for peer in status.peers), timeout_s=5)


def test_an_actor_with_fewer_slots_than_a_group_has_members_still_plays(tmp_path: Path) -> None:
    with world(tmp_path, actors={"slots": 2}) as made:
        made.publish(0)
        made.actor()
        assert len(made.pull(1).trajectories) == 6


def test_a_scripted_actor_loads_no_torch(tmp_path: Path) -> None:
    program = (
        "import sys; import rollstream.actors.loop as loop; from rollstream.configs.schema import Config; from rollstream.configs.run_folder import Run;"
        "from pathlib import Path; config = Config.model_validate({'name': 'x', 'env': {'id': 'rollstream/KeyValue-v0'},"
        "'actors': {'sampler': {'kind': 'scripted'}}, 'learner': {'versions': 1, 'batch_groups': 1, 'group_size': 1}});"
        f"sampler, renderers = loop.build_sampler(Run(Path({str(tmp_path)!r}), config, 'x'), config.actors); renderers.of(());"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_the_embedded_sampler_plays_the_tiny_model_from_published_weights(tmp_path: Path) -> None:
    from rollstream import models

    with world(tmp_path, actors={"sampler": {"kind": "torch", "max_batch": 6}}, env_kwargs={"wait_s": 0.001}) as made:
        model = models.load_policy(models.prepare_model(made.run))
        tensors = [(name, "float32", tuple(parameter.shape), memoryview(parameter.detach().numpy()).cast("B")) for name, parameter in model.named_parameters()]
        made.publish(0, tensors)
        made.actor()
        first = made.pull(1)
        made.learner.trained(1)
        made.publish(1, tensors)
        second = made.pull(2)
        assert {trajectory.status for trajectory in (*first.trajectories, *second.trajectories)} <= {"terminated", "truncated"}
        assert all(trajectory.num_trained_tokens > 0 for trajectory in first.trajectories)
