import logging

import pytest

from bitdial.calibrate.progress import describe, show_progress


def test_each_block_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), show_progress(2, show=False) as progress:
        progress.update(0, "a", {})
        progress.update(0.5, "a", {8: 0.1})
        progress.update(1, "a", {8: 0.01, 4: 0.25})
        progress.update(1, "b", {})
    assert [record.getMessage() for record in caplog.records] == ["calibrated block 1, a  8b 0.01  4b 0.25"]
    assert describe({}) == ""


def test_the_bar_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(1, show=True) as progress:
        progress.update(1, "layer1.0", {8: 0.001})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "layer1.0" in captured.err
