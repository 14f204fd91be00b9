import json

from bitdial.calibrate.report import BlockReport, CalibrationReport


def test_reports_are_plain_data() -> None:
    block = BlockReport(name="a", layers=("a.0", "a.1"), error={8: 0.1, 4: 0.2}, error_before={8: 0.3}, seconds=1.5)
    assert BlockReport.from_dict(json.loads(json.dumps(block.to_dict()))) == block
    report = CalibrationReport(effort="quick", samples=3, steps=("scales",), blocks=(block,), seconds=2.0)
    assert report.error == {8: 0.1, 4: 0.2}
    values = json.loads(json.dumps(report.to_dict()))
    assert values["blocks"][0]["error"] == {"8": 0.1, "4": 0.2}
    assert values["samples"] == 3
