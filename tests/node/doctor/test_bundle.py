"""Nothing secret leaves in a support bundle, and it is bounded."""

import base64
import json
import stat
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from node.cli.app import shoal
from node.doctor import examination, stored
from node.doctor.bundle import LINE_CHARACTERS, LOG_LINES, BundleExists, write_bundle
from node.doctor.examination import subject
from node.doctor.finding import ok
from node.history import History
from node.home import Home
from node.redaction import scrub, values
from protocol.invite import Invite
from protocol.manifest import embedded_manifest

PASSPHRASE = "correct horse battery"
HF_TOKEN = "hf_QwErTyUiOpAsDfGhJkL"


def test_no_secret_is_in_any_member(tmp_path: Path, no_variables: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PASSPHRASE", PASSPHRASE)
    monkeypatch.setenv("OTHER_TOKEN", "token-of-another-program")
    home = Home(tmp_path / "home")
    home.init()
    psk = bytes(range(160, 192))
    manifest = embedded_manifest("mine", 0)
    home.found(manifest, psk)
    foreign = Invite(manifest.digest, (), bytes(range(32)), "theirs").to_uri()
    monkeypatch.setenv("SHOAL_JOIN", foreign)
    identity, sealed = home.identity(), home.identity_path.read_text()
    secrets = {
        "api token": home.token(),
        "identity file": sealed,
        "identity seed": identity.private_bytes.hex(),
        "identity seed in base64": base64.b64encode(identity.private_bytes).decode(),
        "encrypted key": json.loads(sealed)["key"],
        "passphrase": PASSPHRASE,
        "psk": psk.hex(),
        "psk in base64": base64.b64encode(psk).decode(),
        "psk as Python shows it": repr(psk),
        "own invite": home.invite_path.read_text(),
        "foreign invite": foreign,
        "variable": "token-of-another-program",
        "somebody's token": HF_TOKEN,
        "anybody's password in a URL": "hunter2hunter2",
        "anybody's login code": "Zm9vYmFyCODE",
        "anybody's api key": "sk-abcdef123456",
        "anybody's variable": "sk-variable",
        "anybody's setting": "sk-quoted",
    }
    planted = [
        # a password, a code or a key of anybody is known by where it stands, not by its value
        *(value for name, value in secrets.items() if "seed" not in name and not name.startswith("anybody's")),
        f"Authorization: Bearer {home.token()}",
        "GET /login?code=Zm9vYmFyCODE HTTP/1.1",
        "proxy http://user:hunter2hunter2@proxy:3128",
        "starting vllm serve --api-key=sk-abcdef123456 --port 1",
        "started with VENDOR_KEY=sk-variable",
        'asked with {"api_key": "sk-quoted"}',
        "harmless words",
    ]
    home.logs.mkdir(exist_ok=True)
    home.config_path.write_text('[engine]\nargs = ["--api-key=sk-abcdef123456"]\n')
    log = [
        json.dumps({"at": "2026-01-01T00:00:00+00:00", "level": "info", "logger": "n", "message": m}) for m in planted
    ]
    home.log_path.write_text("\n".join(log))
    logs = {"averaging.log", "console.log", "stacks.log", "trainer.log", "vllm.log", "vllm-1.log"}
    for name in logs:
        (home.logs / name).write_text("\n".join(planted))
    history = History(home.database, lambda: 1.0)
    for text in planted:
        history.event("info", "config", text)
    history.record_step(1, {"foreign_groups": 0, "reward": 0.5, "text": planted})
    history.close()

    file = tmp_path / "bundle.zip"
    write_bundle(file, subject(home, {}), [ok("home", f"token {home.token()}, {PASSPHRASE}")])

    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with zipfile.ZipFile(file) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"doctor.json", "status.json", "settings.json", "swarm.json", "versions.txt", "node.log",
            "events.json", "steps.json"} | logs <= set(texts)  # fmt: skip
    for member, text in texts.items():
        for name, secret in secrets.items():
            assert secret not in text, (member, name)
            assert json.dumps(secret)[1:-1] not in text, (member, name)
    assert "harmless words" in texts["node.log"]
    assert "harmless words" in texts["vllm.log"]
    assert json.loads(texts["settings.json"])["swarm.join"]["value"] == "(hidden)"
    assert json.loads(texts["swarm.json"])["name"] == "mine"
    assert "torch==" in texts["versions.txt"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("GET /login?code=abcdef&x=1", "GET /login?code=(hidden)&x=1"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer (hidden)"),
        ("http://user:pw@host/x", "http://(hidden)@host/x"),
        ("--api-key=abc --port=1", "--api-key=(hidden) --port=1"),
        ("--hf-token abc next", "--hf-token (hidden) next"),
        ("shoal:" + "A" * 40 + ".", "shoal:(hidden)."),
        ("shoal: no daemon runs", "shoal: no daemon runs"),
        ("token hf_" + "a" * 20, "token (hidden)"),
        ("Set-Cookie: session=1; Path=/", "Set-Cookie: (hidden)"),
        ("OPENAI_API_KEY=sk-abc next", "OPENAI_API_KEY=(hidden) next"),
        ('{"api_key": "sk-a b", "port": 1}', '{"api_key": "(hidden)", "port": 1}'),
        (json.dumps({"message": '"x-api-key": "sk-a b"'}), json.dumps({"message": '"x-api-key": "(hidden)"'})),
        ("password = hunter2 next", "password = (hidden) next"),
        ("db_password='hunter 2'", "db_password='(hidden)'"),
        ("password: hunter2secret next", "password: (hidden) next"),
        ("api_key: sk-abcdef123456 next", "api_key: (hidden) next"),
        ("hf_token: a1b2c3d4e5, next", "hf_token: (hidden), next"),
        ("Authorization: Basic dXNlcjpwdw== next", "Authorization: Basic (hidden) next"),
        ('{"Authorization": "Basic dXNlcjpwdw=="}', '{"Authorization": "Basic (hidden)"}'),
        ("SHOAL_PASSPHRASE=foo bar", "SHOAL_PASSPHRASE=(hidden)"),
        ('{"message": "passphrase: foo bar"}', '{"message": "passphrase: (hidden)"}'),
        ("with sk-proj-" + "aB3_" * 6 + ".", "with (hidden)."),
        ("with ghp_" + "aB3" * 8 + " next", "with (hidden) next"),
        ("with github_pat_" + "aB3_" * 6, "with (hidden)"),
        ("token: 5, tokens: 12, max_tokens: 5", "token: 5, tokens: 12, max_tokens: 5"),
        ("eos_token: <|endoftext|>, pad_token: None", "eos_token: <|endoftext|>, pad_token: None"),
        ("unexpected token: identifier, password: None", "unexpected token: identifier, password: None"),
        ("task-force, disk-2, sk-learn-compatible-estimator", "task-force, disk-2, sk-learn-compatible-estimator"),
        ("authorization: none of these", "authorization: none of these"),
        ('"secret": false, "prompt_tokens": 5', '"secret": false, "prompt_tokens": 5'),
        ("sorted(names, key=len), eos_token_id=2", "sorted(names, key=len), eos_token_id=2"),
        ("12 tokens of prompt-tokens 5", "12 tokens of prompt-tokens 5"),
    ],
)
def test_secrets_of_strangers_are_known_by_their_form(text: str, left: str) -> None:
    assert scrub(text, []) == left


def test_a_cut_leaves_no_half_of_a_secret(home: Home, tmp_path: Path) -> None:
    (home.logs / "vllm.log").write_text("x" * (LINE_CHARACTERS - 20) + " " + home.token())
    write_bundle(tmp_path / "b.zip", subject(home, {}), [])
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert archive.read("vllm.log").decode().endswith("x (hidden)")


def test_a_short_value_is_no_secret(home: Home) -> None:
    assert "1" not in values(home, {"API_KEY": "1"})


def test_a_bundle_is_bounded_and_never_written_over(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination.examine, "__defaults__", ({"home": stored.home},))
    home.log_path.write_text("".join(f"line {i} {'x' * 10_000}\n" for i in range(LOG_LINES + 500)))
    result = CliRunner().invoke(
        shoal, ["--home", str(home.path), "--json", "doctor", "--bundle", str(tmp_path / "b.zip")]
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["checks"]
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        lines = archive.read("node.log").decode().splitlines()
        assert sum(info.file_size for info in archive.infolist()) < 20 << 20
    assert lines[-1].startswith(f"line {LOG_LINES + 499} ")
    assert len(lines) <= LOG_LINES
    assert max(map(len, lines)) <= LINE_CHARACTERS
    with pytest.raises(BundleExists, match="give another file name"):
        write_bundle(tmp_path / "b.zip", subject(home, {}), [])


def test_a_home_that_is_not_there_and_a_broken_database_still_make_a_bundle(tmp_path: Path, home: Home) -> None:
    home.database.write_bytes(b"no database at all, but long enough to have a header" * 40)
    home.config_path.write_text("not toml")
    write_bundle(tmp_path / "broken.zip", subject(home, {}), [])
    with zipfile.ZipFile(tmp_path / "broken.zip") as archive:
        assert "is damaged" in archive.read("steps.json").decode()
        assert "not valid TOML" in archive.read("settings.json").decode()
    write_bundle(tmp_path / "none.zip", subject(Home(tmp_path / "none"), {}), [])
    with zipfile.ZipFile(tmp_path / "none.zip") as archive:
        assert "versions.txt" in archive.namelist()
