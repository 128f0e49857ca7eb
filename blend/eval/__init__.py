"""Measuring: question files, methods side by side on the same tokens, reports that people look at.

Read: `dataset` (questions) or `needles` (invented ones) -> `evaluator` (runs the methods in turns) -> `metrics` -> `report`
(paired intervals, JSON) -> `show` (terminal), `picture`, `page` (HTML). Whether a model may be blended, and at what ratio:
`verify`. Estimates of quality: `estimates`.
Comparing answers and bounding errors is shared with the server: `blend.compare`, `blend.quality`, `blend.intervals`.

In: a `Rag` and `Record`s. Out: a `Report`.
To add a metric: a function of `metrics`, a field of `Measurement` in `evaluator`, a column in `show`.
"""
