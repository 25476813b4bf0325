import os
import socket
import time

import pytest
import wandb

from mxtrain.titan.reports import wandb_run
from mxtrain.titan.reports.wandb_run import choose_mode, has_key, is_reachable, wandb_defaults, wandb_facts

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC" or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    wandb.teardown()
    yield
    wandb.teardown()  # its settings are global to the process


@pytest.fixture
def server():
    """The URL of something on this machine that accepts connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def dead_url():
    """The URL of a port on which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def test_has_no_key_by_default():
    assert not has_key(wandb.Settings())


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_key_in_the_environment(monkeypatch, name):
    monkeypatch.setenv(name, KEY)
    assert has_key(wandb.Settings())


def test_key_in_the_settings():
    assert has_key(wandb.Settings(api_key=KEY))


@pytest.mark.parametrize(
    ("machine", "base_url", "expected"),
    [
        ("wandb.example.com", "https://wandb.example.com", True),
        ("wandb.example.com", None, False),
        ("api.wandb.ai", None, True),
        ("api.wandb.ai", "https://wandb.example.com", False),
    ],
)
@pytest.mark.parametrize("place", [".netrc", "_netrc", "$NETRC"])
def test_key_in_netrc(monkeypatch, tmp_path, machine, base_url, expected, place):
    path = tmp_path / place.strip("$")
    path.write_text(f"machine {machine}\n  login user\n  password {KEY}\n")
    path.chmod(0o600)
    if place == "$NETRC":
        monkeypatch.setenv("NETRC", str(path))
    assert has_key(wandb.Settings(base_url=base_url) if base_url else wandb.Settings()) is expected


def test_unreadable_netrc_holds_no_key(tmp_path):
    (tmp_path / ".netrc").write_text("machine\n")
    assert not has_key(wandb.Settings())


def test_reachable(server, dead_url):
    assert is_reachable(server)
    assert not is_reachable(dead_url)


def test_reachable_through_a_proxy(monkeypatch, server, dead_url):
    monkeypatch.setenv("http_proxy", server)
    assert is_reachable("http://wandb.invalid")
    monkeypatch.setenv("http_proxy", dead_url)
    assert not is_reachable("http://wandb.invalid")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert is_reachable(server)


def test_a_name_lookup_that_hangs_is_cut_short(monkeypatch):
    def lookup(address, timeout):
        time.sleep(1)
        raise socket.gaierror

    monkeypatch.setattr(socket, "create_connection", lookup)
    start = time.perf_counter()
    assert not is_reachable("https://wandb.invalid", timeout=0.1)
    assert time.perf_counter() - start < 0.7


def test_mode_needs_a_key_and_a_network(server, dead_url):
    assert choose_mode(wandb.Settings(api_key=KEY, base_url=server)) == "online"
    assert choose_mode(wandb.Settings(api_key=KEY, base_url=dead_url)) == "offline"
    assert choose_mode(wandb.Settings(base_url=server)) == "offline"


def test_without_a_key_the_network_is_not_touched(monkeypatch):
    monkeypatch.setattr(wandb_run, "is_reachable", lambda url: pytest.fail("looked for the network"))
    assert choose_mode(wandb.Settings()) == "offline"


@pytest.mark.parametrize("mode", ["online", "offline", "disabled"])
def test_the_users_mode_stands(monkeypatch, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    assert choose_mode(wandb.Settings()) == mode


def test_the_mode_of_wandbs_settings_file_stands(server):
    assert choose_mode(wandb.Settings(mode="disabled", api_key=KEY, base_url=server)) == "disabled"


def test_defaults_hold_within_the_context_only(monkeypatch):
    with wandb_defaults(run_name="a"):
        assert os.environ["WANDB_PROJECT"] == "mxtrain" and os.environ["WANDB_RUN_NAME"] == "a"
        settings = wandb.setup().settings
        assert settings.mode == "offline" and settings.silent
    assert not {"WANDB_PROJECT", "WANDB_RUN_NAME", "WANDB_MODE", "WANDB_SILENT"} & set(os.environ)


def test_a_run_whose_first_part_is_not_uploaded_stays_offline(monkeypatch, server):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", server)
    for stay_offline, mode in ((True, "offline"), (False, "online")):
        wandb.teardown()
        with wandb_defaults("a", run_id="abc", stay_offline=stay_offline):
            assert os.environ["WANDB_RUN_ID"] == "abc"
            settings = wandb.setup().settings
            assert (settings.mode, settings.resume) == (mode, "allow")
    assert "WANDB_RUN_ID" not in os.environ


def test_what_the_user_set_is_left_alone(monkeypatch):
    user = {"WANDB_PROJECT": "p", "WANDB_RUN_NAME": "n", "WANDB_MODE": "disabled", "WANDB_SILENT": "false"}
    user |= {"WANDB_RUN_ID": "i", "WANDB_RESUME": "must"}
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    with wandb_defaults("a", run_id="abc"):
        assert user.items() <= os.environ.items()
        settings = wandb.setup().settings
        assert settings.mode == "disabled" and not settings.silent and settings.resume == "must"
    assert user.items() <= os.environ.items()


def test_a_broken_wandb_does_not_raise_here(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "sideways")
    with wandb_defaults(run_name="a"):
        pass


def test_facts_of_no_run():
    assert wandb_facts() == {"mode": "disabled", "id": None, "dir": None, "url": None, "sync": None}


def test_facts_of_a_run(tmp_path):
    folder = tmp_path / "with space"
    folder.mkdir()
    with wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True)) as run:
        facts = wandb_facts(run)
    assert facts["mode"] == "offline" and facts["url"] is None and facts["id"] == run.id
    assert list((folder / "wandb").glob("offline-run-*")) == [wandb_run.Path(facts["dir"])]
    assert facts["sync"] == f"wandb sync '{facts['dir']}'"
