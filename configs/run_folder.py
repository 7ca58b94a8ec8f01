"""A run on disk: where everything lives, and how its processes find one another.

runs/NAME/
config.yaml          resolved configuration and its provenance (run id, versions, git commit)
ledger.sqlite        states of every group, recorded batches
stream/              the durable Arrow log
blobs/               images and other media, each once, under its digest
amendments/          what was said later of its rows: scores
keys/                where other machines can reach the buffer: who may speak to it (mode 0700)
model/               the starting policy as a Hugging Face folder
checkpoints/v000000/ one folder per kept version
config.before-NNN.yaml  what config.yaml was before lineage NNN began (a fork)
metrics.jsonl        one object per policy version
evaluations.jsonl    one object per evaluation that has closed, in the order they closed
metrics.abandoned.jsonl  those of versions that a fork left behind; their checkpoints are in checkpoints/abandoned/
tensorboard/         the same numbers
wandb/               and again, where tracking.wandb is set
logs/ROLE.log        what each process wrote
weights/             the newest versions for the actors, while the run lives and weights.channel is files
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .schema import Config


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The fork that this configuration began with: after ``version``, known by ``fork_id``, so that it happens once; ``lineage`` is the one it opens."""

    fork_id: str
    lineage: int
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its folder, its configuration, its identity.

    ``address`` is where a role on another machine reaches the buffer, ``keys`` the copy of the run's client keys it was given; both are None in the run's own
    folder, where the configuration and ``keys/`` say it. ``fork`` is the one that the configuration began with, if it did not begin
    with the run.
    """

    folder: Path
    config: Config
    run_id: str
    address: str | None = None
    keys: Path | None = None
    fork: ForkPoint | None = None

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.folder / "config.yaml"

    @property
    def ledger_path(self) -> Path:
        """SQLite ledger."""
        return self.folder / "ledger.sqlite"

    @property
    def stream_folder(self) -> Path:
        """Arrow log."""
        return self.folder / "stream"

    @property
    def is_local(self) -> bool:
        """Whether the buffer writes the run's folder on this very machine; False where that is not certain."""
        return self.endpoint.startswith("ipc://")

    @property
    def blobs_folder(self) -> Path:
        """Bytes that the log names by digest."""
        return self.folder / "blobs"

    @property
    def amendments_folder(self) -> Path:
        """Log of amendments."""
        return self.folder / "amendments"

    @property
    def model_folder(self) -> Path:
        """The starting policy, a Hugging Face folder with tokenizer and chat template."""
        return self.folder / "model"

    @property
    def checkpoints_folder(self) -> Path:
        """Checkpoints."""
        return self.folder / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """One JSON object per policy version."""
        return self.folder / "metrics.jsonl"

    @property
    def evaluations_path(self) -> Path:
        """One JSON object per evaluation that has closed."""
        return self.folder / "evaluations.jsonl"

    @property
    def abandoned_metrics_path(self) -> Path:
        """The rows of versions that forks left behind."""
        return self.folder / "metrics.abandoned.jsonl"

    @property
    def abandoned_checkpoints_folder(self) -> Path:
        """The checkpoints of such versions, a folder per lineage that was left."""
        return self.checkpoints_folder / "abandoned"

    @property
    def tensorboard_folder(self) -> Path:
        """TensorBoard event files."""
        return self.folder / "tensorboard"

    @property
    def logs_folder(self) -> Path:
        """What each process wrote."""
        return self.folder / "logs"

    @property
    def socket_folder(self) -> Path:
        """Folder of the run's Unix sockets: short, since a path there is limited to 107 bytes, and private to the user."""
        tag = hashlib.sha256(self.run_id.encode()).hexdigest()[:12]
        return Path(tempfile.gettempdir()) / f"rollstream-{os.getuid()}" / tag

    @property
    def bind_endpoint(self) -> str:
        """Where the buffer listens, as ZeroMQ writes it."""
        configured = self.config.buffer.endpoint
        return f"ipc://{self.socket_folder / 'buffer'}" if configured == "ipc" else configured

    @property
    def endpoint(self) -> str:
        """Where the roles reach the buffer; one that listens everywhere is reached over loopback."""
        if self.address is not None:
            return self.address
        return self.bind_endpoint.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")

    @property
    def needs_keys(self) -> bool:
        """Whether the buffer listens where other machines reach it."""
        configured = self.config.buffer.endpoint
        host = configured.removeprefix("tcp://").rpartition(":")[0].strip("[]")
        try:
            return configured != "ipc" and host != "localhost" and not ipaddress.ip_address(host).is_loopback
        except ValueError:  # the check of the configuration says so; nobody gets in meanwhile
            return True

    @property
    def keys_folder(self) -> Path:
        """Keys of the buffer and of those who may speak to it."""
        return self.folder / "keys"

    @property
    def weights_folder(self) -> Path:
        """Where the weights channel lives while the run does: shared memory (the temporary folder where a machine has no ``/dev/shm``), or the run itself."""
        if self.config.weights.channel == "files":
            return self.folder / "weights"
        tag = hashlib.sha256(self.run_id.encode()).hexdigest()[:12]
        memory = Path("/dev/shm")
        base = memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
        return base / f"rollstream-{os.getuid()}-{tag}"
