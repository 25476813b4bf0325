"""Kill a training run again and again, resume it, and compare it with a run that nobody disturbs.

python scripts/faults/drill.py --kills 50
python scripts/faults/drill.py --kills 50 --async --processes 2 --output drill.json
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import judge  # noqa: E402 - after the path is set
from moments import EXPORT, Moment, Saved, look, moments  # noqa: E402
from report import Kill, table, write_json  # noqa: E402
from victim import Victim, environment, mxtrain, train_command, write_config  # noqa: E402

from mxtrain.cli.launch import accelerator_count  # noqa: E402

POLL_SECONDS = 0.001
LIFE_SECONDS = 600.0
"""A command that takes longer hangs"""


class DrillError(Exception):
    """The drill cannot go on, for another reason than a kill."""


class Drill:
    """The state of a drill: a run to kill, one to compare it with, and what came of it.

    Attributes:
        kills: the kills so far.
        finished: for every run that reached its end, the steps that differ from the reference.
    """

    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.kills: list[Kill] = []
        self.finished: list[list[int]] = []
        self._random = random.Random(options.seed)
        self._config = options.config or write_config(folder, on_gpus=accelerator_count() > 0)
        self._environment = environment(folder, options.processes)
        self._can_resume = "--resume" in _help_of("train", self._environment)
        can_export = not options.config and bool(_help_of("export", self._environment))
        self._moments = moments(options.is_async, can_export)
        if options.moments:
            names = [moment.name for moment in self._moments]
            if unknown := set(options.moments) - set(names):
                raise DrillError(f"--moments: {', '.join(sorted(unknown))} is not among {', '.join(names)}")
            self._moments = [moment for moment in self._moments if moment.name in options.moments]
        self._waiting: list[Moment] = []
        self._number = 1
        self._victim: Victim | None = None
        self._known_damage: set[str] = set()
        self.reference: dict[int, tuple[float, ...]] = {}

    @property
    def run(self) -> Path:
        return self.folder / f"run-{self._number}"

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoint"

    def train_reference(self) -> None:
        """Train without a kill. Raises DrillError if that fails."""
        run = self.folder / "reference"
        began = time.monotonic()
        self._victim = Victim(self._start_command(run), self._environment, self.folder / "reference.txt")
        if self._wait(None, Saved({}), run) != 0:
            raise DrillError(f"the run without kills failed:\n{self._victim.output[-4000:]}")
        self._seconds = time.monotonic() - began
        self.reference = judge.curve(run)
        if sorted(self.reference) != list(range(1, self.options.steps + 1)):
            raise DrillError(f"the run without kills logged the steps {sorted(self.reference)}")

    def kill_once(self) -> None:
        """Start or resume the run, and kill it; a run that reaches its end before is compared, and the next begins."""
        saved = look(self.checkpoints)
        moment = self._next_moment(saved)
        if moment.name == EXPORT:
            self._kill_export(moment, saved)
        elif self._live(moment, saved) and moment in self._waiting:
            self._waiting.remove(moment)

    def finish(self) -> None:
        """Let the last run reach its end."""
        if self.run.exists():
            self._live(None, look(self.checkpoints))

    def stop(self) -> None:
        """Kill what runs now, without looking at the consequences."""
        if self._victim is not None and self._victim.status is None:
            self._victim.kill()

    def _next_moment(self, saved: Saved) -> Moment:
        """Return a moment that the run can reach. All moments come up before one comes up again."""
        if not any(self._fits(moment, saved) for moment in self._waiting):
            new = list(self._moments)
            self._random.shuffle(new)
            self._waiting += new
        fitting = [moment for moment in self._waiting if self._fits(moment, saved)]
        return fitting[0] if fitting else Moment("random", None)

    def _fits(self, moment: Moment, saved: Saved) -> bool:
        first = moment.name == "first save"
        return len(saved.complete) >= moment.needs and not (first and saved.complete)

    def _live(self, moment: Moment | None, saved: Saved) -> bool:
        """Resume the run, and kill it at the moment. Return whether it was killed."""
        start = saved.newest
        goes_back = moment is not None and moment.goes_back
        if goes_back:
            start = sorted(saved.complete)[-2]
        command = self._command(saved, start if goes_back else None)
        self._victim = Victim(command, self._environment, self.folder / "life.txt")
        status = self._wait(moment, saved, self.run)
        self._check_resume(start, status)
        if status is not None:
            if status == 0:
                self._compare_finished()
            self._begin_anew()
            return False
        self._judge_kill(Kill(moment.name), start if goes_back else self._seen.newest)
        return True

    def _start_command(self, run: Path) -> list[str]:
        options = self.options
        return train_command(self._config, run, options.steps, options.interval, options.is_async)

    def _command(self, saved: Saved, load_step: int | None) -> list[str]:
        flags = [] if load_step is None else [f"--checkpoint.load_step={load_step}"]
        if saved.complete and self._can_resume:
            return [*mxtrain("train", "--resume", self.run), *flags]
        return [*self._start_command(self.run), *flags]

    def _wait(self, moment: Moment | None, before: Saved, run: Path) -> int | None:
        """Wait until the command ends, and return its status, or kill it at the moment and return None."""
        victim, checkpoints = self._victim, run / "checkpoint"
        began = time.monotonic()
        at = None
        if moment is not None and moment.has_come is None:
            at = began + self._random.uniform(0, self._seconds)
        self._seen = before
        while (status := victim.status) is None:
            victim.look_for_children()
            now, clock = look(checkpoints), time.monotonic()
            if at is None and moment is not None and moment.has_come(self._seen, now):
                at = clock + self._random.uniform(0, moment.delay)
            self._seen = now
            if at is not None and clock >= at:
                victim.kill()
                return None
            if clock - began > LIFE_SECONDS:
                victim.kill()
                return 1
            time.sleep(POLL_SECONDS)
        return status

    def _check_resume(self, start: int, status: int | None) -> None:
        """Note with the last kill if the command that followed it failed, or began at another step."""
        output = self._victim.output
        said = re.search(r"^resuming after step (\d+)", output, flags=re.MULTILINE)
        resumed = int(said[1]) if said else 0
        has_begun = said or status is not None
        if status in (None, 0) and (resumed == start or not has_begun):
            return
        last = (output.strip().splitlines() or ["no output"])[-1]
        problem = f"resumed after step {resumed} instead of {start}, status {status}: {last}"
        if start == 0:
            raise DrillError(f"a new run failed: {problem}")
        self.kills[-1].failure = problem
        print(f"HARM: {problem}", flush=True)

    def _judge_kill(self, kill: Kill, floor: int) -> None:
        """Look at what the kill left. ``floor`` is the step of a checkpoint that must have survived, or a newer one."""
        saved = look(self.checkpoints)
        kill.step = max(judge.curve(self.run), default=0)
        kill.kept = saved.newest
        kill.differing = judge.differing(self.run, self.reference)
        damaged = judge.damaged(self.checkpoints, saved)
        kill.damaged = [problem for name, problem in damaged.items() if name not in self._known_damage]
        self._known_damage |= damaged.keys()
        kill.vanished = floor if saved.newest < floor else 0
        self.kills.append(kill)
        print(f"kill {len(self.kills)} of {self.options.kills}, {kill}", flush=True)
        if not saved.complete:  # nothing was saved yet: a run without a checkpoint begins again
            self._begin_anew()

    def _kill_export(self, moment: Moment, saved: Saved) -> None:
        """Kill an export of the run, at a random time after its folder has appeared."""
        target = self.folder / "exported"
        command = mxtrain("export", self.run, target)
        self._victim = Victim(command, self._environment, self.folder / "export.txt")
        while self._victim.status is None and not target.exists():
            self._victim.look_for_children()
            time.sleep(POLL_SECONDS)
        time.sleep(self._random.uniform(0, 0.3))
        kill = Kill(moment.name)
        if self._victim.status is None:
            self._victim.kill()
        elif self._victim.status != 0:
            kill.failure = f"the export failed: {self._victim.output.strip()[-500:]}"
        shutil.rmtree(target, ignore_errors=True)
        self._judge_kill(kill, saved.newest)
        self._waiting.remove(moment)

    def _compare_finished(self) -> None:
        missing = self.reference.keys() - judge.curve(self.run).keys()
        self.finished.append(sorted({*missing, *judge.differing(self.run, self.reference)}))

    def _begin_anew(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        self._known_damage.clear()
        self._number += 1


def _help_of(command: str, environment: dict[str, str]) -> str:
    """Return the help of a command of mxtrain, or nothing if there is no such command."""
    process = subprocess.run(mxtrain(command, "--help"), env=environment, capture_output=True, text=True)
    return process.stdout if process.returncode == 0 else ""


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, metavar="N", help="number of kills (default: 50)")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps of a run (default: 40)")
    parser.add_argument("--interval", type=int, default=3, metavar="N", help="steps between checkpoints (default: 3)")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="processes of a run (default: 1)")
    parser.add_argument("--config", type=Path, help="train this config instead of a small model on a small text")
    parser.add_argument("--async", dest="is_async", action="store_true", help="save while training goes on")
    parser.add_argument("--moments", nargs="+", metavar="NAME", help="kill only at these, such as save purge")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of moments and of random times")
    parser.add_argument("--output", type=Path, metavar="JSON", help="write all kills to this file, after every kill")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if no kill did harm, 1 if one did, and 130 after Ctrl-C, which prints what is known so far."""
    options = parser().parse_args(arguments)
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process loads checkpoints
    with tempfile.TemporaryDirectory(prefix="mxtrain-drill-", ignore_cleanup_errors=True) as folder:
        try:
            drill = Drill(options, Path(folder))
        except DrillError as error:
            parser().error(str(error))
        try:
            drill.train_reference()
            while len(drill.kills) < options.kills:
                drill.kill_once()
                write_json(options, drill.kills, drill.finished)
            drill.finish()
            status = 0 if all(kill.is_harmless for kill in drill.kills) and not any(drill.finished) else 1
        except DrillError as error:
            print(f"drill: {error}", file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            status = 130
        finally:
            drill.stop()
    write_json(options, drill.kills, drill.finished)
    print(table(drill.kills, drill.finished))
    return status


if __name__ == "__main__":
    sys.exit(main())
