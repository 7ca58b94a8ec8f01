"""Rollstream: asynchronous actor-learner reinforcement learning of language models.

Everything public is imported from here. Attributes load on first use (PEP 562), so ``import rollstream`` loads neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .configs.loader import load_config
    from .configs.schema import Config
    from .envs.chat import ChatEnv, Message, Turn, tool
    from .envs.messages import assistant, assistant_call, tool_result, user
    from .envs.registry import register, registered_ids
    from .errors import RollstreamError

__version__ = "0.1.0"

_HOMES = {
    "load_config": "configs.loader",
    "Config": "configs.schema",
    "ChatEnv": "envs.chat",
    "Message": "envs.chat",
    "Turn": "envs.chat",
    "tool": "envs.chat",
    "assistant": "envs.messages",
    "assistant_call": "envs.messages",
    "tool_result": "envs.messages",
    "user": "envs.messages",
    "register": "envs.registry",
    "registered_ids": "envs.registry",
    "RollstreamError": "errors",
}

__all__ = [
    "ChatEnv",
    "Config",
    "Message",
    "RollstreamError",
    "Turn",
    "__version__",
    "assistant",
    "assistant_call",
    "load_config",
    "register",
    "registered_ids",
    "tool",
    "tool_result",
    "user",
]


def __getattr__(name: str) -> object:
    """Loads a public attribute from its home module the first time it is asked for."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names."""
    return __all__
