"""From one recorded stream: N steps, a SIGKILL of the whole learner, a resume and N more equal 2 N steps to the last bit, whatever holds the policy."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

import rank_nursery
import ranked
import recorded_run
from rollstream.buffer.deal import costs, deal
from rollstream.buffer.header import header_of
from rollstream.buffer.recorded import Recorded
from rollstream.buffer.types import Batch
from rollstream.configs.learner_schema import FsdpPolicy
from rollstream.configs.loader import load_run
from rollstream.learner.loop import learn_from
from rollstream.learner.meeting import join
from rollstream.learner.ranks import Ranks

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

N = 3
SETTINGS = (
    f"learner.versions={2 * N}",
    "learner.checkpoint={every: 2, keep_last: 9}",
    "learner.updates={mini_batches: 2}",
    "learner.loss={kl: k2, kl_coef: 0.01}",
)
LORA = "learner.policy.lora={rank: 4, alpha: 8, dropout: 0.2}"
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ()),
    "fsdp of one rank": (1, ("learner.policy.kind=fsdp", "learner.policy.ranks=1")),
    "fsdp of two ranks": (2, ("learner.policy.kind=fsdp", "learner.policy.ranks=2")),
    "adapters that drop inputs, two ranks": (2, ("learner.policy.kind=fsdp", "learner.policy.ranks=2", LORA)),
}


class Stream(ranked.Source):
    """The recorded batches of the run in ``folder``, dealt to a rank."""

    def __init__(self, folder: Path, ranks: Ranks, before: Callable[[int], None]) -> None:
        super().__init__(ranks, before)
        self.folder = folder

    def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
        self.before(version)
        with Recorded(self.folder) as source:
            whole = source.batch(version)
            buffer, advantage = load_run(self.folder).config.buffer, load_run(self.folder).config.learner.advantage
        header = header_of(whole)
        mine = deal(costs(header, whole.withheld, advantage, buffer.degenerate), self.ranks.num)[self.ranks.rank]
        return msgspec.structs.replace(whole, header=header, trajectories=tuple(whole.trajectories[index] for index in mine))


def main(job: str, folder: Path, rank: int, num: int) -> None:
    torch.set_num_threads(1)
    kill_at = int(job)

    def before(version: int) -> None:
        if version == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    run = load_run(folder)
    several = isinstance(run.config.learner.policy, FsdpPolicy)
    ranks = join(folder / "meeting", rank, num, device="cpu", timeout_s=60) if several else Ranks()
    source = Stream(folder.parents[1] / "stream" / folder.name, ranks, before)
    learn_from(run, source, threading.Event(), ranks)
    (folder / f"digests-{rank}.json").write_text(json.dumps(source.digests))
    ranks.close()


@pytest.fixture(scope="module")
def nurse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Path]]:
    torch.set_num_threads(1)
    made = rank_nursery.Nursery(__file__)
    folder = tmp_path_factory.mktemp("exact")
    run = recorded_run.make_run(folder / "stream", *SETTINGS)
    stream = recorded_run.Stream(run)
    learn_from(run, stream, threading.Event())
    stream.close()
    yield made, folder
    made.close()


def state(folder: Path) -> dict[str, torch.Tensor]:
    """Everything the last checkpoint holds in tensors: weights or adapters, moments, steps, random numbers."""
    last = folder / f"checkpoints/v{2 * N:06d}"
    found = {f"{path.relative_to(last)} {name}": tensor for path in last.rglob("*.safetensors") for name, tensor in load_file(path).items()}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict | list):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                add(f"{name} {key}", item)
        elif isinstance(value, torch.Tensor | float | int):
            found[name] = torch.as_tensor(value)

    add("training", torch.load(last / "training.pt", weights_only=True))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_and_a_resume_after_n_steps_leave_no_trace(nurse: tuple[Any, Path], kind: str) -> None:
    nursery, folder = nurse
    num, policy = KINDS[kind]
    whole, killed = (recorded_run.make_run(folder / f"{kind} {name}", *SETTINGS, *policy) for name in ("whole", "killed"))
    for run, job, code in ((whole, 0, 0), (killed, N + 1, -signal.SIGKILL), (killed, 0, 0)):
        codes, errors = nursery.run(str(job), run.folder, num)
        assert codes == [code] * num, "\n".join(errors)
    expected, found = state(whole.folder), state(killed.folder)
    assert expected.keys() == found.keys()
    assert any("exp_avg" in name for name in expected)
    assert not [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    assert ranked.followed(killed.folder) == ranked.followed(whole.folder)
    assert len(ranked.followed(whole.folder)) == 2 * N
    digests = [json.loads((run.folder / "digests-0.json").read_text()) for run in (whole, killed)]
    assert str(2 * N) in digests[1]
    assert digests[1].items() <= digests[0].items()


if __name__ == "__main__":
    rank_nursery.serve(main)
