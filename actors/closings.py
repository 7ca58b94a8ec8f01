"""Work that is of no use any more once the buffer has closed its group: ended where it stands, without harm to the actor."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable


class GroupClosed(Exception):
    """Nobody waits for the group any more."""


class Closings:
    """What goes on for which group. ``num_cancelled`` counts the episodes that were ended, or not begun, since their group was closed."""

    def __init__(self) -> None:
        self.num_cancelled = 0
        self._scopes: dict[int, set[asyncio.Timeout]] = {}

    @contextlib.asynccontextmanager
    async def unless_closed(self, group_id: int) -> AsyncGenerator[None, None]:
        """Ends its block with :class:`GroupClosed` once :meth:`close` names the group; whatever the block awaits then is cancelled."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.setdefault(group_id, set()).add(scope)
                try:
                    yield
                finally:
                    self._forget(group_id, scope)
        except TimeoutError:
            if not scope.expired():
                raise
            raise GroupClosed from None

    def close(self, group_ids: Iterable[int]) -> int:
        """Ends what goes on for these groups; gives how much that is."""
        now = asyncio.get_running_loop().time()
        scopes = [scope for group_id in group_ids for scope in self._scopes.pop(group_id, ())]
        for scope in scopes:
            scope.reschedule(now)
        return len(scopes)

    def _forget(self, group_id: int, scope: asyncio.Timeout) -> None:
        scopes = self._scopes.get(group_id, set())
        scopes.discard(scope)
        if not scopes:
            self._scopes.pop(group_id, None)
