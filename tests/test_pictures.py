"""Pictures of logs: what is missing is left out, and several runs share one figure."""

import math

import numpy as np
import pytest
from matplotlib.figure import Figure

from mdsd.figures import PALETTE
from mdsd.training.logs import LogError, RunLog, read_log
from mdsd.training.pictures import (
    PANELS,
    compare_runs,
    draw_losses,
    plot_log,
    save_figure,
    series,
    thinned,
)


def written(folder, steps=30, depths=1, **more):
    """A run's folder with a made-up log; `more` replaces or adds entries, None leaves them out."""
    folder.mkdir(parents=True)
    with RunLog(folder, step=0) as log:
        for step in range(1, steps + 1):
            line = {"main": 6 / step, "mtp": [7 / step] * depths, "balance": 1.0}
            line |= {"max_violation": 0.5, "grad_norm": 1.0, "learning_rate": 1e-3, "skipped": 0}
            line |= {"tokens_per_second": 900, "mfu": 0.5} | more
            line = {name: value for name, value in line.items() if value is not None}
            log.write({"split": "train", "step": step} | line)
            if step % 10 == 0:
                shares = {"acceptance": [0.5] * depths}
                log.write({"split": "val", "step": step} | line | shares)
    return folder


def panels(figure: Figure) -> dict[str, object]:
    names = {panel.title: panel.name for panel in PANELS.values()}
    return {names[axes.get_title(loc="left")]: axes for axes in figure.axes}


def test_a_series_has_the_steps_that_have_a_value():
    log = [
        {"split": "train", "step": 1, "main": None, "mtp": [None, 4.0]},
        {"split": "train", "step": 2, "main": 2.0, "mtp": [3.0]},
        {"split": "val", "step": 2, "main": 9.0, "mtp": [9.0]},
        {"split": "train", "step": 5, "main": 1.0},
    ]
    assert series(log, "train", "main").tolist() == [[2, 5], [2, 1]]
    assert series(log, "train", "mtp", 1).tolist() == [[2], [3]]
    assert series(log, "train", "mtp", 2).tolist() == [[1], [4]]
    assert series(log, "train", "mtp").shape == (2, 0)
    assert series(log, "train", "main", 1).shape == (2, 0)
    assert series(log, "train", "grad_norm").shape == (2, 0)


@pytest.mark.parametrize("length", [0, 1, 199, 200, 1001])
def test_thinning_keeps_means_and_order(length):
    points = np.stack([np.arange(length), np.random.default_rng(0).random(length)])
    thin = thinned(points)
    assert thin.shape == (2, min(length, 200))
    assert (np.diff(thin[0]) > 0).all()
    if length in (1, 199, 200):
        assert np.allclose(thin, points)


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_each_run_has_its_color_and_its_name(tmp_path, count):
    runs = [written(tmp_path / f"run-{i}") for i in range(count)]
    figure = compare_runs(runs)
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [f"run-{i}" for i in range(count)]
    for name, axes in panels(figure).items():
        lines = 2 if name in ("main", "mtp") else 1  # training and validation
        colors = [line.get_color() for line in axes.lines]
        assert colors == [PALETTE[i % len(PALETTE)] for i in range(count) for _ in range(lines)]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [written(tmp_path / place / "tiny") for place in ("a", "b")]
    names = [text.get_text() for text in compare_runs(runs).legends[0].get_texts()]
    assert names == [str(run) for run in runs]


def test_each_mtp_depth_has_its_line(tmp_path):
    figure = compare_runs(
        [written(tmp_path / "deep", depths=3), written(tmp_path / "plain", depths=0)]
    )
    dashes = [line.get_linestyle() for line in panels(figure)["acceptance"].lines]
    assert len(dashes) == len(set(dashes)) == 3


def test_an_old_log_is_drawn_without_what_it_lacks(tmp_path):
    newer = ("tokens_per_second", "mfu", "skipped", "grad_norm")
    old = written(tmp_path / "old", **dict.fromkeys(newer))
    shown = panels(compare_runs([old]))
    empty = {name for name, axes in shown.items() if not axes.lines}
    assert empty == set(newer)
    assert all(shown[name].texts[0].get_text() == "not in these logs" for name in empty)
    both = panels(compare_runs([old, written(tmp_path / "new")]))
    assert all(len(both[name].lines) == 1 for name in newer)


def test_a_run_that_broke_is_drawn(tmp_path):
    """All losses lost, and a log of zeros on a logarithmic axis."""
    lost = written(tmp_path / "lost", main=math.nan, mtp=[math.inf], grad_norm=math.nan)
    zero = written(tmp_path / "zero", main=0.0, mtp=[0.0], grad_norm=0.0, learning_rate=0.0)
    for runs in ([lost], [zero], [lost, zero], [written(tmp_path / "single", steps=1)]):
        save_figure(compare_runs(runs), tmp_path / "runs.png")


def test_a_long_log_is_drawn_with_few_points(tmp_path):
    axes = panels(compare_runs([written(tmp_path / "long", steps=3000)]))
    assert len(axes["grad_norm"].lines[0].get_xdata()) == 200


def test_one_runs_picture(tmp_path):
    run = written(tmp_path / "run", depths=2)
    plot_log(run)
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    axes = Figure().subplots()
    draw_losses(axes, read_log(run / "log.jsonl"))
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == [
        f"{name}, {split}"
        for name in ("main", "MTP depth 1", "MTP depth 2")
        for split in ("train", "val")
    ]


def test_what_cannot_be_drawn_is_said(tmp_path):
    with pytest.raises(LogError, match="no run to draw"):
        compare_runs([])
    with pytest.raises(LogError, match=r"holds no log\.jsonl"):
        compare_runs([written(tmp_path / "good"), tmp_path])
    (tmp_path / "log.jsonl").write_text('{"step": 1, "ma', encoding="utf-8")
    with pytest.raises(LogError, match="no whole line yet"):
        compare_runs([tmp_path])
    for ending in ("runs", "runs.mp3", "runs.png.gz"):
        with pytest.raises(LogError, match=r"must end in one of .*\.png"):
            save_figure(Figure(), tmp_path / "new" / ending)
    assert not (tmp_path / "new").exists()
    save_figure(Figure(), tmp_path / "new" / "RUNS.PNG")
