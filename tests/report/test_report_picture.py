import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from blend.errors import ConfigError
from blend.eval.report import summarise
from blend.eval.show import draw_report, write_picture


def panels(report):
    return draw_report(report).axes


def errorbars(axes):
    """Method order -> (x, y, low, high) as drawn."""
    found = []
    for container in axes.containers:
        line, _, (bar,) = container.lines
        (x,), (y,) = line.get_data()
        low, high = bar.get_segments()[0][:, 1]
        found.append((x, y, low, high))
    return found


def test_points_and_bars_are_the_numbers_of_the_report(report):
    quality, divergence = panels(report)
    level = report.methods[0].mean("f1")
    for summary, (x, y, low, high) in zip(report.methods, errorbars(quality), strict=True):
        assert (x, y) == (summary.ttft_s, summary.mean("f1"))
        difference = summary.differences["f1"]
        assert (low, high) == pytest.approx((level + difference.low, level + difference.high))
    for summary, (_, y, low, high) in zip(report.methods, errorbars(divergence), strict=True):
        assert (y, low, high) == pytest.approx([getattr(summary.quality["kl"], end) for end in ("mean", "low", "high")])


def test_no_bar_leaves_its_panel(measurements):
    right = {("full", "q0"): 1.0, ("reuse", "q1"): 1.0}  # what one gets right the other does not
    rows = [replace(one, f1=right.get((one.method, one.record_id), 0.0)) for one in measurements(3)]
    report = summarise(rows)
    assert min(summary.differences["f1"].low for summary in report.methods) < -0.9
    for axes in panels(report):
        bottom, top = axes.get_ylim()
        for _, _, low, high in errorbars(axes):
            assert bottom < low <= high < top


def test_the_legend_names_every_method(report):
    figure = draw_report(report)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["full", "reuse (20.0x)", "blend (5.0x)"]
    assert all(axes.get_xscale() == "log" for axes in figure.axes)
    figure.draw_without_rendering()
    below = legend.get_window_extent().y0
    assert all(axes.get_window_extent().y1 < below for axes in figure.axes)
    # Title and entries do not lie on each other, nor outside of the picture.
    title = legend.get_title().get_window_extent()
    assert all(text.get_window_extent().y1 <= title.y0 for text in legend.get_texts())
    assert title.y1 <= figure.bbox.y1


def test_png_and_svg_by_suffix(report, tmp_path):
    write_picture(report, tmp_path / "a" / "p.png")
    write_picture(report, tmp_path / "p.SVG")
    from matplotlib.image import imread

    pixels = imread(tmp_path / "a" / "p.png")
    assert pixels.shape[:2] == (800, 1600)
    assert 0.01 < np.mean(pixels[..., :3].min(-1) < 0.9) < 0.5
    assert ET.parse(tmp_path / "p.SVG").getroot().tag.endswith("svg")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "p.SVG"]


def test_undefined_metrics_are_said_and_another_takes_the_place_of_f1(undefined_report, measurements, tmp_path):
    assert [axes.texts[0].get_text() for axes in panels(undefined_report)] == ["no gold answers", "KL was not measured"]
    write_picture(undefined_report, tmp_path / "p.png")
    quality, _ = panels(summarise(measurements(3, f1=None)))
    assert quality.get_ylabel().startswith("ROUGE-L")


def test_bad_places(report, tmp_path):
    with pytest.raises(ConfigError, match=r"ends in one of \.png, \.svg, \.pdf"):
        write_picture(report, tmp_path / "p.bmp")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_picture(report, tmp_path / "file" / "p.png")


def test_missing_matplotlib_names_the_remedy(report, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvblend\[report\]'"):
        write_picture(report, tmp_path / "p.png")
