"""Loss curves from the loggers' CSV files."""

from eval.curves import Curve, read_curves, smooth


def write(file, text):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_later_versions_replace_steps_and_stages_are_shifted(tmp_path):
    logs = tmp_path / "logs" / "qat"
    write(logs / "version_0" / "metrics.csv", "epoch,qat/loss,qat/select_loss,step\n0,2.0,,4\n0,1.5,,9\n0,,1.9,9\n")
    write(logs / "version_10" / "metrics.csv", "epoch,qat/loss,step\n0,1.2,14\n")
    write(logs / "version_2" / "metrics.csv", "epoch,qat/loss,step\n0,1.4,9\n0,1.3,14\n0,nan,19\n")
    found = read_curves(tmp_path, {"qat": 100})
    assert found == [
        Curve("qat", "train", (104, 109, 114), (2.0, 1.4, 1.2)), Curve("qat", "select", (109,), (1.9,)),
    ]  # fmt: skip


def test_plain_names_take_the_stage_from_the_folder(tmp_path):
    rows = "train/loss,select/loss,train/kl,lr-AdamW,step\n1.0,,0.1,0.2,0\n,3.0,,,0\n"
    write(tmp_path / "fp_ft" / "metrics.csv", rows)
    assert read_curves(tmp_path) == [Curve("fp_ft", "train", (0,), (1.0,)), Curve("fp_ft", "select", (0,), (3.0,))]
    assert read_curves(tmp_path / "absent") == []


def test_smoothing_keeps_constants_and_starts_without_bias():
    steps = tuple(range(50))
    assert all(abs(v - 3.0) < 1e-12 for v in smooth(Curve("a", "train", steps, (3.0,) * 50)).values)
    found = smooth(Curve("a", "train", steps, tuple(float(s) for s in steps)))
    assert found.values[0] == 0 and 40 < found.values[-1] < 49 and list(found.values) == sorted(found.values)
