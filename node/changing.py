"""Changes the settings of a running node: checked as a whole, written to config.toml, taken up where that can be.

The file is replaced at once, so a kill leaves all of a change or none of it; the next start reads what the file says.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from node.config import Config, applies
from node.disk import write_atomic
from node.home import Home
from node.settings import FIELDS, ConfigError, Overridden, Settings, check_keys, edited, load, shown, value_of

WHERE = "the request"


@dataclass(frozen=True, slots=True)
class Change:
    """What came of it."""

    settings: Settings
    """In force from now on."""
    wanted: Config
    """From the next start on."""
    applied: tuple[str, ...]
    """Keys that were asked for, or edited in the file by hand, and are in force now."""
    restart: tuple[str, ...]
    """Those that hold from the next start."""
    said: str
    """For the history: what is another value now than before."""


def change(home: Home, present: Settings, values: Mapping[str, Any]) -> Change:
    """Write 'section.key' -> value into config.toml and say what is in force then; `present` is so until now.

    What the file was changed to by hand meanwhile counts too. Raises ConfigError and Overridden, and then nothing is
    written.
    """
    check_keys(values, WHERE)
    for key in values:
        if present.sources[key] not in ("default", "config.toml"):
            raise Overridden(
                f"{key} is set by {source_in_words(present.sources[key])} of the running node, which overrides the "
                "file ; leave that out, start the node again, and change it then"
            )
    text = edited(home, values, WHERE)
    flags = {key: value_of(present.config, key) for key, source in present.sources.items() if source == "flag"}
    wanted = load(home, flags, tomllib.loads(text))
    now = in_force(present.config, wanted.config)
    try:
        write_atomic(home.config_path, text.encode())
    except OSError as error:
        raise ConfigError(f"{home.config_path} cannot be written: {error} ; mend that, and try again") from error
    changed = [key for key in FIELDS if value_of(wanted.config, key) != value_of(present.config, key)]
    concerned = [*values, *(key for key in changed if key not in values)]
    restart = tuple(key for key in concerned if value_of(now, key) != value_of(wanted.config, key))
    return Change(
        Settings(now, wanted.sources),
        wanted.config,
        tuple(key for key in concerned if key not in restart),
        restart,
        ", ".join(
            f"{key} = {shown(key, value_of(wanted.config, key))!r}" + (" at the next start" if key in restart else "")
            for key in changed
        ),
    )


def in_force(present: Config, wanted: Config) -> Config:
    """`present` with what can change now as in `wanted`.

    Where that does not go together with what cannot, as `train.correction` with `engine.quantization`, only limits.*
    change: they go with everything.
    """
    merged: dict[str, dict[str, Any]] = {}
    for key in FIELDS:
        section, name = key.split(".")
        merged.setdefault(section, {})[name] = value_of(wanted if applies(key) == "now" else present, key)
    try:
        return Config.model_validate(merged)
    except ValidationError:
        kept = {section: getattr(present, section) for section in merged}
        return Config.model_validate({**kept, "limits": merged["limits"]})


def source_in_words(source: str) -> str:
    return "a flag" if source == "flag" else f"the variable {source}"
