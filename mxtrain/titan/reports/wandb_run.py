"""Start wandb so that it never blocks or stops a training run.

TorchTitan's ``WandBLogger`` calls ``wandb.init`` with settings from the environment. Without a key that call prompts or
fails, and without a network it blocks for minutes. In both cases this module starts the run offline, which records the
same data for ``wandb sync``. WANDB_MODE, WANDB_SILENT, WANDB_PROJECT, WANDB_RUN_NAME, WANDB_RUN_ID and WANDB_RESUME
stay as the user set them.
"""

import netrc
import os
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from mxtrain.titan.reports.wandb_resume import sync_command

NETWORK_TIMEOUT = 2.0
"""Seconds to wait for wandb's server before a run starts offline"""


@contextmanager
def wandb_defaults(run_name: str, run_id: str | None = None, stay_offline: bool = False):
    """Context in which ``wandb.init`` starts silently, in a mode that works here, with mxtrain's project and run name.

    With ``run_id`` it continues the wandb run of that id, or starts it. With ``stay_offline`` it does so offline,
    unless WANDB_MODE is set.

    Does not raise if wandb is missing or misconfigured: ``wandb.init`` raises the same, and TorchTitan reports it.
    """
    names = {"WANDB_PROJECT": "mxtrain", "WANDB_RUN_NAME": run_name}
    if run_id is not None:
        names["WANDB_RUN_ID"] = run_id
    added = [key for key in names if key not in os.environ]
    os.environ.update({key: names[key] for key in added})
    try:
        with suppress(Exception):  # see the docstring
            _configure(run_id is not None, stay_offline)
        yield
    finally:
        for key in added:  # the next run in this process has its own name
            os.environ.pop(key, None)


def _configure(resumes: bool, stay_offline: bool) -> None:
    import wandb

    # wandb reads the environment only once per process, so settings change through wandb.setup.
    choices = {"mode": choose_mode(wandb.setup().settings)}
    if stay_offline and choices["mode"] == "online" and "WANDB_MODE" not in os.environ:
        choices["mode"] = "offline"
    if "WANDB_SILENT" not in os.environ:
        choices["silent"] = True  # the summary says where the run is
    if resumes and "WANDB_RESUME" not in os.environ:
        choices["resume"] = "allow"
    wandb.setup(settings=wandb.Settings(**choices))


def choose_mode(settings) -> str:
    """Return the mode of ``WANDB_MODE`` or of ``settings``, or "offline" if "online" cannot work.

    ``settings`` is a ``wandb.Settings``. Its default mode is "online".
    """
    if "WANDB_MODE" in os.environ:
        return os.environ["WANDB_MODE"]
    if settings.mode == "online" and not (has_key(settings) and is_reachable(settings.base_url)):
        return "offline"
    return settings.mode


def has_key(settings) -> bool:
    """Return whether wandb will find credentials in the environment, its settings file or netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE") or settings.api_key:
        return True
    # requests and wandb read $NETRC, else ~/.netrc, else ~/_netrc.
    candidates = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    path = next((p for p in (Path(c).expanduser() for c in candidates) if p.is_file()), None)
    if path is None:
        return False
    try:
        entries = netrc.netrc(path)
    except (netrc.NetrcParseError, OSError):
        return False
    hosts = [urlsplit(settings.base_url).netloc]
    if settings.base_url == type(settings)().base_url:
        hosts.append("api.wandb.ai")  # the default server's older name, in most netrc files
    return any(entries.authenticators(host) for host in hosts)


def is_reachable(url: str, timeout: float = NETWORK_TIMEOUT) -> bool:
    """Return whether the host of ``url``, or its proxy, accepts a TCP connection within ``timeout`` seconds."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy and not proxy_bypass(parts.hostname):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = (parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout=timeout).close()
        except OSError:
            return
        answered.set()

    # In a thread, because a name lookup has no timeout and can take half a minute.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout)
    return answered.is_set()


def wandb_facts(run=None, folder: Path | None = None) -> dict:
    """Return a run's ``mode`` (online, offline or disabled), ``id``, ``dir``, ``url`` and the ``sync`` command.

    Args:
        run: a ``wandb.Run``, or None for no run.
        folder: of the training run, where the folders of earlier starts are.
    """
    if run is None or run.disabled:
        return {"mode": "disabled", "id": None, "dir": None, "url": None, "sync": None}
    place = Path(run.dir).resolve().parent
    if run.offline:
        sync = sync_command(folder or place.parent, run.id)
        return {"mode": "offline", "id": run.id, "dir": str(place), "url": None, "sync": sync}
    return {"mode": "online", "id": run.id, "dir": str(place), "url": run.url, "sync": None}
