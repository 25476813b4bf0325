"""The shell scripts, in a checkout of their own and with a stand-in for Python that writes down how it is called."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAKE_PYTHON = r"""#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
case "$*" in
"-c import sys"*) exit ${FAKE_TOO_OLD:-0} ;;
--version) echo "Python 3.11.7" ;;
"- mxtrain "*) exit ${FAKE_ACTIVE:-1} ;;
"-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
"-c import pip"*) exit ${FAKE_OLD_PIP:-0} ;;
"-m pip install --dry-run "*) echo "Would install $FAKE_PLAN"; case "$*" in *"${FAKE_REFUSED:-none}") exit 1 ;; esac ;;
"-m pip index versions torch") echo "Available versions: $FAKE_VERSIONS" ;;
*"--editable"*) exit ${FAKE_PIP_STATUS:-0} ;;
"-c "*importlib*) printf '%s\t%s\t0.18.0\n' "$(basename "$(dirname "$(dirname "$0")")")" "${FAKE_TRITON:-3.9.0}" ;;
"-m mxtrain.cli "*)
    if (: <&9) 2>/dev/null; then echo "training holds the lock"; fi
    echo "trained in $(pwd) with $*; PYTHONPATH=$PYTHONPATH" ;;
"-m pytest "*) echo "tested in $(pwd) with $*; PYTHONPATH=$PYTHONPATH" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path):
    """A checkout that holds just what the scripts use; ``run`` starts one of them."""
    return Checkout(tmp_path)


class Checkout:
    def __init__(self, folder):
        self.root, self.bin, self.calls_file = folder / "checkout", folder / "bin", folder / "calls"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        (self.root / "train_configs").mkdir()
        (self.root / "train_configs" / "a.toml").write_text("")
        self.bin.mkdir()
        self.program("python3", FAKE_PYTHON)
        self.program("nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")

    def program(self, name, text):
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, script, *arguments, cwd=None, **environment):
        """The finished process; ``calls`` then holds what was run with Python since the last one."""
        self.calls_file.write_text("")
        base = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": os.environ["HOME"], "CALLS": str(self.calls_file)}
        result = subprocess.run(
            ["bash", self.root / script, *arguments],
            cwd=cwd or self.root,
            env={**base, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        self.calls = self.calls_file.read_text().splitlines()
        return result

    def pip_calls(self):
        installs = [call.partition(" -m pip install ")[2] for call in self.calls if " -m pip install -qq" in call]
        return [call.removeprefix("-qq ").replace(str(self.root), "ROOT") for call in installs]


TORCH = "torch>=2.11,<2.14"
TORCH_OF_03 = "torch>=2.14,<2.15"


def test_first_use_installs_and_second_use_does_not(checkout):
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", "--training.steps", "3")
    assert result.returncode == 0, result.stderr
    assert checkout.pip_calls() == [TORCH, "--editable ROOT[titan02]"]
    trained = (
        f"trained in {checkout.root} with -m mxtrain.cli train train_configs/a.toml --training.steps 3; PYTHONPATH=\n"
    )
    assert result.stdout == trained
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", "--training.steps", "3")
    assert (result.stdout, result.stderr) == (trained, "")
    assert len(checkout.calls) == 2, "the look for an active environment, and the training"


def test_a_changed_pyproject_installs_again_into_the_same_environment(checkout):
    checkout.run("scripts/train.sh", "train_configs/a.toml")
    with open(checkout.root / "pyproject.toml", "a") as file:
        file.write("\n# changed\n")
    checkout.run("scripts/train.sh", "train_configs/a.toml")
    assert checkout.pip_calls() == [TORCH, "--editable ROOT[titan02]"]
    assert not any("-m venv" in call for call in checkout.calls)


def test_a_moved_checkout_installs_again(checkout):
    checkout.run("scripts/train.sh", "train_configs/a.toml")
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.run("scripts/train.sh", "train_configs/a.toml")
    assert checkout.pip_calls() == [TORCH, "--editable ROOT[titan02]"]


def test_a_failed_installation_stops_and_is_tried_again(checkout):
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_PIP_STATUS="1")
    assert result.returncode != 0 and "trained" not in result.stdout
    result = checkout.run("scripts/train.sh", "train_configs/a.toml")
    assert result.returncode == 0 and checkout.pip_calls() == [TORCH, "--editable ROOT[titan02]"]


def test_tests_install_the_dev_extra_which_training_needs_not_install_again(checkout):
    checkout.run("scripts/test.sh", "-k", "x")
    assert checkout.pip_calls() == [TORCH, "--editable ROOT[titan02,dev]"]
    checkout.run("scripts/train.sh", "train_configs/a.toml")
    assert checkout.pip_calls() == []


def test_after_training_tests_still_install_the_dev_extra(checkout):
    checkout.run("scripts/train.sh", "train_configs/a.toml")
    checkout.run("scripts/test.sh", "-k", "x")
    assert checkout.pip_calls() == [TORCH, "--editable ROOT[titan02,dev]"]


def test_test_runs_the_suite(checkout, tmp_path):
    result = checkout.run("scripts/test.sh", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (0, f"tested in {checkout.root} with -m pytest -n auto; PYTHONPATH=\n")


def test_test_with_arguments_is_pytest_with_those(checkout):
    result = checkout.run("scripts/test.sh", "tests/test_cli.py", "-x")
    assert result.stdout == f"tested in {checkout.root} with -m pytest -n auto tests/test_cli.py -x; PYTHONPATH=\n"


def test_titan_03_has_an_environment_of_its_own_and_a_switch_installs_nothing(checkout):
    arguments = ("scripts/train.sh", "train_configs/a.toml")
    checkout.run(*arguments)
    result = checkout.run(*arguments, MXTRAIN_TITAN="0.3")
    assert result.returncode == 0, result.stderr
    assert checkout.pip_calls() == [TORCH_OF_03, "--editable ROOT[titan03]"]
    assert f"python3 -m venv --clear {checkout.root}/.venv-titan03" in checkout.calls
    for release in ("0.2", "0.3"):
        checkout.run(*arguments, MXTRAIN_TITAN=release)
        assert checkout.pip_calls() == []
    result = checkout.run(*arguments, MXTRAIN_TITAN="0.4")
    assert result.returncode == 2 and "MXTRAIN_TITAN = '0.4'" in result.stderr and "0.2 and 0.3" in result.stderr


@pytest.mark.parametrize(
    "found, asked, is_taken", [("0.2.2", {}, True), ("0.3.0", {}, True), ("0.2.2", {"MXTRAIN_TITAN": "0.3"}, False)]
)
def test_an_active_environment_is_taken_if_it_has_the_titan_that_is_asked_for(checkout, found, asked, is_taken):
    checkout.program("python3", FAKE_PYTHON.replace("exit ${FAKE_ACTIVE:-1}", f'exec {sys.executable} "$@"', 1))
    packages = {"mxtrain": "0.1.0", "torch": "2.13.0", "torchtitan": found, "torchao": "0.18.0"}
    for name, version in packages.items():
        metadata = checkout.root / "active" / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    active = str(checkout.root / "active")
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", PYTHONPATH=active, **asked)
    path = f"{checkout.root}:{active}" if is_taken else active
    assert result.stdout.endswith(f"; PYTHONPATH={path}\n"), result.stderr


def test_ci_lints_and_tests_and_tests_other_releases(checkout, tmp_path):
    matrix = tmp_path / "kept"
    result = checkout.run(".ci/run", cwd=tmp_path, MATRIX=str(matrix))
    assert result.returncode == 0, result.stderr
    assert "python -m ruff check ." in checkout.calls
    *tested, _, oldest, _, titan03 = result.stdout.splitlines()
    assert [line.partition(" -m pytest ")[2] for line in tested] == [
        "-n auto; PYTHONPATH=",
        "-n auto -m sweep; PYTHONPATH=",
    ]
    assert oldest.startswith("torch-2.11 ") and "tests/nn tests/ops" in oldest
    assert titan03.startswith("titan-0.3 ") and " tests/titan/v03 " in titan03
    assert checkout.pip_calls()[-2:] == [
        f"{TORCH},==2.11.* torchao==0.17.* --editable ROOT[titan02,dev]",
        f"{TORCH_OF_03} --editable ROOT[titan03,dev]",
    ]
    shutil.rmtree(checkout.root / ".venv")
    checkout.run(".ci/run", cwd=tmp_path, MATRIX=str(matrix))
    assert not any(f"-m venv --clear {matrix}" in call for call in checkout.calls), "the environment is used again"
    checkout.program("python3", FAKE_PYTHON.replace("case", '[ "$2" = ruff ] && exit 1\ncase', 1))
    shutil.rmtree(checkout.root / ".venv")
    result = checkout.run(".ci/run", cwd=tmp_path, MATRIX=str(matrix))
    assert result.returncode == 1 and "tested" not in result.stdout


def test_the_matrix_tests_each_release_in_an_environment_of_its_own_and_prints_a_table(checkout):
    result = checkout.run(".ci/matrix", "2.12", "newest", MATRIX=str(checkout.root / "m"), TESTS="tests/nn tests/ops")
    assert result.returncode == 0, result.stderr
    assert checkout.pip_calls() == [
        f"{TORCH},==2.12.* --editable ROOT[titan02,dev]",
        f"{TORCH} --editable ROOT[titan02,dev]",
    ]
    head, *rows = result.stdout.splitlines()
    assert head.split() == ["torch", "triton", "torchao", "result"]
    assert [row.split()[0] for row in rows] == ["torch-2.12", "torch-newest"]
    assert all(f"tested in {checkout.root} with -m pytest -n auto -q tests/nn tests/ops;" in row for row in rows)
    checkout.run(".ci/matrix", "2.11", MATRIX=str(checkout.root / "m"), FAKE_TRITON="3.6.0")
    assert checkout.pip_calls()[-1] == "numpy<2.4"
    checkout.program("python3", FAKE_PYTHON.replace("case", '[ "$2" = pytest ] && exit 1\ncase', 1))
    result = checkout.run(".ci/matrix", "2.13", MATRIX=str(checkout.root / "m"))
    assert result.returncode == 1 and "torch-2.13" in result.stdout


def test_the_matrix_goes_on_after_a_failed_installation(checkout):
    """Its table has a row for the release that failed, and the results of those before and after it."""
    fails = "*'==2.13.* --editable'*) exit 1 ;;\n*'torch-2.14') exit 1 ;;\n"
    checkout.program("python3", FAKE_PYTHON.replace("--version)", fails + "--version)", 1))
    releases = ["2.12", "2.13", "2.14", "newest"]
    result = checkout.run(".ci/matrix", *releases, MATRIX=str(checkout.root / "m"))
    assert result.returncode == 1, result.stderr
    rows = [row.split(maxsplit=3) for row in result.stdout.splitlines()[1:]]
    assert [row[0] for row in rows] == ["torch-2.12", "2.13", "2.14", "torch-newest"]
    assert [row[3].startswith("tested in ") for row in rows] == [True, False, False, True]
    assert rows[1][1:] == rows[2][1:] == ["-", "-", "the installation failed"]


def test_without_a_gpu_cuda_packages_are_announced_with_the_way_around_them(checkout):
    plan = "filelock-3.20 nvidia-cublas-13.0 torch-2.13.0"
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_PLAN=plan)
    assert "no NVIDIA GPU" in result.stderr and "MXTRAIN_TORCH_INDEX_URL" in result.stderr
    assert result.returncode == 0 and checkout.pip_calls()[0] == TORCH
    shutil.rmtree(checkout.root / ".venv")
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_PLAN="filelock-3.20 torch-2.13.0+cpu")
    assert "MXTRAIN_TORCH_INDEX_URL" not in result.stderr


def test_without_a_gpu_a_cpu_build_is_taken_although_a_cuda_build_is_newer(checkout):
    versions = "2.15.0, 2.13.0+cpu, 2.13.0, 2.12.0+cpu"
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_VERSIONS=versions)
    assert result.returncode == 0 and checkout.pip_calls() == [f"{TORCH},==2.13.0+cpu", "--editable ROOT[titan02]"]
    shutil.rmtree(checkout.root / ".venv")
    # A CPU build that pyproject.toml does not allow.
    checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_VERSIONS=versions, FAKE_REFUSED="==2.13.0+cpu")
    assert checkout.pip_calls()[0] == TORCH


def test_a_pip_too_old_to_ask_without_downloading_is_replaced_first(checkout):
    checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_OLD_PIP="1")
    assert checkout.pip_calls() == ["--upgrade pip", TORCH, "--editable ROOT[titan02]"]
    planning = next(i for i, call in enumerate(checkout.calls) if "--dry-run" in call)
    assert "python -m pip install -qq --upgrade pip" in checkout.calls[:planning]


def test_torch_comes_from_the_index_that_is_named(checkout):
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", MXTRAIN_TORCH_INDEX_URL="file:///an/index")
    assert result.returncode == 0, result.stderr
    assert checkout.pip_calls() == [f"--index-url file:///an/index {TORCH}", "--editable ROOT[titan02]"]


def test_with_a_gpu_torch_and_triton_are_resolved_together(checkout):
    checkout.program("nvidia-smi", '#!/bin/sh\nfor i in 0 1; do echo "GPU $i: NVIDIA H200 (UUID: GPU-$i)"; done\n')
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_PLAN="nvidia-cublas-13.0")
    assert checkout.pip_calls() == ["--editable ROOT[titan02]"]
    assert "MXTRAIN_TORCH_INDEX_URL" not in result.stderr


def test_an_active_environment_that_holds_mxtrain_is_taken_with_this_checkouts_code(checkout):
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_ACTIVE="0", PYTHONPATH="/x")
    assert result.stdout.endswith(f"; PYTHONPATH={checkout.root}:/x\n")
    assert checkout.pip_calls() == [] and not (checkout.root / ".venv").exists()


def test_the_environment_of_the_checkout_is_kept_up_to_date_even_when_it_is_active(checkout):
    checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_ACTIVE="0", VIRTUAL_ENV=str(checkout.root / ".venv"))
    assert checkout.pip_calls() == [TORCH, "--editable ROOT[titan02]"]


def test_an_old_python_is_refused(checkout):
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", FAKE_TOO_OLD="1", PYTHON="python3")
    assert result.returncode == 1
    oldest = re.search(r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE)[1]
    assert result.stderr.startswith(f"mxtrain: error: Python {oldest} or later is needed, but python3 is Python 3.11")
    assert f"sys.version_info < ({oldest.replace('.', ', ')})" in checkout.calls[-2]


def test_the_python_that_is_named_may_have_spaces_in_its_path(checkout):
    checkout.program("my python", FAKE_PYTHON)
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", PYTHON=f"{checkout.bin}/my python")
    assert result.returncode == 0, result.stderr
    assert any(call.startswith("my python -m venv") for call in checkout.calls)


def test_a_missing_config_is_reported_before_anything_is_set_up(checkout):
    result = checkout.run("scripts/train.sh", "train_configs/b.toml")
    assert result.returncode == 2
    assert result.stderr == "mxtrain: error: config 'train_configs/b.toml' does not exist\n"
    assert checkout.calls == []


def test_configs_are_relative_to_the_current_folder_first_and_then_to_the_checkout(checkout, tmp_path):
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", cwd=tmp_path)
    assert f"trained in {tmp_path} with -m mxtrain.cli train {checkout.root}/train_configs/a.toml;" in result.stdout
    (tmp_path / "train_configs").mkdir()
    (tmp_path / "train_configs" / "a.toml").write_text("")
    result = checkout.run("scripts/train.sh", "train_configs/a.toml", cwd=tmp_path)
    assert f"trained in {tmp_path} with -m mxtrain.cli train train_configs/a.toml;" in result.stdout


@pytest.mark.parametrize("arguments, status", [(["--help"], 0), (["-h"], 0), ([], 2)])
def test_usage(checkout, arguments, status):
    result = checkout.run("scripts/train.sh", *arguments)
    assert result.returncode == status
    assert (
        "scripts/train.sh CONFIG [--verbose] [any TorchTitan flag]" in result.stdout and "set -euo" not in result.stdout
    )
    assert checkout.calls == []
