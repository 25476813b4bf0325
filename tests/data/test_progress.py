from mxtrain.data import progress
from mxtrain.data.progress import TICK_SECONDS, Progress


def test_ticks_are_throttled_but_other_lines_are_not(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    assert TICK_SECONDS == 2.0
    reporter = Progress(lines.append)
    for second in range(10):
        now[0] = second / 2
        reporter.tick(lambda second=second: f"tick {second}")
    assert lines == ["tick 4", "tick 8"]
    reporter.say("a")
    reporter.say("b")
    assert lines[2:] == ["a", "b"]
    now[0] += 1.0
    reporter.tick(lambda: "too soon after another line")
    assert len(lines) == 4
