"""Several ranks of a learner as processes: the same gradients, the same run, and failures that all of them share."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import rank_nursery
from ranked import PLAIN, VALUED, VERSIONS, Source, batch, caught, config, followed, rows
from rollstream.buffer.types import Batch, Trajectory
from rollstream.configs.learner_schema import FsdpPolicy
from rollstream.configs.run_folder import Run
from rollstream.errors import Corrupt, DataRefused, DeadlineExceeded, RankFailed, RoleFailed
from rollstream.learner.fsdp import ShardedPolicy
from rollstream.learner.intake import take
from rollstream.learner.loop import learn_from
from rollstream.learner.meeting import join
from rollstream.learner.optimizer import adamw
from rollstream.learner.policy import Policy
from rollstream.learner.publisher import digest_of
from rollstream.learner.ranks import Ranks, naming_the_lost
from rollstream.learner.step import Stepper
from rollstream.models import load_policy

pytestmark = pytest.mark.timeout(400)


KILLED_AT = 4
SHAPE: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "tie_word_embeddings": True, "initializer_range": 0.2,
}  # fmt: skip
TIS = {"level": "token", "mode": "truncate", "high": 2.0}
MASKED = {"level": "sequence", "mode": "mask", "low": 0.2, "high": 5.0}
BATCH_STD = {"mode": "batch_std", "std_over": "live"}
CASES: dict[str, dict[str, Any]] = {
    "whole gradients, one exchange": {"dtype": "float64"},
    "an exchange per micro-batch": {"dtype": "float64", "budget": 40, "policy": {"reduce": "micro_batch"}},
    "weights kept between micro-batches": {"dtype": "float64", "budget": 40, "policy": {"reshard_after_forward": False}},
    "activations computed again": {"dtype": "float64", "budget": 40, "policy": {"activation_checkpointing": True}},
    "float32": {"dtype": "float32", "budget": 40},
    "experts": {"dtype": "float32", "budget": 40, "family": "moe"},
    "m2po": {"dtype": "float64", "budget": 40, "loss": {"kind": "m2po", "old": "mu", "m2_threshold": 0.01}},
    "self-normalised, by trajectory": {
        "dtype": "float64", "budget": 40,
        "loss": {"kind": "ppo", "old": "prox", "correction": [TIS, MASKED], "correction_unit": "trajectory", "self_normalise": True},
    },
    "means over sequences": {"dtype": "float64", "budget": 40, "loss": {"kind": "gspo", "agg": "seq_mean_token_mean"}, "advantage": BATCH_STD},
    "bfloat16": {"dtype": "float32", "budget": 40, "policy": {"compute_dtype": "bfloat16"}},
}  # fmt: skip


def stepper_of(case: dict[str, Any], ranks: Ranks) -> tuple[Any, Stepper]:
    torch.manual_seed(0)
    kind, shape = Qwen3ForCausalLM, Qwen3Config(**SHAPE)
    if case.get("family") == "moe":
        kind, shape = Qwen3MoeForCausalLM, Qwen3MoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    model: Any = kind(shape).to(getattr(torch, case["dtype"]))
    settings = {"tokens_per_micro_batch": case.get("budget", 1000), "loss": case.get("loss", PLAIN), "advantage": case.get("advantage", {"mode": "grpo"})}
    if ranks.joined:
        wanted = config(**settings, policy={"kind": "fsdp", "ranks": ranks.num, **case.get("policy", {})})
        assert isinstance(wanted.learner.policy, FsdpPolicy)
        policy: Policy = ShardedPolicy(model, wanted.learner.policy, ranks)
    else:
        single = {name: value for name, value in case.get("policy", {}).items() if name == "compute_dtype"}
        wanted = config(**settings, policy=single)
        policy = Policy(model, wanted.learner.policy)
    return model, Stepper(policy, adamw(model.named_parameters(), [], rate=1e-2), wanted)


def gradients(case: dict[str, Any], ranks: Ranks) -> tuple[torch.Tensor, dict[str, float]]:
    """All gradients of one step's loss, flat and whole, and its figures."""
    model, stepper = stepper_of(case, ranks)
    found = stepper.differentiate(stepper.prepare(batch(1, ranks.rank, ranks.num)))
    whole = [parameter.grad.full_tensor() if ranks.joined else parameter.grad for parameter in model.parameters()]
    return torch.cat([gradient.flatten().double() for gradient in whole]), found.metrics


def run_in(folder: Path, num: int, **learner: Any) -> Run:
    folder.mkdir(parents=True, exist_ok=True)
    policy = {"kind": "fsdp", "ranks": num} if num else {}
    return Run(folder, config(policy=policy, **learner), f"test-{folder}")


# --- what runs in the rank processes ------------------------------------------------------------------------------------------------


def pulls(ranks: Ranks, pull: Callable[[int], Batch | None]) -> tuple[str, int]:
    """What comes of taking a batch in, and how often this rank pulled."""
    count = 0

    class Pulls:
        def pull(self, version: int, on_wait: Callable[[str], None], stop: threading.Event) -> Batch | None:
            nonlocal count
            count += 1
            return pull(count)

    _, stepper = stepper_of({"dtype": "float32"}, ranks)
    found = caught(lambda: take(Pulls(), stepper, 1, lambda reason: None, threading.Event()))
    return found.split("(")[0] if found.startswith("none: Taken") else found, count


def agreements(ranks: Ranks) -> dict[str, tuple[str, int]]:
    mine = batch(1, ranks.rank, ranks.num)

    def damaged(times: int) -> Callable[[int], Batch | None]:
        def pull(count: int) -> Batch | None:
            if ranks.rank == 1 and count <= times:
                raise Corrupt("a frame is damaged")
            return mine

        return pull

    def silent(count: int) -> Batch | None:
        if ranks.rank == 1:
            raise DeadlineExceeded("the buffer did not answer")
        return mine

    refused = msgspec.structs.replace(mine, trajectories=tuple(_with_positive_logprob(one) for one in mine.trajectories)) if ranks.rank else mine
    other = msgspec.structs.replace(mine, withheld=frozenset({(3, 0)})) if ranks.rank else mine
    return {
        "damaged twice": pulls(ranks, damaged(2)),
        "damaged always": pulls(ranks, damaged(9)),
        "silent": pulls(ranks, silent),
        "other batches": pulls(ranks, lambda count: other),
        "one stops": pulls(ranks, lambda count: None if ranks.rank else mine),
        "bad rows": pulls(ranks, lambda count: refused),
    }


def _with_positive_logprob(one: Trajectory) -> Trajectory:
    first = one.segments[0]
    return msgspec.structs.replace(one, segments=(msgspec.structs.replace(first, behaviour_logprobs=np.ones(first.num_tokens, np.float32)), *one.segments[1:]))


def refusal(ranks: Ranks) -> tuple[str, bool]:
    """One rank's loss refuses its second micro-batch; whether any gradient is left."""
    model, stepper = stepper_of({"dtype": "float32", "budget": 40}, ranks)
    objective: Any = stepper._objective
    count = 0

    class Faulty:
        needs_proximal_pass = False

        def __call__(self, *arguments: Any) -> Any:
            nonlocal count
            count += 1
            if ranks.rank == 1 and count == 2:
                raise DataRefused("cur is nan at token 3 of row group 4 member 1")
            return objective(*arguments)

    stepper._objective = Faulty()  # type: ignore[assignment]
    found = caught(lambda: stepper.differentiate(stepper.prepare(batch(1, ranks.rank, ranks.num))))
    return found, any(parameter.grad is not None for parameter in model.parameters())


def bundle(folder: Path, ranks: Ranks) -> None:
    """Everything that needs no fresh processes."""
    for place, case in enumerate(CASES.values()):
        found, metrics = gradients(case, ranks)
        if ranks.leads:
            torch.save(found, folder / f"gradients-{place}.pt")
            (folder / f"metrics-{place}.json").write_text(json.dumps(metrics))
    train(folder / "whole", ranks)
    train(folder / "valued", ranks, **VALUED)
    (folder / f"refusal-{ranks.rank}.json").write_text(json.dumps(refusal(ranks)))
    (folder / f"agreements-{ranks.rank}.json").write_text(json.dumps(agreements(ranks)))  # last: one of them asks everybody to stop


def train(folder: Path, ranks: Ranks, kill_at: int = 0, **learner: Any) -> None:
    def before(version: int) -> None:
        if version == kill_at and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    source = Source(ranks, before)
    learn_from(run_in(folder, ranks.num, **learner), source, threading.Event(), ranks)
    (folder / f"told-{ranks.rank}.json").write_text(json.dumps({"told": source.told, "digests": source.digests}))


def main(job: str, folder: Path, rank: int, num: int) -> None:
    torch.set_num_threads(1)
    meeting = folder / "meeting"
    ranks = join(meeting, rank, num, device="cpu", timeout_s=60)
    with naming_the_lost(ranks):
        if job == "bundle":
            bundle(folder, ranks)
        else:
            train(folder / "run", ranks, int(job))
    ranks.close()


# --- the tests ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nurse() -> Iterator[Any]:
    made = rank_nursery.Nursery(__file__)
    yield made
    made.close()


@pytest.fixture(scope="module")
def bundled(tmp_path_factory: pytest.TempPathFactory, nurse: Any) -> Path:
    folder = tmp_path_factory.mktemp("bundled")
    codes, errors = nurse.run("bundle", folder, 2)
    assert codes == [0, 0], "\n".join(errors)
    return folder


@pytest.mark.parametrize("place", range(len(CASES)), ids=list(CASES))
def test_two_ranks_find_the_gradient_and_the_figures_of_one_process(bundled: Path, place: int) -> None:
    name, case = list(CASES.items())[place]
    expected, figures = gradients({**case, "budget": 1000}, Ranks())
    found = torch.load(bundled / f"gradients-{place}.pt", weights_only=True)
    bound = 0.05 if name == "bfloat16" else 1e-12 if case["dtype"] == "float64" else 5e-6
    assert float((found - expected).norm() / expected.norm()) < bound
    metrics = json.loads((bundled / f"metrics-{place}.json").read_text())
    tolerance = 0.05 if name == "bfloat16" else 1e-9 if case["dtype"] == "float64" else 1e-4
    assert metrics == pytest.approx(figures, rel=tolerance, abs=tolerance)


def test_packed_gradients_are_those_of_the_models_own_forward_row_by_row() -> None:
    case = CASES["whole gradients, one exchange"] | {"loss": {"kind": "pg", "old": "cur"}}
    expected, _ = gradients(case, Ranks())
    model, stepper = stepper_of(case, Ranks())
    recorded = batch(1)
    work = stepper.prepare(recorded)
    mask = work.flat.trained(work.plan)
    for row, segment in enumerate(segment for one in recorded.trajectories for segment in one.segments):
        ids = torch.from_numpy(segment.token_ids.astype(np.int64))
        scores = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        trained = torch.from_numpy(mask[work.flat.offsets[row] + 1 : work.flat.offsets[row + 1]])
        (-float(work.plan.row_weight[row] * work.plan.row_advantage[row]) * scores[trained].sum()).backward()
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert float((found - expected).norm() / expected.norm()) < 1e-12


def test_ranks_agree_on_a_batch_pull_again_and_then_fail_together_naming_the_rank(bundled: Path) -> None:
    first, second = (json.loads((bundled / f"agreements-{rank}.json").read_text()) for rank in (0, 1))
    assert [found["damaged twice"] for found in (first, second)] == [["none: Taken", 3]] * 2
    assert first["damaged always"] == ["RankFailed: rank 1 of the learner: a frame is damaged", 3]
    assert second["damaged always"] == ["Corrupt: a frame is damaged", 3]
    assert first["silent"] == ["RankFailed: rank 1 of the learner: the buffer did not answer", 1], "waiting again cures nothing"
    for found in (first, second):
        message, count = found["other batches"]
        assert (message.startswith("RoleFailed: the ranks hold different batches for version 1, pulled 3 times (rank 0 "), count) == (True, 3)
        assert found["one stops"] == ["none: None", 1]
    assert first["bad rows"][0].startswith("RankFailed: rank 1 of the learner: group ")
    assert second["bad rows"][0].startswith("DataRefused: group ")


def test_data_that_one_rank_refuses_in_mid_step_stop_all_of_them_by_name_and_leave_nothing(bundled: Path) -> None:
    message = "cur is nan at token 3 of row group 4 member 1"
    assert json.loads((bundled / "refusal-0.json").read_text()) == [f"RankFailed: rank 1 of the learner: {message}", False]
    assert json.loads((bundled / "refusal-1.json").read_text()) == [f"DataRefused: {message}", False]


def weights(folder: Path, version: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"v{version:06d}" / "model" / "model.safetensors")


def test_a_run_of_two_ranks_is_that_of_one_process_within_noise_and_only_rank_0_speaks(bundled: Path, tmp_path: Path) -> None:
    source = Source(Ranks())
    learn_from(run_in(tmp_path / "single", 0), source, threading.Event())
    ranked, single = followed(bundled / "whole"), followed(tmp_path / "single")
    assert len(ranked) == VERSIONS
    for found, expected in zip(ranked, single, strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert rows(bundled / "whole")[0].keys() == rows(tmp_path / "single")[0].keys()
    assert all(torch.allclose(tensor, weights(tmp_path / "single", VERSIONS)[name], atol=1e-4) for name, tensor in weights(bundled / "whole", VERSIONS).items())
    told = [json.loads((bundled / "whole" / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    assert [word for word in told[0]["told"] if word != "sync"] == [f"trained {version}" for version in range(1, VERSIONS + 1)]
    assert told[0]["digests"]["0"] == source.digests[0], "the same bytes under the same names"
    last = bundled / "whole" / "checkpoints" / f"v{VERSIONS:06d}" / "model"
    assert told[0]["digests"][str(VERSIONS)] == digest_of(load_policy(last), last), "what is published is what is saved"
    assert told[1] == {"told": [], "digests": {}}


def test_values_a_reference_and_several_updates_are_those_of_one_process_within_noise(bundled: Path, tmp_path: Path) -> None:
    learn_from(run_in(tmp_path / "single", 0, **VALUED), Source(Ranks()), threading.Event())
    ranked, single = followed(bundled / "valued"), followed(tmp_path / "single")
    assert len(ranked) == 2
    for found, expected in zip(ranked, single, strict=True):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
    heads = [torch.load(folder / "checkpoints/v000002/training.pt", weights_only=True)["value_head"] for folder in (bundled / "valued", tmp_path / "single")]
    assert all(torch.allclose(heads[0][name], heads[1][name], atol=1e-5) for name in heads[1])


@pytest.mark.slow
def test_a_killed_rank_ends_the_others_and_a_resume_is_exact_with_as_many_and_the_same_within_noise_with_fewer_or_more(
    bundled: Path, nurse: Any, tmp_path: Path
) -> None:
    began = time.monotonic()
    codes, errors = nurse.run(str(KILLED_AT), tmp_path, 2)
    assert codes == [1, -signal.SIGKILL]
    assert "RankFailed: another rank of the learner is gone" in errors[0]
    assert time.monotonic() - began < 120
    assert len(rows(tmp_path / "run")) == KILLED_AT - 1
    for name, num in (("fewer", 1), ("more", 3)):
        shutil.copytree(tmp_path / "run", tmp_path / name / "run")
        codes, errors = nurse.run("0", tmp_path / name, num)
        assert codes == [0] * num, errors
        resumed = weights(tmp_path / name / "run", VERSIONS)
        assert all(torch.allclose(tensor, resumed[key], atol=1e-4) for key, tensor in weights(bundled / "whole", VERSIONS).items())
    codes, errors = nurse.run("0", tmp_path, 2)
    assert codes == [0, 0], errors
    assert followed(tmp_path / "run") == followed(bundled / "whole")
    assert all(torch.equal(tensor, weights(bundled / "whole", VERSIONS)[name]) for name, tensor in weights(tmp_path / "run", VERSIONS).items())
    told = [json.loads((folder / "told-0.json").read_text())["digests"] for folder in (tmp_path / "run", bundled / "whole")]
    assert told[0] == {version: told[1][version] for version in told[0]}


def test_ranks_that_do_not_come_are_named_within_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(
        DeadlineExceeded, match=r"ranks 1, 2 of the learner did not come within 0\.3 s \(learner\.policy\.start_timeout_s\), rank 0 of 3 waited"
    ):
        join(tmp_path / "meeting", 0, 3, device="cpu", timeout_s=0.3)
    with pytest.raises(DeadlineExceeded, match=r"rank 0 of the learner did not come within 0\.3 s"):
        join(tmp_path / "other", 2, 3, device="cpu", timeout_s=0.3)
    assert (tmp_path / "meeting").stat().st_mode & 0o077 == 0


def test_a_failure_of_another_rank_is_an_error_of_its_own_kind() -> None:
    assert issubclass(RankFailed, RoleFailed)
    with pytest.raises(RuntimeError, match="Connection closed by peer"), naming_the_lost(Ranks()):
        raise RuntimeError("Connection closed by peer")


if __name__ == "__main__":
    rank_nursery.serve(main)
