"""``rollstream log``: what the command prints and writes. The reading is done by ``buffer/inspect.py``."""

# pyarrow ships no types
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from .buffer.blob_store import blob_path, digests_of
from .buffer.evaluation_tables import FIRST_GROUP
from .buffer.inspect import EXPORTED, Filter, Inspector, Listed
from .buffer.types import Segment, Trajectory
from .configs.run_folder import Run
from .configs.schema import FolderModel
from .errors import ConfigError

DEFAULT_LIMIT = 50
STATUSES = ("terminated", "truncated", "failed")
_MAX_CELL = 60


def log_lines(run: Run, chosen: Filter, *, show: str | None = None, tokens: bool = False, export: Path | None = None, sql: str | None = None) -> Iterator[str]:
    """Does what ``rollstream log`` was asked, and says so line by line.

    Raises:
        ConfigError: options that do not go together, or that name what is not there.
        Corrupt: rows are damaged, or were removed by retention.

    """
    _check_options(chosen, show, tokens, export, sql)
    with Inspector(run.folder) as inspector:
        if chosen.env is not None and chosen.env not in (known := inspector.envs()):
            raise ConfigError(f"--env {chosen.env}: this run leased {', '.join(known) or 'nothing yet'}")
        if sql is not None:
            yield from _sql(inspector, sql, export, DEFAULT_LIMIT if chosen.limit is None else chosen.limit)
        elif show is not None:
            yield from _show(run, inspector, show, tokens)
        elif export is not None:
            listed = inspector.listed(chosen)
            named: dict[str, None] = {}
            num_rows = _export(_noting(inspector.tables(listed), named), EXPORTED, export)
            removed = f"; the rows of {inspector.num_removed:,} more were removed by retention (buffer.keep_gb)" if inspector.num_removed else ""
            yield f"{export}: {len(listed) - inspector.num_removed:,} trajectories in {num_rows:,} rows{removed}"
            if named:
                yield _export_blobs(run, named, export)
        else:
            yield from _list(inspector, chosen)


def _check_options(chosen: Filter, show: str | None, tokens: bool, export: Path | None, sql: str | None) -> None:
    if chosen.status is not None and chosen.status not in STATUSES:
        raise ConfigError(f"--status {chosen.status} is none of {', '.join(STATUSES)}")
    if chosen.reward_above is not None and chosen.reward_below is not None and chosen.reward_above >= chosen.reward_below:
        raise ConfigError(f"--reward-above {chosen.reward_above:g} is not below --reward-below {chosen.reward_below:g}: nothing lies between them")
    if tokens and show is None:
        raise ConfigError("--tokens needs --show GROUP/MEMBER: it prints the tokens of one trajectory")
    if show is not None and (sql is not None or export is not None):
        raise ConfigError(f"--show and {'--sql' if sql is not None else '--export'} do not go together; give one of them")
    if sql is not None and chosen != Filter(limit=chosen.limit, purpose=chosen.purpose):
        raise ConfigError("--sql and filters do not go together; write the filter into the statement's WHERE")
    if export is None:
        return
    if export.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"--export {export}: the name must end in .parquet or .jsonl")
    if export.exists():
        raise ConfigError(f"--export {export} exists already; remove it or give another name")
    if not export.absolute().parent.is_dir():
        raise ConfigError(f"--export {export}: there is no folder {export.absolute().parent}; make it first")


# --- the list -----------------------------------------------------------------------------------------------------------------------


def _list(inspector: Inspector, chosen: Filter) -> Iterator[str]:
    limited = chosen if chosen.limit is not None else dataclasses.replace(chosen, limit=DEFAULT_LIMIT)
    listed = inspector.listed(limited)
    header = ("group", "member", "attempt", "env", "reward", "status", "tokens", "trained on", "versions", "in version", "lag", "state")
    yield from aligned([header, *(_cells(one) for one in listed)])
    total = inspector.count(chosen)
    more = f"; the newest {len(listed):,} are shown, --limit N shows more" if total > len(listed) else ""
    yield f"{total:,} {'trajectory' if total == 1 else 'trajectories'}{more}"


def _cells(one: Listed) -> tuple[str, ...]:
    status = one.status if one.status == one.stop_reason else f"{one.status}: {one.stop_reason}"
    counts = (str(one.num_tokens), "0" if one.status == "failed" else str(one.num_trained_tokens), _versions(one.min_version, one.max_version))
    lag = "withheld" if one.withheld else _or_dash(one.lag)
    return (
        group_name(one.group_id),
        str(one.member),
        str(one.attempt),
        one.env_id,
        _number(one.reward),
        status,
        *counts,
        _or_dash(one.trained_version),
        lag,
        _state(one),
    )


def _state(one: Listed) -> str:
    """What became of it: a group trains without the members of it that failed."""
    return "left out" if one.status == "failed" and one.state in ("assigned", "trained") else one.state


def group_name(group_id: int) -> str:
    """How a group is called: ``12``, or ``e3`` for the fourth that evaluations played."""
    return str(group_id) if group_id < FIRST_GROUP else f"e{group_id - FIRST_GROUP}"


def group_of(name: str, option: str) -> int:
    """The id of a group called ``name``. Raises :class:`ConfigError` where none can be called so."""
    match = re.fullmatch(r"(e?)(\d{1,12})", name)
    if match is None:
        raise ConfigError(f"{option} {name}: give a group's number, such as 12, or e3 for one of an evaluation")
    return int(match[2]) + (FIRST_GROUP if match[1] else 0)


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows of text as columns, numbers to the right."""
    if rows:
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        right = [all(_NUMBER.fullmatch(row[column]) for row in rows[1:]) for column in range(len(rows[0]))]
        for row in rows:
            cells = (cell.rjust(width) if to_right else cell.ljust(width) for cell, width, to_right in zip(row, widths, right, strict=True))
            yield "  ".join(cells).rstrip()


_NUMBER = re.compile(r"[-+−]?[\d.,]*(e[-+]?\d+)?|nan|–|withheld")


def _versions(oldest: int | None, newest: int | None) -> str:
    return "–" if oldest is None else str(oldest) if oldest == newest else f"{oldest}-{newest}"


def _or_dash(value: object) -> str:
    return "–" if value is None else str(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


# --- one trajectory -----------------------------------------------------------------------------------------------------------------


def _show(run: Run, inspector: Inspector, show: str, tokens: bool) -> Iterator[str]:
    match = re.fullmatch(r"(e?\d{1,12})/(\d{1,9})", show)
    if match is None:
        raise ConfigError(f"--show {show}: give GROUP/MEMBER, such as --show 12/0, or e3/0 for one of an evaluation")
    listed, trajectory = inspector.trajectory(group_of(match[1], "--show"), int(match[2]))
    tokenizer = _tokenizer(run) if tokens else None
    yield from _summary(listed, trajectory)
    if not tokens:
        yield from _messages(trajectory)
    for index, segment in enumerate(trajectory.segments):
        if len(trajectory.segments) > 1:
            yield from ("", f"segment {index}")
        for turn in range(len(segment.turn_starts)):
            yield from _turn(segment, turn, tokenizer)
        for span in segment.media:
            path = blob_path(run.blobs_folder, span.digest)
            lies = f"{path.stat().st_size:,} bytes in {os.path.relpath(path)}" if path.is_file() else "its bytes are not there any more"
            yield f"image at tokens {span.start} to {span.start + span.length}: {span.mime}, {lies}"


def _summary(listed: Listed, trajectory: Trajectory) -> Iterator[str]:
    key, cells = trajectory.key, _cells(listed)
    task = f"{trajectory.env_id} task {trajectory.task_index} seed {trajectory.seed}"
    yield f"group {group_name(key.group_id)} member {key.member} attempt {key.attempt} of lineage {key.lineage}: {task}"
    evaluated = f"evaluated at version {trajectory.segments[0].version_values[0]}"
    batch = (
        evaluated
        if listed.purpose == "eval"
        else "in no batch"
        if listed.trained_version is None
        else f"in the batch of version {listed.trained_version}, {_lag(listed)}"
    )
    yield f"state     {_state(listed)}, {batch}"
    parts = "".join(f"  {name} {value:.4g}" for name, value in trajectory.reward_parts.items())
    yield f"reward    {_number(trajectory.reward)}{parts}"
    if trajectory.env_metrics:
        yield "metrics   " + "  ".join(f"{name} {value:.4g}" for name, value in trajectory.env_metrics.items())
    yield f"ended     {cells[5]}{': ' + trajectory.error if trajectory.error else ''}"
    yield f"tokens    {listed.num_tokens} of which {listed.num_trained_tokens} sampled, by versions {cells[8]} at temperature {trajectory.temperature:g}"
    took = trajectory.finished_at - trajectory.started_at
    yield f"actor     {trajectory.actor_id or '–'}, {took:.2f} s: {trajectory.sampler_s:.2f} s for the sampler, {trajectory.env_s:.2f} s for the environment"


def _lag(listed: Listed) -> str:
    return "withheld for its age" if listed.withheld else f"lag {_or_dash(listed.lag)}"


def _messages(trajectory: Trajectory) -> Iterator[str]:
    yield ""
    for message in json.loads(trajectory.messages):
        calls = "".join(f" → {json.dumps(call.get('function', call), ensure_ascii=False)}" for call in message.get("tool_calls") or ())
        yield f"[{message.get('role', '?')}] {_content(message.get('content'))}{calls}"
    yield ""


def _content(content: object) -> str:
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, ensure_ascii=False)


def _turn(segment: Segment, turn: int, tokenizer: Any) -> Iterator[str]:
    starts = [*segment.turn_starts.tolist(), segment.num_tokens]
    start, stop = starts[turn], starts[turn + 1]
    versions, mask = segment.token_versions()[start:stop].tolist(), segment.loss_mask[start:stop].tolist()
    sampled = [version for version, ours in zip(versions, mask, strict=True) if ours]
    said = f", {len(sampled)} sampled by versions {_versions(min(sampled), max(sampled))}" if sampled else ""
    reward = segment.turn_rewards[turn]
    yield f"turn {turn} {segment.turn_roles[turn]}: tokens {start} to {stop}{said}{'' if reward is None else f', reward {reward:.4g}'}"
    if tokenizer is not None:
        ids, logprobs = segment.token_ids[start:stop].tolist(), segment.behaviour_logprobs[start:stop].tolist()
        header = ("position", "id", "version", "logprob", "mask", "text")
        texts = (json.dumps(tokenizer.decode([token]), ensure_ascii=False) for token in ids)
        columns = zip(range(start, stop), ids, versions, (f"{value + 0.0:.6f}" for value in logprobs), mask, texts, strict=True)
        yield from ("  " + line for line in aligned([header, *([str(value) for value in row] for row in columns)]))


def _tokenizer(run: Run) -> Any:
    from .models import check_model_folder, load_tokenizer

    folder = Path(run.config.model.path) if isinstance(run.config.model, FolderModel) else run.model_folder
    return load_tokenizer(check_model_folder(folder))


# --- SQL and exports ----------------------------------------------------------------------------------------------------------------


def _sql(inspector: Inspector, sql: str, export: Path | None, limit: int) -> Iterator[str]:
    table = inspector.query(sql)
    if export is not None:
        yield f"{export}: {_export([table], table.schema, export):,} rows"
        return
    rows = table.slice(0, limit).to_pylist()
    yield from aligned([table.column_names, *([_cell(row[name]) for name in table.column_names] for row in rows)])
    more = f"; the first {limit:,} are shown, --limit N shows more" if table.num_rows > limit else ""
    yield f"{table.num_rows:,} {'row' if table.num_rows == 1 else 'rows'}{more}"


def _cell(value: object) -> str:
    text = _or_dash(value) if not isinstance(value, float) else _number(value)
    text = " ".join(text.split())
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"


def _export(tables: Iterable[pa.Table], schema: pa.Schema, path: Path) -> int:
    """Writes the tables; the file has its name only once it is complete."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        num_rows = _write_parquet(tables, schema, temporary) if path.suffix == ".parquet" else _write_jsonl(tables, temporary)
        temporary.rename(path)
    except OSError as error:
        raise ConfigError(f"--export {path} cannot be written: {error.strerror or error}; free space or give another place") from error
    finally:
        temporary.unlink(missing_ok=True)
    return num_rows


def _noting(tables: Iterable[pa.Table], named: dict[str, None]) -> Iterator[pa.Table]:
    """The tables, and in ``named`` every image that they name."""
    for table in tables:
        for batch in table.to_batches():
            named.update(dict.fromkeys(digests_of(batch)))
        yield table


def _export_blobs(run: Run, named: Iterable[str], export: Path) -> str:
    """Copies the images beside the rows that name them."""
    folder = export.with_name(f"{export.stem}-blobs")
    found = [path for digest in named if (path := blob_path(run.blobs_folder, digest)).is_file()]
    try:
        folder.mkdir(exist_ok=True)
        for path in found:
            shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}; free space, or give --export another place") from error
    return f"{folder}: {len(found):,} images, each named by its digest"


def _write_parquet(tables: Iterable[pa.Table], schema: pa.Schema, path: Path) -> int:
    num_rows = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in tables:
            num_rows += table.num_rows
            writer.write_table(table)
    return num_rows


def _write_jsonl(tables: Iterable[pa.Table], path: Path) -> int:
    num_rows = 0
    with path.open("w", encoding="utf-8") as file:
        for table in tables:
            maps = [field.name for field in table.schema if pa.types.is_map(field.type)]
            for row in table.to_pylist():
                row |= {name: None if row[name] is None else dict(row[name]) for name in maps}
                file.write(json.dumps(_plain(row), ensure_ascii=False) + "\n")
                num_rows += 1
    return num_rows


def _plain(value: Any) -> Any:
    """As JSON has it: what is not a number becomes null, bytes hex, anything else its text."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, str | int | bool) else str(value)
