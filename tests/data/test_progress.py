from mxtrain.data import progress
from mxtrain.data.progress import Progress


def test_ticks_are_throttled_and_said_lines_are_not(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    reporter = Progress(lines.append, every=2.0)
    for second in range(10):
        now[0] = second / 2
        reporter.tick(lambda second=second: f"tick {second}")
    assert lines == ["tick 4", "tick 8"]
    reporter.say("a")
    reporter.say("b")
    assert lines[2:] == ["a", "b"]
    now[0] += 1.0
    reporter.tick(lambda: "too soon after a said line")
    assert len(lines) == 4
