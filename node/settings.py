"""Where settings come from: defaults < config.toml < SHOAL_<SECTION>_<KEY> < flags, each value with its source.

pydantic-settings reads the sources, merges and validates them; what is here names the culprit when something is wrong.
"""

import difflib
import json
import os
import reprlib
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import tomlkit
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)
from tomlkit.exceptions import ParseError

from node.config import Config, applies
from node.config_types import Section
from node.disk import write_atomic
from node.home import Home
from node.redaction import by_form

PREFIX = "SHOAL_"
ALIASES = MappingProxyType({"SHOAL_JOIN": "swarm.join"})
RESERVED = frozenset({"SHOAL_HOME", "SHOAL_CACHE", "SHOAL_PASSPHRASE", "SHOAL_LOG_FORMAT", "SHOAL_TORCH"})
"""Variables that are no settings: where the settings are, secrets, the form of logs, what the installer takes."""
SECRET = frozenset({"swarm.join"})
"""An invite may hold the key of a private network."""


RAISED = "Value error, "
"""What pydantic puts before the words of a check of ours."""


class ConfigError(Exception):
    """A setting is unknown, of the wrong type or out of its limits; names key, value, source and the fix."""


class Overridden(ConfigError):
    """A flag or an environment variable of the running node says otherwise, so that the file would not count."""


@dataclass(frozen=True, slots=True)
class Settings:
    config: Config
    sources: Mapping[str, str]
    """'section.key' -> 'default', 'config.toml', the environment variable's name, or 'flag'."""


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting as ('section.key', field), in the order of node/config.py."""
    for section, outer in Config.model_fields.items():
        assert isinstance(outer.annotation, type)
        assert issubclass(outer.annotation, Section)
        for name, inner in outer.annotation.model_fields.items():
            yield f"{section}.{name}", inner


FIELDS: Mapping[str, FieldInfo] = MappingProxyType(dict(fields()))


def variable(key: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + key.replace(".", "_").upper()


def value_of(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def load(
    home: Home, overrides: Mapping[str, Any] = MappingProxyType({}), content: Mapping[str, Any] | None = None
) -> Settings:
    """Settings of this home. `overrides` are flags: 'section.key' -> value, text or typed. Raises ConfigError.

    `content`: what config.toml is taken to hold, instead of what it does.
    """
    check_keys(overrides, "flag --set")
    by_variable = {variable(key): key for key in FIELDS}
    aliased: dict[str, str] = {}
    for name, text in os.environ.items():
        if name.startswith(PREFIX) and name not in RESERVED and name not in by_variable:
            if name not in ALIASES:
                known = [other.removeprefix(PREFIX) for other in (*by_variable, *ALIASES, *RESERVED)]
                near = difflib.get_close_matches(name.removeprefix(PREFIX), known, 1, 0.5)
                hint = f"did you mean {PREFIX}{near[0]}?" if near else "unset it"
                raise ConfigError(f"unknown environment variable {name} ; {hint}")
            if text:
                aliased[ALIASES[name]] = text

    origins: dict[str, str] = {}

    class Layers(Config, BaseSettings):
        """Made here because the file's path is only known now."""

        model_config = SettingsConfigDict(
            env_prefix=PREFIX,
            env_nested_delimiter="_",
            env_nested_max_split=1,
            env_ignore_empty=True,
            enable_decoding=False,
        )

        @staticmethod
        def settings_customise_sources(  # type: ignore[override]
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            **_others: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file: InitSettingsSource
            if content is None:
                file = TomlConfigSettingsSource(settings_cls, home.config_path)
            else:
                file = InitSettingsSource(settings_cls, dict(content))
            held = flatten(file.init_kwargs, str(home.config_path))
            check_keys(held, str(home.config_path))
            alias = InitSettingsSource(settings_cls, nest(aliased))
            origins.update(dict.fromkeys(held, "config.toml"))
            origins.update({key: next(n for n, k in ALIASES.items() if k == key) for key in aliased})
            origins.update({key: variable(key) for key in flatten(env_settings(), "")})
            origins.update(dict.fromkeys(overrides, "flag"))
            return init_settings, env_settings, alias, file

    try:
        layers = Layers(**nest(overrides))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{home.config_path} is not valid TOML: {error} ; correct that line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(no_text(home.config_path, error)) from error
    except ValidationError as error:
        raise ConfigError(explain(error, origins)) from error
    config = Config(**{section: getattr(layers, section) for section in Config.model_fields})
    return Settings(config, MappingProxyType({key: origins.get(key, "default") for key in FIELDS}))


def no_text(path: Path, error: UnicodeDecodeError) -> str:
    line = error.object.count(b"\n", 0, error.start) + 1
    return f"{path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} in line {line} ; save the file as UTF-8"


def set_value(home: Home, key: str, value: str) -> Any:
    """Write one setting into config.toml, keeping comments and order, and return it as parsed.

    Raises ConfigError, without touching the file, when the file would not be valid with it.
    """
    check_keys([key], "argument KEY")
    text = edited(home, {key: value}, "argument VALUE")
    write_atomic(home.config_path, text.encode())
    return value_of(Config.model_validate(tomllib.loads(text)), key)


def edited(home: Home, values: Mapping[str, Any], where: str) -> str:
    """The text of config.toml with these values ('section.key' -> text or typed) in it, comments and order kept.

    `where` the values are from is named in errors. Raises ConfigError when the file would not be valid with them.
    """
    for key, value in values.items():
        check_value(key, value, where)
    path = home.config_path
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8") if path.exists() else "")
    except ParseError as error:
        raise ConfigError(f"{path} is not valid TOML: {error} ; correct that line") from error
    except UnicodeDecodeError as error:
        raise ConfigError(no_text(path, error)) from error
    content = document.unwrap()
    check_keys(flatten(content, str(path)), str(path))
    for section, changed in nest(values).items():
        content.setdefault(section, {}).update(changed)
    try:
        config = Config.model_validate(content)
    except ValidationError as error:
        raise ConfigError(explain(error, dict.fromkeys(values, where), otherwise=path.name)) from error
    for key in values:
        section, name = key.split(".")
        if section not in document:
            document[section] = tomlkit.table()
        document[section][name] = plain(value_of(config, key))
    return tomlkit.dumps(document)


def check_value(key: str, value: Any, where: str) -> None:
    """Raises ConfigError for what pydantic would take for something else, and what no file holds or no start finds."""
    wrong = ""
    if key == "model.path" and value != "embedded" and not Path(str(value), "config.json").expanduser().is_file():
        wrong = f"{value} is no directory of a model, with its config.json"
    if isinstance(value, bool) and FIELDS[key].annotation is not bool:
        wrong = f"{str(value).lower()} is no value of it"
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        wrong = "it holds half a character"
    if wrong:
        raise ConfigError(f"{key} ({where}): {wrong} ; set it to {allowed(FIELDS[key])}: {FIELDS[key].description}")


def public_values(settings: Settings, wanted: Config | None = None) -> dict[str, dict[str, Any]]:
    """key -> {value, source, default, help, applies, type, choices, secret} in JSON values; secrets are masked.

    `wanted`: what a running node is to have from its next start on; it is the entry's `pending` where it differs.
    """
    table = {}
    for key, field in FIELDS.items():
        kind, choices = kind_of(field)
        table[key] = {
            "value": shown(key, value_of(settings.config, key)),
            "source": settings.sources[key],
            "default": plain(field.default),
            "help": field.description or "",
            "applies": applies(key),
            "type": kind,
            "choices": choices,
            "secret": key in SECRET,
        }
        if wanted is not None and value_of(wanted, key) != value_of(settings.config, key):
            table[key]["pending"] = shown(key, value_of(wanted, key))
    return table


def shown(key: str, value: Any) -> Any:
    """The value for people to see: without secrets, also those in addresses and arguments."""
    if key in SECRET and value:
        return "(hidden)"
    if isinstance(value, str):
        return by_form(value)
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        # as one text, because an argument may be a secret for what the one before it is
        return by_form("\n".join(value)).split("\n")
    return plain(value)


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def kind_of(field: FieldInfo) -> tuple[str, list[str] | None]:
    """The type of a setting for a form, and what there is to choose from."""
    choices = get_args(field.annotation)
    if choices and all(isinstance(choice, str) for choice in choices):
        return "choice", list(choices)
    kinds: dict[Any, str] = {int: "int", float: "float", bool: "bool", str: "str"}
    return kinds.get(field.annotation, "list"), None


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    return nested


def flatten(nested: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{'swarm': {'join': x}} -> {'swarm.join': x}. Raises ConfigError for a value outside of a section."""
    flat = {}
    for section, content in nested.items():
        if not isinstance(content, Mapping):
            near, fix = nearest(section), f"sections are {', '.join(Config.model_fields)}"
            if near is not None:
                fix = f"[{near}] is one: its keys go below it" if near == section else f"did you mean {near}?"
            raise ConfigError(f"{where}: {section} = {content!r} stands in no section ; {fix}")
        flat.update({f"{section}.{name}": value for name, value in content.items()})
    return flat


def check_keys(keys: Mapping[str, Any] | list[str], where: str) -> None:
    for key in keys:
        if key not in FIELDS:
            near = nearest(key[:100])
            hint = f"did you mean {near}?" if near else "`shoal config show` lists all keys"
            raise ConfigError(f"{where}: unknown key {key[:100]} ; {hint}")


def nearest(key: str) -> str | None:
    """The known key, or section for one word, most like this one; a right name in the wrong section counts most."""
    section, _, name = key.partition(".")
    for known in FIELDS:
        if known.split(".")[1] == (name or section):
            return known
    sections = difflib.get_close_matches(section, {known.split(".")[0] for known in FIELDS}, 1)
    if sections and not name:
        return sections[0]
    there = [known for known in FIELDS if known.split(".")[0] in sections]
    close = difflib.get_close_matches(key, there, 1, 0.8) or difflib.get_close_matches(key, FIELDS, 1, 0.5)
    return next(iter(close), None)


def explain(error: ValidationError, origins: Mapping[str, str], otherwise: str = "default") -> str:
    """The first thing wrong: key, value, where it came from, what is allowed."""
    first, *more = error.errors()
    others = f" (and {len(more)} more)" if more else ""
    path = [str(part) for part in first["loc"]]
    key = ".".join(path[:2])
    if key in FIELDS:
        source = origins.get(key, otherwise)
        given = "(hidden)" if key in SECRET else reprlib.repr(first["input"])
        said = first["msg"].removeprefix(RAISED) if first["msg"].startswith(RAISED) else first["msg"].lower()
        return (
            f"{key} = {given} ({source}): {said}{others} ; set it to {allowed(FIELDS[key])}: {FIELDS[key].description}"
        )
    what, _, fix = first["msg"].removeprefix(RAISED).partition("; ")
    if path:
        concerned, where = [name for name in origins if name.startswith(f"{path[0]}.")], f"[{path[0]}] "
    else:  # of settings in several sections
        concerned, where = [name for name in origins if name in what], ""
    sources = ", ".join(f"{name} from {origins[name]}" for name in concerned)
    return f"{where}{what} ({sources}){others} ; {fix}"


def allowed(field: FieldInfo) -> str:
    """A field's type and limits in words."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(field.annotation)))
    bounds = []
    for limit in field.metadata:
        for attribute, words in (("ge", "at least"), ("gt", "over"), ("le", "at most"), ("lt", "below")):
            bound = getattr(limit, attribute, None)
            if bound is not None:
                bounds.append(f"{words} {bound}")
        if getattr(limit, "max_length", None) is not None:
            bounds.append(f"at most {limit.max_length} characters")
        if getattr(limit, "pattern", None) is not None:
            bounds.append(f"something like {field.default}")
    kinds: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    kind = kinds.get(field.annotation, "a list")
    return " ".join([kind, ", ".join(bounds)]).strip()
