"""What a worker tells its launcher. ``tests/cli/test_launch.py`` and ``test_killed_launcher.py`` test the rest."""

import signal

from mxtrain.launched import STOP_FILE_VARIABLE, report_stop


def test_a_full_disk_leaves_no_stop_file_that_names_no_signal(tmp_path, monkeypatch, full_disk):
    path = tmp_path / "stopped_by"
    monkeypatch.setenv(STOP_FILE_VARIABLE, str(path))
    with full_disk(0):
        report_stop(signal.SIGTERM)
    assert not path.exists()
    report_stop(signal.SIGTERM)
    assert path.read_text() == "SIGTERM"
