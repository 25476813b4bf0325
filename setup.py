"""What pyproject.toml cannot say: a wheel's packages, and the links to the repository that it is built from.

A wheel holds mxtrain, and the folder train_configs as data inside it. An editable installation reads that folder where
it is. All its packages are then under one path, which setuptools writes into a .pth file. For packages in several
places it would write an import hook, which type checkers do not run.

The description is README.md, whose relative links and pictures lead nowhere outside of the repository. They become
absolute, with the address of the Git remote "origin"; without such an address they stay as they are.
"""

import re
import subprocess
import sys
from email import message_from_string
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
CONFIGS = "mxtrain.train_configs"
PAPER = {"Paper": "https://arxiv.org/abs/2603.13180"}


def repository() -> str | None:
    """Return the web address of the remote "origin"; None without one, and for a path on this machine."""
    if not (ROOT / ".git").exists():  # else Git would answer for a repository around this folder
        return None
    try:
        command = ["git", "-C", str(ROOT), "config", "remote.origin.url"]
        remote = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:  # no Git
        return None
    # A port is not the web server's, so such an address is passed over.
    found = re.fullmatch(r"(?:https://(?:[^@/]*@)?|ssh://git@)([\w.-]+)/(.+?)(?:\.git)?/?", remote)
    found = found or re.fullmatch(r"git@([\w.-]+):(.+?)(?:\.git)?/?", remote)
    return found and "https://{}/{}".format(*found.groups())


def absolute(text: str, address: str) -> str:
    """Return Markdown whose relative links lead to the files of a GitHub repository."""
    picture, link = rf"\1{address}/raw/HEAD/", rf"\1{address}/blob/HEAD/"
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", picture, text)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", link, text)


def links() -> dict:
    """Return the description and the project's addresses."""
    built = ROOT / "PKG-INFO"
    if built.exists():  # a source distribution: no Git, but the links of the checkout that it was made from
        message = message_from_string(built.read_text(encoding="utf-8"))
        urls = dict(url.split(", ", 1) for url in message.get_all("Project-URL"))
        return dict(long_description=message.get_payload(), project_urls=urls)
    text, address = (ROOT / "README.md").read_text(encoding="utf-8"), repository()
    if address is None:
        return dict(long_description=text, project_urls=PAPER)
    urls = PAPER | {
        "Repository": address,
        "Issues": f"{address}/issues",
        "Changelog": f"{address}/blob/HEAD/CHANGELOG.md",
    }
    return dict(long_description=absolute(text, address), project_urls=urls)


IS_EDITABLE = "editable_wheel" in sys.argv

setup(
    packages=[*find_packages(include=["mxtrain", "mxtrain.*"]), *([] if IS_EDITABLE else [CONFIGS])],
    package_dir={"": "."} if IS_EDITABLE else {CONFIGS: "train_configs"},
    long_description_content_type="text/markdown",
    **links(),
)
