"""rollstream/WordCount-v0: describe a thing in exactly so many words. One turn, a dense reward that needs no model to check; for small pretrained models."""

from __future__ import annotations

import re
from typing import Any

from ..errors import ConfigError
from .chat import ChatEnv, Says, Turn
from .messages import Message

TOPICS = (
    *("the sea", "a cat", "winter", "a train", "bread", "the moon", "a forest", "music"),
    *("a city", "rain", "a horse", "coffee", "a garden", "fire", "a river", "sleep"),
)
_WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")


class WordCount(ChatEnv):
    """The policy reads ``Describe the sea in exactly 4 words.`` and answers once.

    * Reward: ``1 - |words - asked| / asked``, at least 0, times the share of words that are different; so 1.0 takes exactly the number asked, none twice.
    * ``success`` is 1 where the reward is 1.

    A word is a run of letters, with apostrophes and hyphens inside it. Arguments:
        least, most: bounds of the number asked, drawn evenly from the seed together with the topic.

    Raises:
        ConfigError: ``least`` below 1 or above ``most``.

    """

    max_turns = 1
    metric_defaults = {"success": 0.0, "words_off": 0.0}  # noqa: RUF012 - declared ClassVar by the base class

    def __init__(self, least: int = 3, most: int = 6) -> None:
        super().__init__()
        if not 1 <= least <= most:
            raise ConfigError(f"env.kwargs of rollstream/WordCount-v0: least is {least} and most {most}; they need 1 <= least <= most")
        self.least, self.most = least, most

    def start(self, task: Any) -> Says:
        """Draws the topic and the number of words. The short system message keeps templates from adding a long one of their own."""
        topic = TOPICS[int(self.np_random.integers(len(TOPICS)))]
        self._asked = int(self.np_random.integers(self.least, self.most + 1))
        return [Message(role="system", content="Be brief."), f"Describe {topic} in exactly {self._asked} word{'s' if self._asked > 1 else ''}."]

    def respond(self, message: Message) -> Turn:
        """Counts the words of the answer."""
        words = [word.casefold() for word in _WORD.findall(message["content"])]
        off = abs(len(words) - self._asked)
        different = len(set(words)) / len(words) if words else 0.0
        reward = max(0.0, 1.0 - off / self._asked) * different
        return Turn(done=True, reward=reward, metrics={"success": float(reward == 1.0), "words_off": float(off)})
