"""The node's real settings as `GET config` tells them, and a `POST config` that checks as the node does and keeps
changes in memory."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from node.config import Config
from node.settings import (
    FIELDS,
    ConfigError,
    Settings,
    check_keys,
    check_value,
    explain,
    nest,
    public_values,
)
from web.view import SettingOverridden, SettingRefused


class FixtureSettings:
    def __init__(self) -> None:
        self.entries = public_values(Settings(Config(), dict.fromkeys(FIELDS, "default")))
        self.entries["web.port"] |= {"source": "SHOAL_WEB_PORT", "value": 8421}
        self.entries["rollout.group_size"] |= {"source": "config.toml", "value": 16}

    def change(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        try:
            check_keys(wanted, "the request")
            for key, value in wanted.items():
                check_value(key, value, "the request")
            Config.model_validate(nest(wanted))
        except ValidationError as error:
            raise SettingRefused(explain(error, dict.fromkeys(wanted, "the request"))) from error
        except ConfigError as error:
            raise SettingRefused(str(error)) from error
        for key in wanted:
            if (source := self.entries[key]["source"]) not in ("default", "config.toml"):
                raise SettingOverridden(f"{key} is set by the variable {source} ; leave that out")
        now = [key for key in wanted if self.entries[key]["applies"] == "now"]
        for key, value in wanted.items():
            self.entries[key] |= {"source": "config.toml", "value" if key in now else "pending": value}
        return {
            "applied": now,
            "restart": [key for key in wanted if key not in now],
            "restart_by": "shoal down, then shoal up",
            "config": {key: self.entries[key] for key in wanted},
        }
