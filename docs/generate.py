"""Writes the reference pages that are made from the code: ``python docs/generate.py``. A test compares them with what is committed."""

from __future__ import annotations

from pathlib import Path

from rollstream.configs.explain import Key, Part, parts

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

<!-- Made by docs/generate.py from configs/schema.py; change the meanings there. -->

Every key of a configuration file. Values come, lowest first, from the defaults below, the preset named by `learner.preset`, the YAML file, and overrides
`a.b=value` on the command line. A mapping given there is merged into the section that is there, key by key: `learner.optimizer={weight_decay: 0.1}` leaves
the learning rate alone. It takes the section's place where it names another `kind` of it; lists and all other values replace. To begin a section anew, set
it to `null` first (`env.kwargs=null 'env.kwargs={colour: red}'`). A key that is not listed is refused. Beyond these bounds `rollstream check` tests what the
keys mean together. `rollstream show-config CONFIG` prints the resolved values, with `--explain` also the meanings. A key without a default is required.
"""


def page() -> str:
    """The whole text of ``configuration.md``."""
    return "\n".join([HEAD, *(_section(part) for part in parts())])


def _section(part: Part) -> str:
    title = f"`{part.path}`" if part.path else "Top level"
    kind = f", kind `{part.kind}`" if part.kind else ""
    rows = "\n".join(_row(key) for key in part.keys)
    table = f"\n| key | type | bound | default | meaning |\n| --- | --- | --- | --- | --- |\n{rows}\n" if rows else ""
    return f"## {title}{kind}\n\n{part.text}\n{table}"


def _row(key: Key) -> str:
    default = f"`{key.default}`" if key.default else ""
    cells = (f"`{key.path.rpartition('.')[2]}`", key.type, key.bound, default, key.meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
