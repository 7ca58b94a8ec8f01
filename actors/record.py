"""The record of an episode while it grows: tokens, mask, log-probabilities and versions together, so that they cannot drift apart."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from ..buffer.types import Segment
from ..errors import InfraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..envs.messages import Message
    from .sampler import Completion


class Record:
    """What has been said in one episode, append-only. ``token_ids`` is what the sampler is given next: the very prefix of what is stored.

    ``version`` is the policy version to note where nothing was sampled before or after.
    """

    def __init__(self, version: int) -> None:
        self.token_ids: list[int] = []
        self.messages: list[Message] = []
        self.turn_rewards: list[float | None] = []
        self._version = version
        self._sampled_any = False
        self._turn_starts: list[int] = []
        self._turn_roles: list[str] = []
        self._pieces: list[tuple[int, Completion | None]] = []

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self.token_ids)

    @property
    def reward(self) -> float:
        """Sum of what the turns were given; an unscored turn gives nothing."""
        return float(sum(reward for reward in self.turn_rewards if reward is not None))

    def said(self, messages: Sequence[Message], ids: Sequence[int]) -> None:
        """Appends what the environment said. ``ids`` may include what closes the policy's turn and what opens its next one; none of it is trained."""
        self._begin_turn(messages[0]["role"])
        self.messages.extend(messages)
        self.token_ids.extend(ids)
        self._pieces.append((len(ids), None))

    def sampled(self, completion: Completion, message: Message) -> None:
        """Appends what the policy sampled, and how it reads as a message.

        Raises :class:`InfraError` where its versions are older than those before: the weights went back while this episode was played.
        """
        if len(completion.versions):
            oldest, newest = int(completion.versions[0]), int(completion.versions[-1])
            if self._sampled_any and oldest < self._version:
                raise InfraError(f"the weights went back from version {self._version} to {oldest} during the episode")
            if (completion.versions[1:] < completion.versions[:-1]).any():
                raise InfraError(f"the weights went back from version {int(completion.versions.max())} to {newest} during a completion")
            self._sampled_any = True
            self._version = newest
        self._begin_turn("assistant")
        self.messages.append(message)
        self.token_ids.extend(completion.token_ids.tolist())
        self._pieces.append((len(completion.token_ids), completion))

    def rewarded(self, reward: float | None) -> None:
        """Gives the latest turn of the policy its reward."""
        last = len(self._turn_roles) - 1 - self._turn_roles[::-1].index("assistant")
        self.turn_rewards[last] = reward

    def segment(self) -> Segment:
        """The training row. An episode that failed before its first token gets one untrained token, since a row has to have one."""
        if not self.token_ids:
            self._begin_turn("user")
            self.token_ids.append(0)
            self._pieces.append((1, None))
        num = len(self.token_ids)
        mask = np.zeros(num, np.uint8)
        logprobs = np.zeros(num, np.float32)
        versions = np.full(num, -1, np.int64)
        at = 0
        for length, completion in self._pieces:
            if completion is not None:
                mask[at : at + length] = 1
                logprobs[at : at + length] = completion.logprobs
                versions[at : at + length] = completion.versions
            at += length
        # What nobody sampled carries the version of the sampled token before it; the first prompt that of the first one.
        first = versions[mask.astype(bool)][:1]
        versions[0:1] = np.where(versions[0:1] < 0, first if len(first) else self._version, versions[0:1])
        versions = np.maximum.accumulate(versions)
        starts = np.flatnonzero(np.diff(versions, prepend=-2))
        return Segment(
            token_ids=np.array(self.token_ids, np.int32),
            loss_mask=mask,
            behaviour_logprobs=logprobs,
            version_starts=starts.astype(np.int32),
            version_values=versions[starts].astype(np.int32),
            turn_starts=np.array(self._turn_starts, np.int32),
            turn_roles=tuple(self._turn_roles),
            turn_rewards=tuple(self.turn_rewards),
        )

    def transcript(self) -> str:
        """The messages as JSON, for people."""
        return json.dumps(self.messages, ensure_ascii=False)

    def _begin_turn(self, role: str) -> None:
        self._turn_starts.append(len(self.token_ids))
        self._turn_roles.append(role)
        self.turn_rewards.append(None)
