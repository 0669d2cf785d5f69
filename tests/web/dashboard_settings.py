"""The node's real settings as `GET config` tells them, and a `POST config` that keeps them in memory."""

from typing import Any, get_args, get_origin

from node.config import Config
from node.settings import FIELDS, SECRET, public_values
from node.settings import Settings as NodeSettings
from web.answers import Refused

LIMITS = {
    "limits.quiet_hours": ("", "str", "when not to train, local time, like 22:00-08:00; empty: never"),
    "limits.hours_per_day": (0.0, "float", "hours of training in a calendar day; 0: no limit"),
    "limits.upload_kbps": (0, "int", "upload, kB a second; 0: no limit"),
    "limits.download_kbps": (0, "int", "download, kB a second; 0: no limit"),
    "limits.disk_mb": (0, "int", "the whole home, in MB; 0: no limit"),
    "limits.gpu_memory_share": (0.0, "float", "share of the GPU's memory; 0: no limit"),
}


def kind(annotation: Any) -> tuple[str, list[str] | None]:
    """`type` and `choices` of a field."""
    text = str(annotation)
    if "Literal" in text and "tuple" not in text:
        return "choice", list(get_args(annotation))
    if annotation in (bool, int, float):
        return annotation.__name__, None
    return ("list" if "tuple" in text or get_origin(annotation) is tuple else "str"), None


class Settings:
    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        for key, entry in public_values(NodeSettings(Config(), dict.fromkeys(FIELDS, "default"))).items():
            type, choices = kind(FIELDS[key].annotation)
            self.entries[key] = {
                **entry,
                "applies": "restart",
                "type": type,
                "choices": choices,
                "secret": key in SECRET,
            }
        for key, (default, type, help) in LIMITS.items():
            self.entries[key] = {"value": default, "source": "default", "default": default, "help": help,
                                 "applies": "now", "type": type, "choices": None, "secret": False}  # fmt: skip
        self.entries["web.port"] |= {"source": "SHOAL_WEB_PORT", "value": 8421}
        self.entries["rollout.group_size"] |= {"source": "config.toml", "value": 16}

    def change(self, wanted: dict[str, Any]) -> dict[str, Any]:
        for key, value in wanted.items():
            if key == "limits.hours_per_day" and not 0 <= value <= 24:
                raise Refused(400, f"{key}: {value} is not between 0 and 24", "give hours of a day, or 0 for no limit")
        for key, value in wanted.items():
            self.entries[key] |= {"value": value, "source": "config.toml"}
        now = [key for key in wanted if self.entries[key]["applies"] == "now"]
        return {"applied": now, "restart": [key for key in wanted if key not in now],
                "config": {key: self.entries[key] for key in wanted}}  # fmt: skip
