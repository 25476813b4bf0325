"""Start wandb so that it never blocks or stops a training run.

TorchTitan's ``WandBLogger`` calls ``wandb.init`` with settings from the environment. Without a key that call prompts or
fails, and without a network it blocks for minutes. In both cases this module starts the run offline, which records the
same data for ``wandb sync``. WANDB_MODE, WANDB_SILENT, WANDB_PROJECT and WANDB_RUN_NAME stay as the user set them.
"""

import netrc
import os
import shlex
import socket
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

NETWORK_TIMEOUT = 2.0
"""Seconds to wait for wandb's server before a run starts offline"""


@contextmanager
def wandb_defaults(run_name: str):
    """Context in which ``wandb.init`` starts silently, in a mode that works here, with mxtrain's project and run name.

    Does not raise if wandb is missing or misconfigured: ``wandb.init`` raises the same, and TorchTitan reports it.
    """
    names = {"WANDB_PROJECT": "mxtrain", "WANDB_RUN_NAME": run_name}
    added = [key for key in names if key not in os.environ]
    os.environ.update({key: names[key] for key in added})
    try:
        with suppress(Exception):  # see the docstring
            _configure()
        yield
    finally:
        for key in added:  # the next run in this process has its own name
            os.environ.pop(key, None)


def _configure() -> None:
    import wandb

    # wandb reads the environment only once per process, so settings change through wandb.setup.
    choices = {"mode": choose_mode(wandb.setup().settings)}
    if "WANDB_SILENT" not in os.environ:
        choices["silent"] = True  # the summary says where the run is
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


def wandb_facts(run=None) -> dict:
    """Return a run's ``mode`` (online, offline or disabled), ``dir``, ``url`` and the ``sync`` command.

    ``run`` is a ``wandb.Run``, or None for no run.
    """
    if run is None or run.disabled:
        return {"mode": "disabled", "dir": None, "url": None, "sync": None}
    folder = str(Path(run.dir).resolve().parent)
    if run.offline:
        return {"mode": "offline", "dir": folder, "url": None, "sync": f"wandb sync {shlex.quote(folder)}"}
    return {"mode": "online", "dir": folder, "url": run.url, "sync": None}
