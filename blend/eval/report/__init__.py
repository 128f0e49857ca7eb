"""Measurements -> `summarise` (methods compared record by record) -> a table, a JSON file and a picture."""

from blend.eval.report.compare import summarise
from blend.eval.report.document import report_document, write_json
from blend.eval.report.measurement import QUALITY_METRICS, Measurement
from blend.eval.report.picture import write_picture
from blend.eval.report.summary import MethodSummary, Report, RunInfo
from blend.eval.report.table import render_report, report_text

__all__ = [
    "QUALITY_METRICS",
    "Measurement",
    "MethodSummary",
    "Report",
    "RunInfo",
    "render_report",
    "report_document",
    "report_text",
    "summarise",
    "write_json",
    "write_picture",
]
