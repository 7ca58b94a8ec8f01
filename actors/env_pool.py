"""Instances of environments between episodes: made when one is missing, used again after an episode that went well."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from ..envs import registry
from ..envs.blame import name_and_text, user_line
from ..errors import EnvError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..envs.chat import ChatEnv


logger = logging.getLogger(__name__)


class EnvPool:
    """Idle environments by id. ``kwargs`` holds arguments of their constructors, by id; an id that it does not name is made as it was registered."""

    def __init__(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        self._kwargs = kwargs
        self._idle: dict[str, list[ChatEnv]] = {}
        self._told: set[str] = set()

    def take(self, env_id: str) -> ChatEnv:
        """An environment nobody else uses. Raises what :func:`rollstream.envs.registry.make` raises."""
        idle = self._idle.get(env_id)
        return idle.pop() if idle else registry.make(env_id, **self._kwargs.get(env_id, {}))

    def num_tasks(self) -> dict[str, int]:
        """How many tasks each environment has, of those with a finite set. One that cannot be made now is left out: its first episode will say why."""
        known: dict[str, int] = {}
        for env_id in self._kwargs:
            try:
                env = self.take(env_id)
            except EnvError as error:
                logger.warning("env=%s num_tasks=unknown error=%s", env_id, json.dumps(str(error)))
                continue
            self.give_back(env, env_id)
            if env.num_tasks is not None:
                known[env_id] = int(env.num_tasks)
        return known

    def give_back(self, env: ChatEnv, env_id: str) -> None:
        """Keeps an environment for the next episode. One whose episode failed is closed instead: who knows what it holds."""
        self._idle.setdefault(env_id, []).append(env)

    def discard(self, env: ChatEnv, env_id: str) -> None:
        """Closes an environment. What its code raises then costs one warning, told once, and no more: its episodes are played."""
        try:
            env.close()
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - a user's code may raise anything
            if env_id not in self._told:
                self._told.add(env_id)
                logger.warning("env=%s close=failed error=%s", env_id, json.dumps(f"{name_and_text(error)}{user_line(error)}"))

    def close(self) -> None:
        """Closes the idle ones."""
        for env_id, envs in self._idle.items():
            for env in envs:
                self.discard(env, env_id)
        self._idle.clear()
