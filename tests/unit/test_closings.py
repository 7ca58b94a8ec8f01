"""Work for a group ends when the group is closed, and for no other reason."""

from __future__ import annotations

import asyncio

import pytest

from rollstream.actors.closings import Closings, GroupClosed


async def test_what_goes_on_for_a_closed_group_ends_and_the_rest_goes_on() -> None:
    closings = Closings()
    cleaned: list[int] = []

    async def play(group_id: int) -> str:
        try:
            async with closings.unless_closed(group_id):
                try:
                    await asyncio.sleep(0.05 if group_id == 2 else 60)
                finally:
                    cleaned.append(group_id)
        except GroupClosed:
            return "closed"
        return "played"

    playing = [asyncio.create_task(play(group_id)) for group_id in (1, 1, 2)]
    await asyncio.sleep(0)
    assert closings.close([1, 7]) == 2
    assert closings.close([1]) == 0, "once is enough"
    assert await asyncio.gather(*playing) == ["closed", "closed", "played"]
    assert sorted(cleaned) == [1, 1, 2]
    assert closings.close([1, 2]) == 0, "nothing is kept of what has ended"


async def test_a_wait_for_a_slot_ends_too_and_takes_none() -> None:
    closings, slots = Closings(), asyncio.Semaphore(1)

    async def play() -> None:
        async with closings.unless_closed(1), slots:
            await asyncio.sleep(60)

    playing = [asyncio.create_task(play()) for _ in range(2)]
    await asyncio.sleep(0)
    closings.close([1])
    assert [type(ended) for ended in await asyncio.gather(*playing, return_exceptions=True)] == [GroupClosed, GroupClosed]
    await asyncio.wait_for(slots.acquire(), 1)


async def test_an_actor_that_ends_and_timeouts_of_the_work_itself_are_no_closing() -> None:
    closings = Closings()

    async def play(seconds: float) -> None:
        async with closings.unless_closed(1), asyncio.timeout(seconds):
            await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await play(0.01)
    playing = asyncio.create_task(play(60))
    await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
