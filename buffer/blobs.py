"""Images and other media: bytes that trajectories name by digest.

A *blob* travels once and is stored once, under its digest (the BLAKE3 hash of its bytes). A trajectory's rows say where in its tokens the blob belongs
(:class:`~rollstream.buffer.types.MediaSpan`); whoever appends it gives the bytes beside it:

    blob = Blob.of(png, "image/png")
    segment = Segment(..., media=(blob.span(start=12, length=64),))
    await client.append(Trajectory(..., segments=(segment,)), blobs=[blob])

and a batch carries them as ``batch.blobs[digest]``.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

from blake3 import blake3

from ..errors import Corrupt, DataRefused
from .types import MediaSpan, Trajectory

MAX_BLOB_BYTES = 32 * 2**20
"""Of one blob; larger ones are refused where they are made."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether ``text`` is a BLAKE3 hash in 64 lower-case hex digits."""
    return _DIGEST.fullmatch(text) is not None


def digest_of(data: Any) -> str:
    """The digest of some bytes: BLAKE3, as strong as sha256 and several times as fast, which counts where every image is hashed by each who takes it in."""
    return blake3(data).hexdigest()


class Blob(NamedTuple):
    """One image, encoded (``data``), of the type ``mime``, under its digest."""

    digest: str
    mime: str
    data: bytes

    @classmethod
    def of(cls, data: bytes, mime: str) -> Self:
        """``data`` with its digest.

        Raises:
            DataRefused: it is empty, or larger than any blob may be.

        """
        if not 0 < len(data) <= MAX_BLOB_BYTES:
            raise DataRefused(f"a blob of {len(data):,} bytes; it must have between 1 and {MAX_BLOB_BYTES:,}: encode the image smaller")
        return cls(digest_of(data), mime, bytes(data))

    def span(self, start: int, length: int) -> MediaSpan:
        """Where its placeholder tokens lie in a segment."""
        return MediaSpan(self.digest, self.mime, start, length)


def digests_in(trajectories: Iterable[Trajectory]) -> list[str]:
    """Every digest that these name, once each, in the order they come."""
    return list(dict.fromkeys(span.digest for trajectory in trajectories for segment in trajectory.segments for span in segment.media))


class BlobCache:
    """Blobs a learner has fetched, at most ``max_bytes`` beyond those in use; the ones used longest ago go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def gather(self, digests: Iterable[str], fetch: Callable[[list[str]], Mapping[str, bytes]]) -> dict[str, bytes]:
        """The blobs of these digests; ``fetch`` gives what is not held yet.

        Raises:
            Corrupt: ``fetch`` gave bytes of another digest, or not all.

        """
        wanted = list(digests)
        missing = [digest for digest in wanted if digest not in self._blobs]
        fetched = fetch(missing) if missing else {}
        for digest in missing:
            data = fetched.get(digest)
            if data is None or digest_of(data) != digest:
                raise Corrupt(f"the bytes of blob {digest} {'did not come' if data is None else 'do not match their digest'}; run `rollstream audit`")
            self._blobs[digest] = data
            self._num_bytes += len(data)
        found = {digest: self._blobs[digest] for digest in wanted}
        for digest in found:
            self._blobs.move_to_end(digest)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._blobs.popitem(last=False)[1])
        return found
