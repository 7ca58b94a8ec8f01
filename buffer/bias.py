"""The drop-bias report: what was trained against what was left out, by environment, length and reward.

A finished trajectory has one of these fates once it is decided:

    trained    in a batch, scored, not too old
    withheld   in a batch, beyond max_lag: its tokens do not train
    invalid    failed, or never scored
    dropped    scored, but its group was dropped: at its deadline, or for its age after a fork
    late       came after its group had been closed, and was never stored (only counted, with its length)

If what is left out is longer or worse than what is trained, what could be trained depended on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from .ledger import Ledger
from .tables import MemberRow

Fate = Literal["trained", "withheld", "invalid", "dropped", "late"]
LEFT_OUT: tuple[Fate, ...] = ("withheld", "invalid", "dropped", "late")

_DECIDED = """
SELECT env_id, CASE WHEN reward IS NULL OR status = 'failed' THEN 'invalid' WHEN state = 'dropped' THEN 'dropped' ELSE 'trained' END AS fate,
    count(*), sum(num_tokens), count(reward), total(reward)
FROM members JOIN groups USING (group_id) WHERE state IN ('assigned', 'trained', 'dropped') GROUP BY env_id, fate
UNION ALL SELECT env_id, 'late', count(*), sum(num_tokens), count(u.reward), total(u.reward)
FROM unplayed u JOIN groups USING (group_id) WHERE num_tokens IS NOT NULL GROUP BY env_id
"""


@dataclass(slots=True)
class Tally:
    """Sums over trajectories of one environment and one fate; ``num_scored`` of them have the rewards that ``reward`` adds up."""

    num: int = 0
    num_tokens: int = 0
    num_scored: int = 0
    reward: float = 0.0

    def add(self, num_tokens: int, reward: float | None, times: int = 1) -> None:
        """Counts one trajectory; with ``times`` -1 takes it out again."""
        self.num += times
        self.num_tokens += times * num_tokens
        if reward is not None:
            self.num_scored += times
            self.reward += times * reward

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(self.num + other.num, self.num_tokens + other.num_tokens, self.num_scored + other.num_scored, self.reward + other.reward)

    def means(self) -> dict[str, float]:
        """Mean length and reward, those that are known."""
        found = {"tokens_mean": self.num_tokens / self.num} if self.num else {}
        return found | ({"reward_mean": self.reward / self.num_scored} if self.num_scored else {})


class Bias:
    """Tallies by environment and fate, of everything that was decided so far; made from the ledger, kept up from then on."""

    def __init__(self, ledger: Ledger, lineage: int) -> None:
        self._tallies: dict[tuple[str, Fate], Tally] = {}
        for env_id, fate, num, num_tokens, num_scored, reward in ledger.rows(_DECIDED):
            self._tallies[env_id, fate] = Tally(num, num_tokens, num_scored, reward)
        for batch in ledger.batches(lineage):
            for group_id, number in batch.withheld:
                group = ledger.group(group_id)
                member = next((member for member in ledger.members(group_id) if member.member == number), None)
                if group is not None and member is not None and _is_scored(member):
                    self._of(group.env_id, "trained").add(member.num_tokens, member.reward, -1)
                    self._of(group.env_id, "withheld").add(member.num_tokens, member.reward)

    def batch(self, env_id: str, members: Iterable[MemberRow], withheld: set[tuple[int, int]]) -> None:
        """A group was taken into a batch."""
        for member in members:
            decided: Fate = "withheld" if (member.group_id, member.member) in withheld else "trained"
            self._of(env_id, decided if _is_scored(member) else "invalid").add(member.num_tokens, member.reward)

    def drop(self, env_id: str, members: Iterable[MemberRow]) -> None:
        """A group was dropped."""
        for member in members:
            self._of(env_id, "dropped" if _is_scored(member) else "invalid").add(member.num_tokens, member.reward)

    def late(self, env_id: str, num_tokens: int, reward: float | None) -> None:
        """A trajectory came for a group that was closed without it."""
        self._of(env_id, "late").add(num_tokens, reward)

    def _of(self, env_id: str, fate: Fate) -> Tally:
        return self._tallies.setdefault((env_id, fate), Tally())

    def fates(self, env_id: str | None = None) -> dict[Fate, Tally]:
        """The tallies of one environment, or of all."""
        found: dict[Fate, Tally] = {}
        for (known, fate), tally in self._tallies.items():
            if env_id is None or known == env_id:
                found[fate] = found.get(fate, Tally()) + tally
        return found

    def envs(self) -> list[str]:
        """Environments of which anything was decided."""
        return sorted({env_id for env_id, _ in self._tallies})

    def figures(self) -> dict[str, float]:
        """As metrics, ``bias/…`` over all environments and, where there are several, ``bias/ID/…`` for each."""
        row = _figures("bias", self.fates())
        envs = self.envs()
        for env_id in envs if len(envs) > 1 else ():
            row |= _figures(f"bias/{env_id}", self.fates(env_id))
        return row


def left_out(fates: dict[Fate, Tally]) -> Tally:
    """Everything but what was trained."""
    return sum((fates[fate] for fate in LEFT_OUT if fate in fates), Tally())


def _figures(area: str, fates: dict[Fate, Tally]) -> dict[str, float]:
    row = {f"{area}/{fate}_episodes": float(fates.get(fate, Tally()).num) for fate in ("trained", *LEFT_OUT)}
    for name, tally in (("trained", fates.get("trained", Tally())), ("left_out", left_out(fates))):
        row |= {f"{area}/{name}_{mean}": value for mean, value in tally.means().items()}
    return row


def _is_scored(member: MemberRow) -> bool:
    return member.reward is not None and member.status != "failed"
